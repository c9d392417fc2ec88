// Where the memory is: segments and their blocks, as snapshots list them. The library for torch compiles segments.cpp
// too, which knows no allocator.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "allocator/stats.hpp"
#include "allocator/types.hpp"

namespace pac::alloc {

enum class BlockState : std::uint8_t { kFree, kAllocated, kPending };

struct BlockInfo {
  Address address = 0;
  Bytes size = 0;
  Bytes requested = 0;
  BlockState state = BlockState::kFree;
  Context context;  ///< of the allocation
};

struct AddressRange {
  Address address = 0;
  Bytes size = 0;
};

/// A contiguous range of mapped or paused memory, tiled by `blocks` in address order.
struct SegmentInfo {
  Address address = 0;
  Bytes size = 0;
  Stream stream = 0;
  PoolKind kind = PoolKind::kSmall;
  PoolId pool;
  bool expandable = false;  ///< made of mapped handles
  Context context;          ///< of the allocation that caused the last growth
  std::vector<BlockInfo> blocks;
  std::size_t order = 0;               ///< in the report: older segments first, then by address
  std::vector<AddressRange> absent{};  ///< paused parts, which have no memory, by address
};

/// The segments without their paused parts, as snapshots list memory: the sizes add up to the reserved bytes. A block
/// that is paused in part, because other processes have a neighbour open, is cut to the parts with memory.
std::vector<SegmentInfo> with_memory(const std::vector<SegmentInfo>& segments);

/// A memory block in use, and the free bytes that this block alone keeps from being merged or given back.
struct Pin {
  BlockInfo block;
  Bytes pinned = 0;
};

struct Fragmentation {
  Bytes reserved = 0;
  Bytes allocated = 0;
  Bytes pending = 0;
  Bytes free = 0;
  Bytes largest_free = 0;
  Bytes requested = 0;
  Bytes paused = 0;  ///< of allocated bytes: in memory that is paused, and not among the reserved
  std::map<Stream, Bytes> free_by_stream;
  std::map<Bytes, std::uint64_t> histogram;  ///< lower bound (a power of two) -> number of free blocks
  std::map<Bytes, Bytes> free_below;         ///< size (a power of two) -> free bytes in blocks below this size
  std::vector<Pin> pins;                     ///< most pinned bytes first, 10 at most
};

}  // namespace pac::alloc
