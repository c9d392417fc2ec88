// Refusals of the simulated device.
#pragma once

#include <sstream>
#include <stdexcept>

#include "allocator/types.hpp"

namespace pac::alloc {

/// A number written as an address; the text is made only for a refused call.
struct Hex {
  std::uint64_t value;
  friend std::ostream& operator<<(std::ostream& out, Hex hex) {
    return out << "0x" << std::hex << hex.value << std::dec;
  }
};

template <class... Parts>
void require(bool condition, const char* call, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  text << "simulated device: " << call << ": ";
  (text << ... << parts);
  throw std::logic_error(text.str());
}

}  // namespace pac::alloc
