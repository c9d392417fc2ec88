// Where the memory is: snapshots, fragmentation, and the text of an out-of-memory error.
#pragma once

#include <string>
#include <vector>

#include "allocator/heap.hpp"
#include "allocator/segments.hpp"
#include "device/device.hpp"

namespace pac::alloc {

/// The mapped and the paused memory of every pool, or of one private pool.
std::vector<SegmentInfo> describe_segments(Heap& heap, PoolId pool);

BlockInfo describe(const Block& block);

Fragmentation measure_fragmentation(Heap& heap);

struct Failure {
  const Request& request;
  std::string device;
  Device::Memory memory;
  Bytes limit = kUnlimited;
  bool capturing = false;
  std::string refused;  ///< the driver's words, if it refused virtual memory
  std::string callback_error;
};

std::string explain(const Failure& failure, Heap& heap);

}  // namespace pac::alloc
