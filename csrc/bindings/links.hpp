#pragma once

#include <pybind11/pybind11.h>

namespace pac::bindings {

/// Adds CudaLink and DelayedLink.
void bind_links(pybind11::module_& module);

}  // namespace pac::bindings
