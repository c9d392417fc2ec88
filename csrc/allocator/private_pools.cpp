// Private pools: memory that only a graph's or a MemPool's allocations get, and the way back to an earlier state of
// one.
#include <algorithm>
#include <utility>

#include "allocator/caching_allocator.hpp"
#include "allocator/diagnosis.hpp"
#include "common/check.hpp"

namespace pac::alloc {

PoolGroup& CachingAllocator::private_group(PoolId pool) {
  PoolGroup* group = pool.is_default() ? nullptr : heap_.find_group(pool);
  PAC_CHECK(group, "there is no private pool (", pool.first, ", ", pool.second,
            "): begin_allocate_to_pool or "
            "create_or_incref_pool makes one");
  return *group;
}

PoolGroup& CachingAllocator::group_for(Stream stream) {
  for (auto at = captures_.rbegin(); at != captures_.rend(); ++at) {
    if (at->second(stream)) return heap_.private_group(at->first);
  }
  return heap_.default_group();
}

void CachingAllocator::begin_allocate_to_pool(PoolId pool, std::function<bool(Stream)> filter) {
  PAC_CHECK(!pool.is_default(), "(0, 0) is the default pool: a private one has another id");
  const Lock lock(mutex_);
  for (const auto& [id, each] : captures_) {
    PAC_CHECK(id != pool, "allocations already go to the private pool (", pool.first, ", ", pool.second, ")");
  }
  collect_freed();
  ++heap_.private_group(pool).use_count;
  captures_.emplace_back(pool, std::move(filter));
}

void CachingAllocator::end_allocate_to_pool(PoolId pool) {
  const Lock lock(mutex_);
  const auto found =
      std::find_if(captures_.begin(), captures_.end(), [&](const auto& each) { return each.first == pool; });
  PAC_CHECK(found != captures_.end(), "no allocations go to the private pool (", pool.first, ", ", pool.second, ")");
  captures_.erase(found);
}

void CachingAllocator::create_or_incref_pool(PoolId pool, std::shared_ptr<SegmentSource> source) {
  PAC_CHECK(!pool.is_default(), "(0, 0) is the default pool: a private one has another id");
  const Lock lock(mutex_);
  const bool made = heap_.find_group(pool) == nullptr;
  PoolGroup& group = heap_.private_group(pool);
  if (made) group.source = std::move(source);
  ++group.use_count;
}

void CachingAllocator::release_pool(PoolId pool) {
  const Lock lock(mutex_);
  PoolGroup& group = private_group(pool);
  PAC_CHECK(group.use_count > 0, "the private pool (", pool.first, ", ", pool.second, ") was released before");
  if (--group.use_count == 0) group.use_on_oom = group.no_split = false;
}

int CachingAllocator::pool_use_count(PoolId pool) {
  const Lock lock(mutex_);
  const PoolGroup* group = pool.is_default() ? nullptr : heap_.find_group(pool);
  return group ? group->use_count : 0;
}

void CachingAllocator::set_use_on_oom(PoolId pool, bool use) {
  const Lock lock(mutex_);
  private_group(pool).use_on_oom = use;
}

void CachingAllocator::set_no_split(PoolId pool) {
  const Lock lock(mutex_);
  private_group(pool).no_split = true;
}

std::vector<Address> CachingAllocator::live_allocations(PoolId pool) {
  const Lock lock(mutex_);
  std::vector<Address> addresses;
  heap_.live().for_each([&](Address address, const Block& block) {
    if (block.pool().group.id == pool) addresses.push_back(address);
  });
  std::sort(addresses.begin(), addresses.end());
  return addresses;
}

PoolCheckpoint CachingAllocator::checkpoint(PoolId pool) {
  const Lock lock(mutex_);
  static_cast<void>(private_group(pool));
  return {pool, describe_segments(heap_, pool)};
}

CheckpointDelta CachingAllocator::restore(const PoolCheckpoint& checkpoint) {
  const Lock lock(mutex_);
  PoolGroup& group = private_group(checkpoint.pool);
  CheckpointDelta delta;
  std::vector<Block*> in_use;
  for (Segment& segment : heap_.segments()) {
    if (&segment.pool->group != &group) continue;
    for (Block* block = segment.first; block; block = block->next) {
      PAC_CHECK(block->state != Block::State::kPending, "a block of the pool still waits for another stream");
      if (block->state == Block::State::kAllocated) in_use.push_back(block);
    }
  }
  for (Block* block : in_use) {
    delta.freed.push_back(block->address);
    block->uses.clear();
    heap_.request_free(block, {});
    heap_.release(block, {});
  }
  for (const SegmentInfo& then : checkpoint.segments) {
    const auto holds = [&](const Segment& segment) {
      return &segment.pool->group == &group && segment.address <= then.address &&
             then.address + then.size <= segment.address + segment.size;
    };
    const auto segment = std::find_if(heap_.segments().begin(), heap_.segments().end(), holds);
    PAC_CHECK(segment != heap_.segments().end(), "the pool gave back memory that the checkpoint describes");
    for (const BlockInfo& info : then.blocks) {
      PAC_CHECK(info.state != BlockState::kPending, "a block of the checkpoint still waited for another stream");
      if (info.state != BlockState::kAllocated) continue;
      const Request request{info.requested, info.size, then.stream, segment->pool, &info.context};
      delta.allocated.push_back(heap_.allocate(heap_.carve(*segment, info.address, info.size), request)->address);
    }
  }
  return delta;
}

}  // namespace pac::alloc
