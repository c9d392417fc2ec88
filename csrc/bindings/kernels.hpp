// The codec's kernels in Python: bound to a format and a device, and the table of them as a capsule.
#pragma once

#include <pybind11/pybind11.h>

namespace pac::bindings {

void bind_kernels(pybind11::module_& module);

}  // namespace pac::bindings
