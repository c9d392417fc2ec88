// Replays in the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace pac::bindings {

void bind_replay(pybind11::module_& module);

}  // namespace pac::bindings
