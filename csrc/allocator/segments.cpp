#include "allocator/segments.hpp"

#include <algorithm>
#include <utility>

namespace pac::alloc {

namespace {

/// The part of a block in a range of addresses.
BlockInfo part_of(const BlockInfo& block, Address begin, Address end) {
  BlockInfo part = block;
  part.address = std::max(begin, block.address);
  part.size = std::min(end, block.address + block.size) - part.address;
  const Bytes before = part.address - block.address;
  part.requested = std::min(part.size, block.requested - std::min(block.requested, before));
  return part;
}

/// One segment for each part of a segment with memory.
void add_parts(const SegmentInfo& segment, std::vector<SegmentInfo>& parts) {
  Address begin = segment.address;
  std::size_t next = 0;
  const auto add_until = [&](Address end) {
    if (begin >= end) return;
    SegmentInfo part = segment;
    part.address = begin;
    part.size = end - begin;
    part.absent.clear();
    part.blocks.clear();
    while (next < segment.blocks.size() && segment.blocks[next].address + segment.blocks[next].size <= begin) ++next;
    for (std::size_t i = next; i < segment.blocks.size() && segment.blocks[i].address < end; ++i) {
      part.blocks.push_back(part_of(segment.blocks[i], begin, end));
    }
    parts.push_back(std::move(part));
  };
  for (const AddressRange& range : segment.absent) {
    add_until(range.address);
    begin = range.address + range.size;
  }
  add_until(segment.address + segment.size);
}

}  // namespace

std::vector<SegmentInfo> with_memory(const std::vector<SegmentInfo>& segments) {
  std::vector<SegmentInfo> parts;
  parts.reserve(segments.size());
  for (const SegmentInfo& segment : segments) {
    if (segment.absent.empty()) {
      parts.push_back(segment);
    } else {
      add_parts(segment, parts);
    }
  }
  return parts;
}

}  // namespace pac::alloc
