#include "bindings/allocator_config.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "allocator/config.hpp"
#include "bindings/python_values.hpp"

namespace py = pybind11;

namespace pac::bindings {
namespace {

using alloc::Config;
using alloc::Growth;

const char* name(Growth growth) { return growth == Growth::kVmm ? "vmm" : "malloc"; }

/// One number of divisions for every interval, or {lower bound in MiB: divisions}, where ">" means all that are larger.
Config with_divisions(const Config& base, const py::object& divisions) {
  const char* const count_name = "a number of divisions in roundup_power2_divisions";
  if (!py::isinstance<py::dict>(divisions)) {
    return alloc::parse_config("roundup_power2_divisions:" + std::to_string(to_number(count_name, divisions)), base);
  }
  std::string list;
  for (const auto& [interval, count] : py::reinterpret_borrow<py::dict>(divisions)) {
    list += list.empty() ? "" : ",";
    list += interval.equal(py::str(">"))
                ? ">"
                : std::to_string(to_number("an interval in roundup_power2_divisions", interval));
    list += ":" + std::to_string(to_number(count_name, count));
  }
  return alloc::parse_config("roundup_power2_divisions:[" + list + "]", base);
}

Config make_config(const std::string& growth, const py::object& max_split_size,
                   const py::object& max_non_split_rounding, const py::object& large_segment_size,
                   const py::object& roundup_power2_divisions, const py::object& garbage_collection_threshold,
                   const py::object& memory_fraction, const py::object& initial_pool_size) {
  Config config;
  if (growth == name(Growth::kMalloc)) {
    config.growth = Growth::kMalloc;
  } else if (growth != name(Growth::kVmm)) {
    throw py::value_error("growth must be 'vmm' or 'malloc', got '" + growth + "'");
  }
  if (!max_split_size.is_none()) config.max_split_size = to_bytes("max_split_size", max_split_size);
  config.max_non_split_rounding = to_bytes("max_non_split_rounding", max_non_split_rounding);
  config.large_segment_size = to_bytes("large_segment_size", large_segment_size);
  config.garbage_collection_threshold = to_share("garbage_collection_threshold", garbage_collection_threshold);
  config.memory_fraction = to_share("memory_fraction", memory_fraction);
  config.initial_pool_size = to_bytes("initial_pool_size", initial_pool_size);
  if (!roundup_power2_divisions.is_none()) config = with_divisions(config, roundup_power2_divisions);
  alloc::validate(config);
  return config;
}

py::dict divisions(const Config& config) {
  py::dict result;
  for (std::size_t interval = 0; interval < config.roundup_power2_divisions.size(); ++interval) {
    result[py::int_(1U << interval)] = config.roundup_power2_divisions[interval];
  }
  return result;
}

}  // namespace

void bind_config(py::module_& module) {
  const Config defaults;
  py::class_<Config>(module, "AllocatorConfig", "Settings of an allocator; sizes are bytes or texts like '512MiB'.")
      .def(py::init(&make_config), py::arg("growth") = name(defaults.growth), py::arg("max_split_size") = py::none(),
           py::arg("max_non_split_rounding") = defaults.max_non_split_rounding,
           py::arg("large_segment_size") = defaults.large_segment_size,
           py::arg("roundup_power2_divisions") = py::none(),
           py::arg("garbage_collection_threshold") = defaults.garbage_collection_threshold,
           py::arg("memory_fraction") = defaults.memory_fraction,
           py::arg("initial_pool_size") = defaults.initial_pool_size)
      .def_static(
          "parse",
          [](const std::string& text, const std::optional<Config>& base) {
            return alloc::parse_config(text, base.value_or(Config()));
          },
          py::arg("text"), py::arg("base") = py::none())
      .def_property_readonly("growth", [](const Config& self) { return name(self.growth); })
      .def_property_readonly("max_split_size",
                             [](const Config& self) {
                               return self.max_split_size == alloc::kUnlimited ? py::object(py::none())
                                                                               : py::int_(self.max_split_size);
                             })
      .def_readonly("max_non_split_rounding", &Config::max_non_split_rounding)
      .def_readonly("large_segment_size", &Config::large_segment_size)
      .def_property_readonly("roundup_power2_divisions", &divisions)
      .def_readonly("garbage_collection_threshold", &Config::garbage_collection_threshold)
      .def_readonly("memory_fraction", &Config::memory_fraction)
      .def_readonly("initial_pool_size", &Config::initial_pool_size)
      .def("__str__", &alloc::to_string)
      .def("__repr__", [](const Config& self) { return "AllocatorConfig.parse('" + alloc::to_string(self) + "')"; })
      .def("__eq__", [](const Config& self, const py::object& other) {
        return py::isinstance<Config>(other) && self == other.cast<const Config&>();
      });
}

}  // namespace pac::bindings
