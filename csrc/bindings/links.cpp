#include "bindings/links.hpp"

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <utility>

#include "common/check.hpp"
#include "device/delayed_link.hpp"

#if PAC_CUDA_ALLOCATOR
#include "device/cuda_link.hpp"
#endif

namespace py = pybind11;

namespace pac::bindings {
namespace {

/// What the engine takes; the Python object must outlive the use.
py::capsule capsule_of(Link& link) { return py::capsule(&link, kLinkCapsule); }

DelayedLink::When when_of(const std::string& name) {
  if (name == "early") return DelayedLink::When::kEarly;
  if (name == "late") return DelayedLink::When::kLate;
  PAC_CHECK(name == "random", "copies run early, late or random, got ", name);
  return DelayedLink::When::kRandom;
}

}  // namespace

void bind_links(py::module_& module) {
  py::class_<DelayedLink>(module, "DelayedLink",
                          "A link without a device, for tests: copies run early, late or at random.")
      .def(py::init([](const std::string& when, std::uint64_t seed, std::size_t host_memory) {
             return new DelayedLink(when_of(when), seed, host_memory);  // NOLINT: pybind11 owns it
           }),
           py::arg("when") = "late", py::arg("seed") = 0, py::arg("host_memory") = std::size_t{1} << 40)
      .def_property_readonly("link", [](DelayedLink& self) { return capsule_of(self); })
      .def_readwrite("capturing", &DelayedLink::capturing)
      .def_readwrite("clock", &DelayedLink::clock)
      .def_readwrite("rate", &DelayedLink::rate)
      .def("measure", [](const DelayedLink& self, std::size_t, int) { return std::pair(self.rate, self.rate); })
      .def_property_readonly("pinned", &DelayedLink::pinned)
      .def_property_readonly("pins", &DelayedLink::pins)
      .def_property_readonly("queued", &DelayedLink::queued)
      .def_property_readonly("live_events", &DelayedLink::live_events);
#if PAC_CUDA_ALLOCATOR
  py::class_<CudaLink>(module, "CudaLink", "Copies between a CUDA device and pinned host memory, on two streams.")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("link", [](CudaLink& self) { return capsule_of(self); })
      .def_property_readonly("streams", &CudaLink::streams)
      .def_readwrite("repeat", &CudaLink::repeat)
      .def_property_readonly("is_integrated", &CudaLink::is_integrated)
      .def_property_readonly("pci_address",
                             [](const CudaLink& self) {
                               std::array<char, 32> text{};
                               self.pci_address(text.data(), static_cast<int>(text.size()));
                               return std::string(text.data());
                             })
      .def("measure", &CudaLink::measure, py::arg("size"), py::arg("rounds"), py::call_guard<py::gil_scoped_release>());
#endif
}

}  // namespace pac::bindings
