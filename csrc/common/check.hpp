// Checks that throw: file and line, what failed, and the text that says what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#if PAC_CUDA
#include <cuda_runtime_api.h>
#endif

namespace pac {

/// A state of the device or the driver, not a caller's mistake; PyactcompError in Python.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

template <class... Parts>
[[nodiscard]] std::string located(const char* file, int line, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  text << " (" << file << ':' << line << ')';
  return text.str();
}

}  // namespace detail

#if PAC_CUDA
inline void check_cuda(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) return;
  // The status was read: what the runtime still remembers must not surface in somebody else's check.
  [[maybe_unused]] const cudaError_t cleared = cudaGetLastError();
  throw DeviceError(
      detail::located(file, line, expression, " failed: ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)));
}
#endif

}  // namespace pac

/// Throws std::invalid_argument (ValueError in Python) with the given parts as its text.
#define PAC_CHECK(condition, ...)                                                                           \
  do {                                                                                                      \
    if (!(condition)) throw std::invalid_argument(::pac::detail::located(__FILE__, __LINE__, __VA_ARGS__)); \
  } while (false)

/// Throws pac::DeviceError and clears the runtime's last error, unless the call succeeded.
#define PAC_CUDA_CHECK(call) ::pac::check_cuda((call), #call, __FILE__, __LINE__)
