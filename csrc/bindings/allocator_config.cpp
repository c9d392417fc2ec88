#include "bindings/allocator_config.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "allocator/config.hpp"
#include "bindings/python_values.hpp"

namespace py = pybind11;

namespace pac::bindings {
namespace {

using alloc::Bytes;
using alloc::Config;
using alloc::Divisions;
using alloc::Growth;
using alloc::kSettings;
using alloc::Setting;

py::object to_python(Growth growth) { return py::str(growth == Growth::kVmm ? "vmm" : "malloc"); }
py::object to_python(Bytes size) { return size == alloc::kUnlimited ? py::object(py::none()) : py::int_(size); }
py::object to_python(double share) { return py::float_(share); }
py::object to_python(bool value) { return py::bool_(value); }
py::object to_python(const Divisions& divisions) {
  py::dict result;
  for (std::size_t interval = 0; interval < divisions.size(); ++interval) {
    result[py::int_(1U << interval)] = divisions[interval];
  }
  return result;
}

py::object get(const Config& config, const Setting& setting) {
  return std::visit([&](auto field) { return to_python(config.*field); }, setting.field);
}

void read(const char* name, py::handle value, Growth& growth) {
  if (!py::isinstance<py::str>(value)) throw py::type_error(std::string(name) + " must be 'vmm' or 'malloc'");
  const auto text = value.cast<std::string>();
  if (text != "vmm" && text != "malloc") {
    throw py::value_error(std::string(name) + " must be 'vmm' or 'malloc', got '" + text + "'");
  }
  growth = text == "vmm" ? Growth::kVmm : Growth::kMalloc;
}

void read(const char* name, py::handle value, Bytes& size) { size = to_bytes(name, value); }
void read(const char* name, py::handle value, double& share) { share = to_share(name, value); }

void read(const char* name, py::handle value, bool& flag) {
  if (!py::isinstance<py::bool_>(value)) throw py::type_error(std::string(name) + " must be True or False");
  flag = value.cast<bool>();
}

/// One number of divisions for every interval, or {lower bound in MiB: divisions}, where ">" means all that are larger.
void read(const char* name, py::handle value, Divisions& divisions) {
  const std::string count_name = std::string("a number of divisions in ") + name;
  const auto number = [](const std::string& of, py::handle each) {
    return std::to_string(to_number(of.c_str(), each));
  };
  std::string text;
  if (!py::isinstance<py::dict>(value)) {
    text = number(count_name, value);
  } else {
    for (const auto& [interval, count] : py::reinterpret_borrow<py::dict>(value)) {
      text += text.empty() ? "[" : ",";
      text += interval.equal(py::str(">")) ? ">" : number(std::string("an interval in ") + name, interval);
      text += ":" + number(count_name, count);
    }
    text = text.empty() ? "[]" : text + "]";
  }
  divisions = alloc::parse_config(std::string(name) + ":" + text).*(&Config::roundup_power2_divisions);
}

/// The settings with some of them replaced, by name.
Config with_values(Config config, const py::dict& values) {
  std::size_t known = 0;
  for (const Setting& setting : kSettings) {
    const std::string name(setting.name);
    if (!values.contains(name)) continue;
    ++known;
    const py::object value = values[name.c_str()];
    std::visit(
        [&](auto field) {
          const auto usual = Config().*field;
          // None stands for a default that has no other spelling.
          const bool unset =
              value.is_none() && (std::is_same_v<decltype(usual), const Divisions> || to_python(usual).is_none());
          unset ? void(config.*field = usual) : read(name.c_str(), value, config.*field);
        },
        setting.field);
  }
  if (known != values.size()) {
    std::string names;
    for (const Setting& setting : kSettings) names.append(names.empty() ? "" : ", ").append(setting.name);
    throw py::type_error("AllocatorConfig takes " + names + ", got " + py::str(py::list(values)).cast<std::string>());
  }
  alloc::validate(config);
  return config;
}

Config make_config(const py::args& positional, const py::kwargs& keywords) {
  py::dict values = keywords.attr("copy")();
  if (positional.size() > std::size(kSettings)) throw py::type_error("AllocatorConfig takes fewer arguments");
  for (std::size_t i = 0; i < positional.size(); ++i) {
    const std::string name(kSettings[i].name);
    if (values.contains(name)) throw py::type_error("AllocatorConfig got two values for " + name);
    values[name.c_str()] = positional[i];
  }
  return with_values(Config(), values);
}

/// The table of settings, by name.
py::dict settings() {
  py::dict result;
  for (const Setting& setting : kSettings) {
    py::dict row;
    row["keys"] = setting.keys();
    row["families"] = py::str(setting.families).attr("split")();
    row["default"] = get(Config(), setting);
    row["range"] = setting.range;
    row["meaning"] = setting.meaning;
    result[py::str(setting.name)] = row;
  }
  return result;
}

/// PyTorch's keys without an effect, with the reasons.
py::dict foreign() {
  py::dict result;
  for (const alloc::ForeignKey& key : alloc::kForeignKeys) result[py::str(key.name)] = key.reason;
  return result;
}

}  // namespace

void bind_config(py::module_& module) {
  py::class_<Config> type(module, "AllocatorConfig",
                          "Settings of an allocator; sizes are bytes or texts like '512MiB'.");
  type.def(py::init(&make_config))
      .def_static("settings", &settings)
      .def_static("foreign", &foreign)
      .def_static(
          "parse",
          [](const std::string& text, const std::optional<Config>& base) {
            return alloc::parse_config(text, base.value_or(Config()));
          },
          py::arg("text"), py::arg("base") = py::none())
      .def("replace", [](const Config& self, const py::kwargs& values) { return with_values(self, values); })
      .def("__str__", &alloc::to_string)
      .def("__repr__", [](const Config& self) { return "AllocatorConfig.parse('" + alloc::to_string(self) + "')"; })
      .def("__eq__", [](const Config& self, const py::object& other) {
        return py::isinstance<Config>(other) && self == other.cast<const Config&>();
      });
  for (const Setting& setting : kSettings) {
    type.def_property_readonly(std::string(setting.name).c_str(),
                               [&setting](const Config& self) { return get(self, setting); });
  }
}

}  // namespace pac::bindings
