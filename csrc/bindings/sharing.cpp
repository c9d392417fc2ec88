#include "bindings/sharing.hpp"

#include <pybind11/stl.h>

#include <string>

#include "allocator/sharing.hpp"
#include "device/simulated_device.hpp"

namespace py = pybind11;

namespace pac::bindings {

void bind_sharing(py::module_& module) {
  py::class_<OpenedBlock>(module, "OpenedBlock", "A memory block of another process, open until close().")
      .def_property_readonly("address",
                             [](const OpenedBlock& self) {
                               if (!self.memory) throw py::value_error("the block was closed before");
                               return *self.memory;
                             })
      .def("close", [](OpenedBlock& self) { self.memory.reset(); });
  py::class_<alloc::Importer, std::shared_ptr<alloc::Importer>>(module, "Importer",
                                                                "Memory of other allocators, opened on one device.")
      .def(py::init([](const std::shared_ptr<alloc::SimulatedDevice>& device) {
             return std::make_shared<alloc::Importer>(device);
           }),
           py::arg("device"))
      .def(
          "open",
          [](alloc::Importer& self, const py::bytes& text) -> std::optional<OpenedBlock> {
            const auto block = alloc::from_text(std::string(text));
            return block ? opened(self.open(*block)) : std::nullopt;
          },
          py::arg("text"))
      .def_property_readonly("mapped", &alloc::Importer::mapped);
}

}  // namespace pac::bindings
