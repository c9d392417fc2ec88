#include "bindings/simulated_device.hpp"

#include <cstdint>
#include <memory>
#include <string>

#include "bindings/python_values.hpp"
#include "device/simulated_device.hpp"

namespace py = pybind11;

namespace pac::bindings {

using alloc::SimulatedDevice;

namespace {

py::dict calls(const SimulatedDevice& device) {
  const SimulatedDevice::Calls calls = device.calls();
  py::dict result;
  result["acquire"] = calls.acquire;
  result["release"] = calls.release;
  result["reserve"] = calls.reserve;
  result["unreserve"] = calls.unreserve;
  result["create"] = calls.create;
  result["destroy"] = calls.destroy;
  result["map"] = calls.map;
  result["unmap"] = calls.unmap;
  result["export"] = calls.exports;
  result["import"] = calls.imports;
  result["record"] = calls.record;
  result["query"] = calls.query;
  result["wait"] = calls.wait;
  result["synchronize"] = calls.synchronize;
  result["dependencies"] = calls.dependencies;
  result["synchronising"] = calls.synchronising;
  return result;
}

}  // namespace

void bind_simulated_device(py::module_& module) {
  py::class_<SimulatedDevice, std::shared_ptr<SimulatedDevice>>(
      module, "SimulatedDevice", "A simulated CUDA device: as strict as the driver, without a GPU.")
      .def(py::init([](const py::object& capacity, bool virtual_memory, bool asynchronous) {
             return std::make_shared<SimulatedDevice>(to_bytes("capacity", capacity), virtual_memory, asynchronous);
           }),
           py::arg("capacity"), py::arg("virtual_memory") = true, py::arg("asynchronous") = true)
      .def(
          "complete",
          [](SimulatedDevice& self, const py::object& stream, const py::object& count) {
            self.complete(to_number("stream", stream), count.is_none() ? UINT64_MAX : to_number("count", count));
          },
          py::arg("stream") = 0, py::arg("count") = py::none())
      .def("complete_all", &SimulatedDevice::complete_all)
      .def(
          "fail",
          [](SimulatedDevice& self, const std::string& call, const py::object& count, const py::object& skip) {
            self.fail(call, to_number("count", count), to_number("skip", skip));
          },
          py::arg("call"), py::arg("count") = 1, py::arg("skip") = 0)
      .def(
          "begin_capture",
          [](SimulatedDevice& self, const py::object& stream) { self.begin_capture(to_number("stream", stream)); },
          py::arg("stream"))
      .def(
          "launch", [](SimulatedDevice& self, const py::object& stream) { self.launch(to_number("stream", stream)); },
          py::arg("stream"))
      .def(
          "join",
          [](SimulatedDevice& self, const py::object& stream, const py::object& awaited) {
            self.join(to_number("stream", stream), to_number("awaited", awaited));
          },
          py::arg("stream"), py::arg("awaited"))
      .def(
          "end_capture",
          [](SimulatedDevice& self, const py::object& stream) { self.end_capture(to_number("stream", stream)); },
          py::arg("stream"))
      .def("calls", &calls)
      .def(
          "write",
          [](SimulatedDevice& self, const py::object& address, const py::object& value) {
            self.write(to_number("address", address), to_number("value", value));
          },
          py::arg("address"), py::arg("value"))
      .def(
          "read",
          [](const SimulatedDevice& self, const py::object& address) {
            return self.read(to_number("address", address));
          },
          py::arg("address"))
      .def(
          "limit_host", [](SimulatedDevice& self, const py::object& size) { self.limit_host(to_bytes("size", size)); },
          py::arg("size"))
      .def_property_readonly("addresses", &SimulatedDevice::addresses)
      .def_property_readonly("pinned", &SimulatedDevice::pinned)
      .def_property_readonly("reserved", &SimulatedDevice::reserved)
      .def_property_readonly("kept_by_importers", &SimulatedDevice::kept_by_importers)
      .def_property_readonly("open_exports", &SimulatedDevice::open_exports)
      .def(
          "shared_memory",
          [](const SimulatedDevice& self, const py::object& address) {
            return self.shared_memory(to_number("address", address));
          },
          py::arg("address"))
      .def(
          "physical",
          [](const SimulatedDevice& self, const py::object& address) {
            const SimulatedDevice::Piece piece = self.physical(to_number("address", address));
            return py::make_tuple(piece.handle, piece.offset, piece.size);
          },
          py::arg("address"))
      .def("now", &SimulatedDevice::now)
      .def(
          "finished",
          [](const SimulatedDevice& self, const py::object& stream, const py::object& point) {
            return self.finished(to_number("stream", stream), to_number("point", point));
          },
          py::arg("stream"), py::arg("point"))
      .def_property_readonly("capacity", &SimulatedDevice::capacity)
      .def_property_readonly("live_events", &SimulatedDevice::live_events)
      .def_property_readonly("driver_seconds", &SimulatedDevice::driver_seconds);
}

}  // namespace pac::bindings
