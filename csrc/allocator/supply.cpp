#include "allocator/supply.hpp"

#include <algorithm>

namespace pac::alloc {

namespace {

thread_local int source_calls = 0;

}  // namespace

SegmentSourceCall::SegmentSourceCall() { ++source_calls; }
SegmentSourceCall::~SegmentSourceCall() { --source_calls; }
bool inside_segment_source() { return source_calls > 0; }

Supply::Supply(Heap& heap, Device& device, StreamOrder& order)
    : heap_(heap), device_(device), order_(order), total_(device.memory().total) {}

Bytes Supply::limit() const {
  const double fraction = heap_.config.memory_fraction;
  return fraction < 1.0 ? static_cast<Bytes>(fraction * static_cast<double>(total_)) : kUnlimited;
}

bool Supply::within_limit(Bytes size) const {
  const auto reserved = static_cast<Bytes>(heap_.stats.reserved_bytes.all().current);
  return size <= limit() && reserved <= limit() - size;
}

Bytes Supply::garbage_threshold() const {
  const double share = heap_.config.garbage_collection_threshold;
  if (share <= 0.0) return kUnlimited;
  return static_cast<Bytes>(share * static_cast<double>(std::min(limit(), total_)));
}

Bytes Supply::at_least_initial(const Request& request, Bytes size) {
  if (grew_initially_ || request.pool->group.is_private() || request.tag != 0 || request.pool->kind != PoolKind::kLarge)
    return size;
  grew_initially_ = true;  // also if the growth fails: the next attempt asks for less
  return std::max(size, round_up(heap_.config.initial_pool_size, kRoundLarge));
}

void Supply::release_ranges() {
  for (Segment& segment : heap_.segments()) {
    if (!segment.expandable) continue;
    for (const auto& [address, mapping] : segment.mappings) {
      if (mapping.handle == kNoHandle) continue;
      if (mapping.descriptor >= 0) device_.close_export(mapping.descriptor);
      device_.unmap(address, mapping.size);
      device_.destroy(mapping.handle, mapping.size);
    }
    device_.unreserve(segment.address, segment.size);
  }
}

Bytes acquired_size(const Config& config, Bytes request) {
  if (request <= kSmallSize) return kSmallBuffer;
  if (request < kMinLargeAlloc) return config.large_segment_size;
  return round_up(request, kRoundLarge);
}

Block* Supply::add_acquired(const Request& request, Address address, Bytes size) {
  Segment& segment = heap_.add_segment(address, size, request.stream, *request.pool, false, *request.context);
  heap_.count_reserved(segment, size, 1);
  heap_.log(Action::kSegmentAlloc, segment.address, size, segment, *request.context);
  return segment.first;
}

Block* Supply::find_fit(const Request& request) {
  Pool& pool = *request.pool;
  const Bytes max_split = heap_.config.max_split_size;
  const auto smallest = pool.free.lower_bound(FitKey{request.stream, request.size, 0});
  if (smallest == pool.free.end() || (*smallest)->stream() != request.stream) return nullptr;
  Block* block = *best_fit(pool, smallest);
  // Under vmm growth a large free block was merged from many: splitting pins nothing. PyTorch's expandable segments
  // keep the block whole all the same.
  const bool keeps_whole = heap_.config.growth != Growth::kVmm || !block->segment->expandable;
  if (request.size < max_split && block->size >= max_split && keeps_whole) return nullptr;
  const bool oversize = request.size >= max_split;
  return oversize && block->size - request.size >= heap_.config.max_non_split_rounding ? nullptr : block;
}

}  // namespace pac::alloc
