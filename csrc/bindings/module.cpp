// The Python module pyactcomp._core: the codec's kernels, taking addresses; and the allocator.
#include <pybind11/pybind11.h>

#include <exception>

#include "bindings/allocator.hpp"
#include "bindings/kernels.hpp"
#include "bindings/links.hpp"
#include "bindings/recording.hpp"
#include "bindings/replay.hpp"
#include "common/check.hpp"

namespace py = pybind11;

namespace {

void raise_as_pyactcomp_error(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const pac::DeviceError& device_error) {
    py::set_error(py::module_::import("pyactcomp.errors").attr("PyactcompError"), device_error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "The native codec, raw addresses in and nothing checked on the hot path, and the native allocator; no torch.";
  py::register_local_exception_translator(&raise_as_pyactcomp_error);

  pac::bindings::bind_kernels(module);
  pac::bindings::bind_links(module);
  pac::bindings::bind_allocator(module);
  pac::bindings::bind_recording(module);
  pac::bindings::bind_replay(module);
}
