#pragma once

#include <pybind11/pybind11.h>

namespace pac::bindings {

/// Adds SimulatedDevice.
void bind_simulated_device(pybind11::module_& module);

}  // namespace pac::bindings
