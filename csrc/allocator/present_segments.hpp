// Segments as snapshots list them. The library for torch compiles this file too: it holds no allocator.
#pragma once

#include <vector>

#include "allocator/allocator.hpp"

namespace pac::alloc {

/// The segments without their paused parts, as snapshots list memory: the sizes add up to the reserved bytes. A block
/// that is paused in part, because other processes have a neighbour open, is cut to the parts with memory.
std::vector<SegmentInfo> with_memory(const std::vector<SegmentInfo>& segments);

}  // namespace pac::alloc
