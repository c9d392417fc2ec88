// Checks that throw, with the failed condition in words, the file and the line.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

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

}  // namespace pac

/// Throws std::invalid_argument (ValueError in Python) with the given parts as the text.
#define PAC_CHECK(condition, ...)                                                                           \
  do {                                                                                                      \
    if (!(condition)) throw std::invalid_argument(::pac::detail::located(__FILE__, __LINE__, __VA_ARGS__)); \
  } while (false)
