// Segments from elsewhere: of a pool's own source, and of a recording.
#include <optional>
#include <utility>

#include "allocator/caching_allocator.hpp"
#include "common/check.hpp"

namespace pac::alloc {

Block* CachingAllocator::grow_from_source(Request& request, Lock& lock) {
  const std::shared_ptr<SegmentSource> source = request.pool->group.source;
  const Bytes size = acquired_size(heap_.config, request.size);
  if (!malloc_->within_limit(size)) return nullptr;
  std::optional<Address> address;
  std::exception_ptr error;
  lock.unlock();
  try {
    const SegmentSourceCall call;
    address = source->acquire(size, request.stream);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error) std::rethrow_exception(error);
  PoolGroup& group = group_for(request.stream, request.tag);  // the lock was dropped, and the pool may be gone
  if (!address) {
    request.pool = &supply_for(group).pool_of(group, request.size);
    return nullptr;
  }
  if (group.source != source) {  // the thread's pool changed meanwhile
    malloc_->returned.push_back({source, *address, size});
    return_segments(lock);
    return attempt(request, Effort::kNormal, lock);
  }
  request.pool = &malloc_->pool_of(group, request.size);
  return malloc_->add_acquired(request, *address, size);
}

void CachingAllocator::return_segments(Lock& lock) {
  while (!malloc_->returned.empty()) {
    const ReturnedSegment segment = std::move(malloc_->returned.back());
    malloc_->returned.pop_back();
    lock.unlock();
    std::exception_ptr error;
    try {
      const SegmentSourceCall call;
      segment.source->release(segment.address, segment.size);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) std::rethrow_exception(error);
  }
}

void CachingAllocator::adopt(const SegmentInfo& info) {
  const Lock lock(mutex_);
  PAC_CHECK(heap_.config.growth == Growth::kMalloc && !info.expandable,
            "only segments of malloc growth can be adopted");
  PAC_CHECK(info.size > 0 && info.size % kMinBlockSize == 0, "a segment has a multiple of 512 bytes, got ", info.size);
  const auto address = device_->acquire(info.size);
  if (!address) throw OutOfMemory("the device has no memory for a segment of " + format_bytes(info.size));
  if (*address != info.address) {
    device_->release(*address, info.size);
    PAC_CHECK(false, "the segment at ", info.address, " of ", info.size, " bytes overlaps another");
  }
  PoolGroup& group = info.pool.is_default() ? heap_.default_group() : heap_.private_group(info.pool);
  Pool& pool = info.kind == PoolKind::kSmall ? group.small : group.large;
  Segment& segment = heap_.add_segment(info.address, info.size, info.stream, pool, false, info.context);
  heap_.count_reserved(segment, info.size, 1);
  Block* last = nullptr;
  for (const BlockInfo& each : info.blocks) {
    if (each.state == BlockState::kFree) continue;
    const Bytes offset = each.address - info.address;
    PAC_CHECK(
        each.address >= info.address && each.size > 0 && each.size <= info.size && offset <= info.size - each.size,
        "the block at ", each.address, " of ", each.size, " bytes does not lie in its segment");
    PAC_CHECK(offset % kMinBlockSize == 0 && each.size % kMinBlockSize == 0 && each.requested <= each.size,
              "a block begins and ends at multiples of 512 bytes and holds what was requested; the one at ",
              each.address, " has ", each.size, " bytes for ", each.requested);
    Block* const there = heap_.block_at(segment, each.address, last);
    PAC_CHECK(there && there->state == Block::State::kFree && there->end() - each.address >= each.size, "the block at ",
              each.address, " overlaps another");
    const Request request{each.requested, each.size, info.stream, &pool, &each.context};
    last = heap_.allocate(heap_.carve(segment, each.address, each.size, there), request);
  }
}

}  // namespace pac::alloc
