#include "allocator/diagnosis.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace pac::alloc {

namespace {

constexpr std::size_t kMostPins = 10;

/// The free bytes of a block pinned by its neighbours in use: all but the whole handles inside, which can move.
Bytes stuck_bytes(const Block* block) {
  if (!block || block->state != Block::State::kFree) return 0;
  Bytes stuck = block->size;
  const auto& mappings = block->segment->mappings;
  for (auto at = mappings.lower_bound(block->address); at != mappings.end(); ++at) {
    if (at->first + at->second.size > block->end()) break;
    stuck -= at->second.size;
  }
  return stuck;
}

/// The addresses of [begin, end) that have a mapping and no handle: their memory is paused.
std::vector<AddressRange> absent_ranges(const Segment& segment, Address begin, Address end) {
  std::vector<AddressRange> absent;
  if (!segment.pool->group.paused) return absent;
  auto at = segment.mappings.upper_bound(begin);
  if (at != segment.mappings.begin()) --at;
  for (; at != segment.mappings.end() && at->first < end; ++at) {
    const Address from = std::max(begin, at->first);
    const Address to = std::min(end, at->first + at->second.size);
    if (at->second.handle != kNoHandle || from >= to) continue;
    if (!absent.empty() && absent.back().address + absent.back().size == from) {
      absent.back().size += to - from;
    } else {
      absent.push_back({from, to - from});
    }
  }
  return absent;
}

Bytes sum_of(const std::vector<AddressRange>& ranges) {
  Bytes bytes = 0;
  for (const AddressRange& range : ranges) bytes += range.size;
  return bytes;
}

std::string percent(double share) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << 100.0 * share << " %";
  return text.str();
}

double share(Bytes part, Bytes whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

BlockInfo describe(const Block& block) {
  BlockState state = BlockState::kFree;
  if (block.state == Block::State::kAllocated) state = BlockState::kAllocated;
  if (block.state == Block::State::kPending) state = BlockState::kPending;
  return {block.address, block.size, block.requested, state, block.context};
}

std::vector<SegmentInfo> describe_segments(Heap& heap, PoolId pool) {
  std::vector<SegmentInfo> all;
  for (const Segment& segment : heap.segments()) {  // the oldest first
    const PoolId id = segment.pool->group.id;
    if (!pool.is_default() && id != pool) continue;
    bool open = false;
    for (const Block* block = segment.first; block; block = block->next) {
      if (!block->has_memory()) {
        open = false;
        continue;
      }
      if (!open) {
        all.push_back(
            {block->address, 0, segment.stream, segment.pool->kind, id, segment.expandable, segment.context, {}});
        all.back().order = all.size() - 1;
      }
      open = true;
      const std::vector<AddressRange> absent = absent_ranges(segment, block->address, block->end());
      all.back().absent.insert(all.back().absent.end(), absent.begin(), absent.end());
      all.back().size += block->size;
      all.back().blocks.push_back(describe(*block));
    }
  }
  std::sort(all.begin(), all.end(), [](const SegmentInfo& a, const SegmentInfo& b) { return a.address < b.address; });
  return all;
}

Fragmentation measure_fragmentation(Heap& heap) {
  Fragmentation found;
  found.reserved = static_cast<Bytes>(heap.stats.reserved_bytes.all().current);
  found.allocated = static_cast<Bytes>(heap.stats.allocated_bytes.all().current);
  found.pending = static_cast<Bytes>(heap.stats.active_bytes.all().current) - found.allocated;
  found.requested = static_cast<Bytes>(heap.stats.requested_bytes.all().current);

  std::vector<Pin> pins;
  for (const Segment& segment : heap.segments()) {
    if (segment.pool->group.paused) {
      for (const Block* block = segment.first; block; block = block->next) {
        if (block->state != Block::State::kAllocated) continue;
        found.paused += sum_of(absent_ranges(segment, block->address, block->end()));
      }
      continue;
    }
    for (const Block* block = segment.first; block; block = block->next) {
      if (block->state == Block::State::kFree) {
        Bytes lower = kMinBlockSize;
        while (lower <= block->size / 2) lower *= 2;
        ++found.histogram[lower];
        found.free += block->size;
        found.free_by_stream[segment.stream] += block->size;
        found.largest_free = std::max(found.largest_free, block->size);
        // This block serves no request above its own size.
        found.free_below[2 * lower] += block->size;
      } else if (block->has_memory()) {
        const Bytes pinned = stuck_bytes(block->previous) + stuck_bytes(block->next);
        if (pinned > 0) pins.push_back({describe(*block), pinned});
      }
    }
  }
  Bytes below = 0;
  for (auto& [size, bytes] : found.free_below) bytes = below += bytes;
  const auto more = [](const Pin& a, const Pin& b) { return a.pinned > b.pinned; };
  const std::size_t kept = std::min(kMostPins, pins.size());
  std::partial_sort(pins.begin(), pins.begin() + static_cast<std::ptrdiff_t>(kept), pins.end(), more);
  pins.resize(kept);
  found.pins = std::move(pins);
  return found;
}

namespace {

/// The change of settings that would have made room for the request, computed from the free and growable bytes.
std::string remedy(const Failure& failure, const Fragmentation& found, Heap& heap) {
  const Config& config = heap.config;
  const Bytes size = failure.request.size;
  const Bytes growable = failure.memory.free;
  if (failure.capturing) {
    return "A CUDA graph is being captured, so the allocator could not give cached memory back to the device: run the "
           "same work once before the capture, or call empty_cache() before it.";
  }
  if (config.growth == Growth::kVmm && !failure.refused.empty() && size <= growable) {
    return "The device has enough free memory, but the driver refuses to map it: growth:malloc takes memory without "
           "mapping (PYACTCOMP_ALLOC_CONF=\"growth:malloc\").";
  }
  if (failure.limit != kUnlimited && size <= growable) {
    const double fraction = share(found.reserved + size, failure.memory.total);
    if (fraction <= 1.0) {
      std::ostringstream text;
      text << "The limit is memory_fraction:" << config.memory_fraction << "; with memory_fraction:" << std::fixed
           << std::setprecision(2) << std::min(1.0, fraction + 0.01) << " the request would have fitted.";
      return text.str();
    }
  }
  if (config.growth == Growth::kMalloc && size <= growable + found.free) {
    return "With growth:vmm, which maps free pieces together, the request would have fitted "
           "(PYACTCOMP_ALLOC_CONF=\"growth:vmm\").";
  }
  if (config.max_split_size != kUnlimited && size <= growable + found.free) {
    return "Without max_split_size the request would have fitted: this setting keeps large free blocks whole.";
  }
  Bytes elsewhere = 0;
  heap.for_each_group([&](PoolGroup& group) {
    if (!group.is_private()) return;
    for (const Pool* pool : {&group.small, &group.large, &group.oversize}) {
      for (const Block* block : pool->free) elsewhere += block->size;
    }
  });
  if (elsewhere > 0 && size <= growable + elsewhere) {
    return format_bytes(elsewhere) +
           " are free in private pools (CUDA graphs, MemPools) and serve no other allocation: capture fewer graphs, or "
           "let them share one pool.";
  }
  const Bytes short_of = size - std::min(size, growable + found.free);
  return "No setting of the allocator would have helped: the request needs " +
         format_bytes(std::max(short_of, kMinBlockSize)) +
         " more than is free in any form. Use a smaller batch, pyactcomp.compress(model) or checkpointing.";
}

}  // namespace

std::string explain(const Failure& failure, Heap& heap) {
  const Fragmentation found = measure_fragmentation(heap);
  std::ostringstream text;
  text << "CUDA out of memory. Tried to allocate " << format_bytes(failure.request.requested) << ". " << failure.device
       << " has a total capacity of " << format_bytes(failure.memory.total) << " of which "
       << format_bytes(failure.memory.free) << " is free.";
  if (failure.limit != kUnlimited) text << " memory_fraction allows " << format_bytes(failure.limit) << '.';
  text << " This allocator has reserved " << format_bytes(found.reserved) << ": "
       << format_bytes(found.allocated - found.paused) << " are allocated, " << format_bytes(found.pending)
       << " are freed but still used by other streams, and " << format_bytes(found.free)
       << " are free. The largest free block is " << format_bytes(found.largest_free) << "; external fragmentation is "
       << percent(found.free == 0 ? 0.0 : 1.0 - share(found.largest_free, found.free)) << ", internal "
       << percent(found.allocated == 0 ? 0.0
                                       : 1.0 - std::min(1.0, share(found.requested, found.allocated + found.pending)))
       << '.';
  if (found.paused > 0) {
    text << ' ' << format_bytes(found.paused) << " more are allocated and paused, without memory of the device.";
  }
  if (!found.pins.empty()) {
    const Pin& pin = found.pins.front();
    text << " The memory block of " << format_bytes(pin.block.size) << " at 0x" << std::hex << pin.block.address
         << std::dec << " pins the most free memory, " << format_bytes(pin.pinned)
         << " (pyactcomp.allocator.stats()[\"pins\"] lists more, with call stacks if memory history is recorded).";
  } else {
    text << " No memory block pins free memory.";
  }
  if (!failure.refused.empty()) text << " The driver refused more: " << failure.refused << '.';
  if (!failure.callback_error.empty()) text << " A pressure callback failed: " << failure.callback_error << '.';
  text << ' ' << remedy(failure, found, heap);
  return text.str();
}

}  // namespace pac::alloc
