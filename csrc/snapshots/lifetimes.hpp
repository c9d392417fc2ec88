// When a recording's blocks lived, from its events alone: a block is freed once, and overlaps no other.
#pragma once

#include <cstdint>
#include <vector>

#include "snapshots/event_columns.hpp"

namespace pac::alloc {

/// The blocks that the events leave open at either end.
struct OpenLifetimes {
  /// A block that was freed without having been allocated.
  struct Freed {
    Address address;
    std::size_t event;  ///< of its free
  };
  /// A block that lives after the last event.
  struct Left {
    Address address;
    std::int64_t event;  ///< that allocated it; -1: none did, but its free was requested
  };
  std::vector<Freed> freed;
  std::vector<Left> left;
};

/// A block that existed before the first event.
struct ExistingBlock {
  Address address;
  Bytes size;
  bool may_be_wrong;  ///< known from the segments at the end alone, which an event may contradict
};

/// Both throw std::invalid_argument, which names the event of the device, for events that no allocator has.
OpenLifetimes find_open_lifetimes(const EventColumns& events, std::size_t device);

/// Returns the addresses of the existing blocks that an event contradicts.
std::vector<Address> check_overlaps(const EventColumns& events, const std::vector<ExistingBlock>& existing,
                                    std::size_t device);

}  // namespace pac::alloc
