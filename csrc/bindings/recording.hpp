#pragma once

#include <pybind11/pybind11.h>

namespace pac::bindings {

void bind_recording(pybind11::module_& module);

}  // namespace pac::bindings
