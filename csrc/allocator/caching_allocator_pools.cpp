// Private pools (memory for the allocations of one graph or MemPool alone), and restoring a pool to a checkpoint.
#include <algorithm>
#include <utility>

#include "allocator/caching_allocator.hpp"
#include "allocator/diagnosis.hpp"
#include "common/check.hpp"

namespace pac::alloc {

namespace {

bool waits_for_streams(const PoolGroup& group) {
  for (const auto& [address, segment] : group.segments) {
    for (const Block* block = segment->first; block; block = block->next) {
      if (block->state == Block::State::kPending) return true;
    }
  }
  return false;
}

void require(bool holds, PoolId pool, const std::string& begin, const std::string& end = {}) {
  if (holds) return;
  throw PoolError(begin + '(' + std::to_string(pool.first) + ", " + std::to_string(pool.second) + ')' + end);
}

/// The group's segment with memory at every address of the checkpoint's segment, or nullptr.
Segment* find_memory(const PoolGroup& group, const SegmentInfo& then) {
  const Address end = then.address + then.size;
  const auto after = group.segments.upper_bound(then.address);
  if (after == group.segments.begin()) return nullptr;
  Segment* const segment = std::prev(after)->second;
  if (end > segment->address + segment->size) return nullptr;
  for (const Block* block = segment->first; block && block->address < end; block = block->next) {
    if (block->end() > then.address && !block->has_memory()) return nullptr;
  }
  return segment;
}

}  // namespace

PoolGroup& CachingAllocator::private_group(PoolId pool) {
  PoolGroup* group = pool.is_default() ? nullptr : heap_.find_group(pool);
  require(group != nullptr, pool, "there is no private pool ",
          ": begin_allocate_to_pool or create_or_incref_pool makes one");
  return *group;
}

PoolGroup& CachingAllocator::group_for(Stream stream, Tag tag) {
  for (auto at = routes_.rbegin(); at != routes_.rend(); ++at) {
    if (at->filter(stream)) return heap_.private_group(at->pool);
  }
  return tag == 0 ? heap_.default_group() : heap_.tagged_group(tag);
}

void CachingAllocator::begin_allocate_to_pool(PoolId pool, std::function<bool(Stream)> filter, Tag tag, bool captures) {
  PAC_CHECK(!pool.is_default(), "(0, 0) is the default pool: a private one has another id");
  const Lock lock(mutex_);
  for (const Route& route : routes_) require(route.pool != pool, pool, "allocations already go to the private pool ");
  collect_freed();
  ++heap_.private_group(pool, tag).use_count;
  routes_.push_back({pool, std::move(filter), captures});
  captures_ += captures ? 1 : 0;
}

void CachingAllocator::end_allocate_to_pool(PoolId pool) {
  const Lock lock(mutex_);
  const auto found =
      std::find_if(routes_.begin(), routes_.end(), [&](const Route& route) { return route.pool == pool; });
  require(found != routes_.end(), pool, "no allocations go to the private pool ");
  const bool captured = found->captures;
  routes_.erase(found);
  if (!captured) return;
  --captures_;
  capture_order_.forget();
  if (!capturing()) captured_.clear();
}

void CachingAllocator::create_or_incref_pool(PoolId pool, std::shared_ptr<SegmentSource> source, Tag tag) {
  PAC_CHECK(!pool.is_default(), "(0, 0) is the default pool: a private one has another id");
  const Lock lock(mutex_);
  const bool made = heap_.find_group(pool) == nullptr;
  PoolGroup& group = heap_.private_group(pool, tag);
  if (made) group.source = std::move(source);
  ++group.use_count;
}

void CachingAllocator::release_pool(PoolId pool) {
  const Lock lock(mutex_);
  PoolGroup& group = private_group(pool);
  require(group.use_count > 0, pool, "the private pool ", " was released before");
  if (--group.use_count > 0) return;
  group.use_on_oom = group.no_split = false;
  group.released = heap_.tick();
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
  PoolGroup& group = private_group(pool);
  group.no_split = true;
  // Mapped neighbours would merge, and whole blocks be handed out ever larger.
  group.by_malloc = group.by_malloc || group.segments.empty();
}

std::vector<Address> CachingAllocator::live_allocations(PoolId pool) {
  const Lock lock(mutex_);
  static_cast<void>(private_group(pool));
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
  collect_freed();
  return {pool, describe_segments(heap_, pool)};
}

CheckpointDelta CachingAllocator::restore(const PoolCheckpoint& checkpoint) {
  Lock lock(mutex_);
  collect_freed();
  while (waits_for_streams(private_group(checkpoint.pool))) {
    const auto oldest = capturing() ? std::nullopt : order_.hold_oldest_pending();
    require(oldest.has_value(), checkpoint.pool, "a block still waits for another stream, in the private pool ");
    wait(*oldest, lock);
    collect_freed();
  }
  PoolGroup& group = private_group(checkpoint.pool);
  if (group.paused) throw PauseError("the memory pool is paused: call resume() before restoring a checkpoint");
  std::vector<Segment*> segments;
  for (const SegmentInfo& then : checkpoint.segments) {
    segments.push_back(find_memory(group, then));
    require(segments.back() != nullptr, checkpoint.pool,
            "memory that the checkpoint describes was given back by the pool ");
  }
  CheckpointDelta delta;
  std::vector<Block*> in_use;
  for (const auto& [address, segment] : group.segments) {
    for (Block* block = segment->first; block; block = block->next) {
      if (block->state == Block::State::kAllocated) in_use.push_back(block);
    }
  }
  for (Block* block : in_use) {
    delta.freed.push_back(block->address);
    captured_.erase(block);
    block->uses.clear();
    if (block->shared) end_sharing(*block);
    heap_.request_free(block, {});
    heap_.release(block, {});
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const SegmentInfo& then = checkpoint.segments[i];
    for (const BlockInfo& info : then.blocks) {
      // A block that was pending at the checkpoint is free now.
      if (info.state != BlockState::kAllocated) continue;
      const Request request{info.requested, info.size, then.stream, segments[i]->pool, &info.context};
      Block* block = heap_.carve(*segments[i], info.address, info.size);
      delta.allocated.push_back(heap_.allocate(block, request)->address);
    }
  }
  return delta;
}

}  // namespace pac::alloc
