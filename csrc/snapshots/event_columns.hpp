#pragma once

#include <cstddef>
#include <cstdint>

#include "allocator/history.hpp"

namespace pac::alloc {

/// A recording's events, in order, one array per field; the owner of the columns keeps the arrays alive.
struct EventColumns {
  std::size_t count = 0;
  const std::uint8_t* action = nullptr;  ///< an Action
  const Address* address = nullptr;
  const Bytes* size = nullptr;  ///< requested
  const Stream* stream = nullptr;
  const std::uint32_t* pool = nullptr;  ///< an index among the pools

  Action action_at(std::size_t row) const { return static_cast<Action>(action[row]); }
};

}  // namespace pac::alloc
