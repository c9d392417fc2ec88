// Lifetimes of a recording's memory blocks, from the events alone: each block is freed once, and overlaps no other.
#pragma once

#include <cstdint>
#include <vector>

#include "snapshots/event_columns.hpp"

namespace pac::alloc {

/// Blocks with a missing event: no allocation, or no free.
struct OpenLifetimes {
  /// A block freed without an allocation.
  struct Freed {
    Address address;
    std::size_t event;  ///< the free
  };
  /// A block alive after the last event.
  struct Left {
    Address address;
    std::int64_t event;  ///< the allocation; -1: there is none, but a free was requested
  };
  std::vector<Freed> freed;
  std::vector<Left> left;
};

/// A block alive before the first event.
struct ExistingBlock {
  Address address;
  Bytes size;
  bool may_be_wrong;  ///< known from the final segments alone: events may contradict the block
};

/// Both functions throw std::invalid_argument, naming the device's event, for events that no allocator has.
OpenLifetimes find_open_lifetimes(const EventColumns& events, std::size_t device);

/// Returns the addresses of the existing blocks contradicted by an event.
std::vector<Address> check_overlaps(const EventColumns& events, const std::vector<ExistingBlock>& existing,
                                    std::size_t device);

}  // namespace pac::alloc
