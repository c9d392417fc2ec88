// Counters with PyTorch's names and meaning.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

#include "allocator/types.hpp"

namespace pac::alloc {

struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;

  void increase(std::int64_t amount) {
    current += amount;
    allocated += amount;
    peak = std::max(peak, current);
  }
  void decrease(std::int64_t amount) {
    current -= amount;
    freed += amount;
  }
  void reset_peak() { peak = current; }
  void reset_accumulated() { allocated = freed = 0; }
};

enum class PoolKind : std::uint8_t { kSmall = 1, kLarge = 2 };

/// One counter for all memory, one for the small pool and one for the large pool.
struct StatArray {
  std::array<Stat, 3> of{};  ///< all, small_pool, large_pool

  Stat& all() { return of[0]; }
  const Stat& all() const { return of[0]; }
  void increase(PoolKind kind, std::int64_t amount) {
    of[0].increase(amount);
    of[static_cast<std::size_t>(kind)].increase(amount);
  }
  void decrease(PoolKind kind, std::int64_t amount) {
    of[0].decrease(amount);
    of[static_cast<std::size_t>(kind)].decrease(amount);
  }
};

struct Stats {
  // Counts.
  StatArray allocation, segment, active, inactive_split;
  // Bytes. Active is allocated plus pending blocks (other streams still use them); requested is before rounding.
  StatArray allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;
  std::map<PoolId, Stat> reserved_bytes_by_private_pool;
  Stat oversize_allocations, oversize_segments;
  std::int64_t num_alloc_retries = 0;
  std::int64_t num_ooms = 0;
  std::int64_t num_sync_all_streams = 0;
  std::int64_t num_device_alloc = 0;   ///< acquired segments and mapped handles
  std::int64_t num_device_free = 0;    ///< released segments and unmapped handles
  std::int64_t num_pieces_moved = 0;   ///< free handles mapped elsewhere in place of new ones
  std::int64_t num_stream_steals = 0;  ///< handles moved to another stream
  double driver_seconds = 0.0;         ///< host time inside the device's memory calls
};

}  // namespace pac::alloc
