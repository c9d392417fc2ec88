// The streams on which a thread queues work, as integers.
#pragma once

#include <cstdint>

#include "engine/python.hpp"

namespace pac::engine {

/// Return the current stream of a CUDA device as an integer, by torch's own function: no function of this module is
/// compiled for CUDA, so that one build fits torch's builds with and without it.
inline std::int64_t current_stream(int device) {
  const Ref index(PyLong_FromLong(device));
  return integer(checked(PyObject_CallOneArg(constants().current_raw_stream, index.get())).get());
}

/// Return the current stream of a tensor's device as an integer; 0 on other devices than CUDA's.
inline std::int64_t stream_of(const at::TensorBase& tensor) {
  return tensor.is_cuda() ? current_stream(tensor.get_device()) : 0;
}

}  // namespace pac::engine
