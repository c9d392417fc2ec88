#include "allocator/heap.hpp"

#include <algorithm>
#include <iterator>

namespace pac::alloc {

PoolGroup* Heap::find_group(PoolId id) {
  if (id.is_default()) return &default_group_;
  const auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second.get();
}

PoolGroup& Heap::private_group(PoolId id, Tag tag) {
  std::unique_ptr<PoolGroup>& group = groups_[id];
  if (!group) group = std::make_unique<PoolGroup>(id, tag);
  return *group;
}

PoolGroup& Heap::tagged_group(Tag tag) {
  if (tag == 0) return default_group_;
  std::unique_ptr<PoolGroup>& group = tagged_[tag];
  if (!group) group = std::make_unique<PoolGroup>(PoolId{}, tag);
  return *group;
}

Bytes Heap::round_size(Bytes size) const {
  if (size < kMinBlockSize) return kMinBlockSize;
  // Interval 0 holds sizes below 2 MiB, the last interval all larger sizes.
  std::size_t interval = 0;
  while (interval + 1 < config.roundup_power2_divisions.size() && (size >> (21 + interval)) != 0) ++interval;
  const Bytes divisions = config.roundup_power2_divisions[interval];
  if (divisions <= 1 || size <= kMinBlockSize * divisions) return round_up(size, kMinBlockSize);
  Bytes power = kMinBlockSize;
  while (power <= size / 2) power *= 2;
  return power == size ? size : power + round_up(size - power, power / divisions);
}

bool Heap::should_split(const Block& block, const Request& request) const {
  const Pool& pool = block.pool();
  const Bytes rest = block.size - request.size;
  if (pool.group.no_split || pool.oversize) return false;
  if (pool.kind == PoolKind::kSmall || block.segment->expandable) return rest >= kMinBlockSize;
  return request.size < config.max_split_size && rest > kSmallSize;
}

Block* Heap::allocate(Block* block, const Request& request) {
  // Once for each request, as PyTorch counts, also if the search was repeated after memory had come from the device.
  ++block->pool().fit_calls;
  const PoolKind kind = block->pool().kind;
  const bool counts_split = !block->segment->expandable;
  const bool was_split = block->is_split();
  if (should_split(*block, request)) {
    // The free block shrinks in place: the position in the set seldom changes.
    Block* taken = new_block(*block->segment, block->address, request.size, Block::State::kAllocated);
    taken->previous = block->previous;
    taken->next = block;
    (block->previous ? block->previous->next : block->segment->first) = taken;
    block->previous = taken;
    block->address += request.size;
    block->size -= request.size;
    reorder(block);
    if (counts_split && was_split) {
      stats.inactive_split_bytes.decrease(kind, static_cast<std::int64_t>(request.size));
    } else if (counts_split) {
      stats.inactive_split_bytes.increase(kind, static_cast<std::int64_t>(block->size));
      stats.inactive_split.increase(kind, 1);
    }
    block = taken;
  } else {
    remove_free(block);
    if (counts_split && was_split) {
      stats.inactive_split_bytes.decrease(kind, static_cast<std::int64_t>(block->size));
      stats.inactive_split.decrease(kind, 1);
    }
  }

  block->state = Block::State::kAllocated;
  block->requested = request.requested;
  block->oversize = block->size >= config.max_split_size;
  if (history.keeps_contexts()) block->context = *request.context;
  live_.insert(block->address, block);

  const auto size = static_cast<std::int64_t>(block->size);
  stats.allocation.increase(kind, 1);
  stats.allocated_bytes.increase(kind, size);
  stats.active.increase(kind, 1);
  stats.active_bytes.increase(kind, size);
  stats.requested_bytes.increase(kind, static_cast<std::int64_t>(request.requested));
  if (block->oversize) stats.oversize_allocations.increase(1);
  log(Action::kAlloc, block->address, block->requested, *block->segment, *request.context);
  return block;
}

void Heap::request_free(Block* block, const Context& context) {
  const PoolKind kind = block->pool().kind;
  live_.erase(block->address);
  block->state = Block::State::kPending;
  // All work of the block's own stream is queued before this point; other streams need events.
  block->freed = ++clock_;
  stats.allocation.decrease(kind, 1);
  stats.allocated_bytes.decrease(kind, static_cast<std::int64_t>(block->size));
  if (block->oversize) stats.oversize_allocations.decrease(1);
  log(Action::kFreeRequested, block->address, block->requested, *block->segment, context ? context : block->context);
}

void Heap::release(Block* block, const Context& context) {
  const PoolKind kind = block->pool().kind;
  log(Action::kFreeCompleted, block->address, block->requested, *block->segment, context ? context : block->context);
  stats.active.decrease(kind, 1);
  stats.active_bytes.decrease(kind, static_cast<std::int64_t>(block->size));
  stats.requested_bytes.decrease(kind, static_cast<std::int64_t>(block->requested));
  block->requested = 0;
  block->oversize = false;
  block->context.reset();

  if (block->segment->expandable) {
    join_free(block);
    return;
  }
  std::int64_t blocks = 0;
  std::int64_t bytes = 0;
  for (const Block* neighbour : {block->previous, block->next}) {
    if (!neighbour || neighbour->state != Block::State::kFree) continue;
    blocks -= 1;
    bytes -= static_cast<std::int64_t>(neighbour->size);
  }
  block = join_free(block);
  if (block->is_split()) {
    blocks += 1;
    bytes += static_cast<std::int64_t>(block->size);
  }
  blocks >= 0 ? stats.inactive_split.increase(kind, blocks) : stats.inactive_split.decrease(kind, -blocks);
  bytes >= 0 ? stats.inactive_split_bytes.increase(kind, bytes) : stats.inactive_split_bytes.decrease(kind, -bytes);
}

Block* Heap::carve(Segment& segment, Address address, Bytes size, Block* from) {
  Block* block = block_at(segment, address, from);
  if (!block || block->state != Block::State::kFree || block->end() < address + size) {
    throw std::logic_error("the memory to take back is not free");
  }
  const PoolKind kind = segment.pool->kind;
  const bool counts = !segment.expandable;
  remove_free(block);
  if (counts && block->is_split()) {
    stats.inactive_split.decrease(kind, 1);
    stats.inactive_split_bytes.decrease(kind, static_cast<std::int64_t>(block->size));
  }
  Block* taken = isolate(block, address, size, Block::State::kFree);
  for (const Block* rest : {taken->previous, taken->next}) {
    if (!counts || !rest || rest->state != Block::State::kFree) continue;
    stats.inactive_split.increase(kind, 1);
    stats.inactive_split_bytes.increase(kind, static_cast<std::int64_t>(rest->size));
  }
  // allocate() expects a free block, in the pool's set and counted.
  insert_free(taken);
  if (counts && taken->is_split()) {
    stats.inactive_split.increase(kind, 1);
    stats.inactive_split_bytes.increase(kind, static_cast<std::int64_t>(taken->size));
  }
  return taken;
}

Segment& Heap::add_segment(Address address, Bytes size, Stream stream, Pool& pool, bool expandable,
                           const Context& context) {
  Segment& segment = segments_.emplace_back();
  segment.self = std::prev(segments_.end());
  pool.group.segments.emplace(address, &segment);
  segment.address = address;
  segment.size = size;
  segment.stream = stream;
  segment.pool = &pool;
  segment.expandable = expandable;
  segment.context = context;
  segment.first = new_block(segment, address, size, expandable ? Block::State::kUnmapped : Block::State::kFree);
  if (!expandable) insert_free(segment.first);
  return segment;
}

void Heap::erase_segment(Segment& segment) {
  Block* block = segment.first;
  if (block->state == Block::State::kFree) remove_free(block);
  spare_.push_back(block);
  segment.pool->group.segments.erase(segment.address);
  segments_.erase(segment.self);
}

void Heap::insert_free(Block* block) {
  Pool& pool = block->pool();
  block->state = Block::State::kFree;
  block->fit_calls = pool.fit_calls;
  if (block->node.empty()) {
    block->position = pool.free.insert(block).first;
  } else {
    block->node.value() = block;
    block->position = pool.free.insert(std::move(block->node)).position;
  }
}

void Heap::remove_free(Block* block) { block->node = block->pool().free.extract(block->position); }

Block* Heap::split(Block* block, Bytes size) {
  Block* rest = new_block(*block->segment, block->address + size, block->size - size, block->state);
  rest->freed = block->freed;
  rest->previous = block;
  rest->next = block->next;
  if (rest->next) rest->next->previous = rest;
  block->next = rest;
  block->size = size;
  return rest;
}

void Heap::absorb_next(Block* block) {
  Block* next = block->next;
  block->size += next->size;
  block->freed = std::max(block->freed, next->freed);
  block->next = next->next;
  if (block->next) block->next->previous = block;
  spare_.push_back(next);
}

void Heap::absorb_previous(Block* block) {
  Block* previous = block->previous;
  block->address = previous->address;
  block->size += previous->size;
  block->freed = std::max(block->freed, previous->freed);
  block->previous = previous->previous;
  (block->previous ? block->previous->next : block->segment->first) = block;
  spare_.push_back(previous);
}

Block* Heap::join_free(Block* block) {
  Block* previous = block->previous;
  Block* next = block->next;
  const bool with_previous = previous && previous->state == Block::State::kFree;
  const bool with_next = next && next->state == Block::State::kFree;
  if (with_next) {
    if (with_previous) remove_free(next);
    absorb_previous(next);
    block = next;
  }
  if (with_previous) {
    absorb_next(previous);
    block = previous;
  }
  if (with_previous || with_next) {
    reorder(block);
  } else {
    insert_free(block);
  }
  return block;
}

Block* Heap::join_unmapped(Block* block) {
  const auto is_unmapped = [](const Block* each) { return each && each->state == Block::State::kUnmapped; };
  if (is_unmapped(block->next)) absorb_next(block);
  if (is_unmapped(block->previous)) absorb_previous(block);
  return block;
}

void Heap::reorder(Block* block) {
  Pool& pool = block->pool();
  const FitOrder before{};
  const auto at = block->position;
  const bool in_order = (at == pool.free.begin() || before(*std::prev(at), block)) &&
                        (std::next(at) == pool.free.end() || before(block, *std::next(at)));
  if (!in_order) {
    remove_free(block);
    insert_free(block);
  }
  block->fit_calls = pool.fit_calls;
}

Block* Heap::isolate(Block* block, Address address, Bytes size, Block::State state) {
  const Block::State rest_state = block->state;
  Block* left = nullptr;
  if (address > block->address) {
    left = block;
    block = split(block, address - block->address);
  }
  Block* right = block->size > size ? split(block, size) : nullptr;
  block->state = state;
  for (Block* rest : {left, right}) {
    if (rest && rest_state == Block::State::kFree) insert_free(rest);
  }
  return block;
}

Block* Heap::block_at(Segment& segment, Address address, Block* from) {
  for (Block* block = from ? from : segment.first; block; block = block->next) {
    if (address < block->end()) return address >= block->address ? block : nullptr;
  }
  return nullptr;
}

void Heap::count_reserved(Segment& segment, Bytes size, std::int64_t pieces) {
  const PoolKind kind = segment.pool->kind;
  stats.segment.increase(kind, pieces);
  stats.reserved_bytes.increase(kind, static_cast<std::int64_t>(size));
  stats.num_device_alloc += pieces;
  segment.oversize = size >= config.max_split_size && !segment.expandable;
  if (segment.oversize) stats.oversize_segments.increase(1);
  const PoolGroup& group = segment.pool->group;
  if (group.is_private()) stats.reserved_bytes_by_private_pool[group.id].increase(static_cast<std::int64_t>(size));
}

void Heap::count_released(const Segment& segment, Bytes size, std::int64_t pieces) {
  const PoolKind kind = segment.pool->kind;
  stats.segment.decrease(kind, pieces);
  stats.reserved_bytes.decrease(kind, static_cast<std::int64_t>(size));
  stats.num_device_free += pieces;
  if (segment.oversize) stats.oversize_segments.decrease(1);
  const PoolGroup& group = segment.pool->group;
  if (group.is_private()) stats.reserved_bytes_by_private_pool[group.id].decrease(static_cast<std::int64_t>(size));
}

Block* Heap::new_block(Segment& segment, Address address, Bytes size, Block::State state) {
  if (spare_.empty()) {
    blocks_.emplace_back();
    spare_.push_back(&blocks_.back());
  }
  Block* block = spare_.back();
  spare_.pop_back();
  block->address = address;
  block->size = size;
  block->segment = &segment;
  block->previous = block->next = nullptr;
  block->state = state;
  block->freed = 0;
  return block;
}

}  // namespace pac::alloc
