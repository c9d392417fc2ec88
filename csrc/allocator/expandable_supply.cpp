// A model of PyTorch's expandable segments (c10/cuda/CUDACachingAllocator.cpp, torch 2.11), for replays. Each pool has
// a range of addresses per stream. Pages are mapped at the lowest place with room for the request; a mapped page stays
// until memory is short, and goes back only whole.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "allocator/supply.hpp"

namespace pac::alloc {

namespace {

class ExpandableSupply final : public Supply {
 public:
  using Supply::Supply;

  Block* grow(const Request& request, Effort effort, bool capturing) override;
  void release_unused(PoolGroup& group) override;
  void release_everything() override { release_ranges(); }

 private:
  using Unmapped = std::map<Address, Block*>;

  FreeSet::iterator best_fit(const Pool& pool, FreeSet::iterator smallest) const override;
  Bytes page(const Pool& pool) const {
    return pool.kind == PoolKind::kSmall ? kSmallBuffer : heap_.config.large_segment_size;
  }
  Unmapped& unmapped(const Segment& segment) { return unmapped_[{segment.pool, segment.stream}]; }
  Block* find_room(const Request& request);
  /// Maps all pages of an unmapped range, or none: false if memory is short.
  bool map_pages(Segment& segment, Address begin, Bytes size);
  Block* map(Block* room, Bytes size, const Context& context);
  void unmap(Block* block);
  void erase_if_empty(Block* block);

  std::map<std::pair<Pool*, Stream>, Unmapped> unmapped_;  ///< the native allocator's order: by stream and address
};

/// The size of a free block plus the unmapped addresses after it.
Bytes size_with_room(const Block& block) {
  const bool grows = block.next && block.next->state == Block::State::kUnmapped;
  return block.size + (grows ? block.next->size : 0);
}

/// The native allocator's best fit counts the unmapped addresses after a block, so a range's last block is kept for
/// requests that fit nowhere else.
FreeSet::iterator ExpandableSupply::best_fit(const Pool& pool, FreeSet::iterator smallest) const {
  auto found = smallest;
  for (auto next = std::next(found); next != pool.free.end(); ++next) {
    if ((*next)->stream() != (*found)->stream() || size_with_room(**next) >= size_with_room(**found)) break;
    found = next;
  }
  return found;
}

/// Whether `size` bytes from this block on are free or unmapped.
bool has_room(const Block* block, Bytes size) {
  Bytes found = 0;
  for (; found < size && block; block = block->next) {
    if (block->state != Block::State::kFree && block->state != Block::State::kUnmapped) break;
    found += block->size;
  }
  return found >= size;
}

Block* ExpandableSupply::grow(const Request& request, Effort, bool) {
  const bool small = request.pool->kind == PoolKind::kSmall;
  const bool medium = !small && request.size < kMinLargeAlloc;
  const Bytes counted = small ? kSmallBuffer : medium ? page(*request.pool) : round_up(request.size, kRoundLarge);
  if (request.size > total_ || !within_limit(counted)) return nullptr;
  Block* block = find_room(request);
  if (block->state == Block::State::kUnmapped) {
    block = map(block, std::min(block->size, request.size), *request.context);
  }
  // If a page is refused, the pages mapped before stay mapped.
  while (block && block->size < request.size) {
    block = map(block->next, std::min(block->next->size, request.size - block->size), *request.context);
  }
  return block;
}

Block* ExpandableSupply::find_room(const Request& request) {
  Pool& pool = *request.pool;
  for (const auto& [address, room] : unmapped_[{&pool, request.stream}]) {
    Block* const previous = room->previous;
    Block* const first = previous && previous->state == Block::State::kFree ? previous : room;
    if (has_room(first, request.size)) return first;
  }
  // An eighth more than the device's memory: pages unmapped at the beginning are mapped anew at the end.
  const Bytes size = round_up(total_ + total_ / 8, page(pool));
  Segment& segment = heap_.add_segment(device_.reserve(size), size, request.stream, pool, true, *request.context);
  unmapped(segment).emplace(segment.address, segment.first);
  return segment.first;
}

bool ExpandableSupply::map_pages(Segment& segment, Address begin, Bytes size) {
  const Bytes each = page(*segment.pool);
  std::vector<Handle> handles;
  Address end = begin;
  const auto undo = [&] {
    while (end > begin) {
      end -= each;
      device_.unmap(end, each);
      segment.mappings.erase(end);
    }
    for (const Handle handle : handles) device_.destroy(handle, each);
  };
  while (handles.size() * each < size) {
    const auto handle = device_.create(each);
    if (!handle) {
      undo();
      return false;
    }
    handles.push_back(*handle);
  }
  try {
    for (const Handle handle : handles) {
      device_.map(end, each, handle);
      segment.mappings[end] = {handle, each};
      end += each;
    }
  } catch (...) {
    undo();
    throw;
  }
  return true;
}

Block* ExpandableSupply::map(Block* room, Bytes size, const Context& context) {
  Segment& segment = *room->segment;
  const Bytes each = page(*segment.pool);
  const Bytes mapped = round_up(size, each);
  const Address begin = room->address;
  if (!map_pages(segment, begin, mapped)) return nullptr;
  segment.context = context;
  heap_.count_reserved(segment, mapped, static_cast<std::int64_t>(mapped / each));
  heap_.log(Action::kSegmentMap, begin, mapped, segment, context);

  Unmapped& rooms = unmapped(segment);
  rooms.erase(begin);
  Block* block = heap_.isolate(room, begin, mapped, Block::State::kFree);
  if (block->next && block->next->state == Block::State::kUnmapped) rooms[block->next->address] = block->next;
  return heap_.join_free(block);
}

void ExpandableSupply::unmap(Block* block) {
  Segment& segment = *block->segment;
  const Bytes each = page(*segment.pool);
  const Address begin = segment.address + round_up(block->address - segment.address, each);
  const Address end = segment.address + round_down(block->end() - segment.address, each);
  if (begin >= end) return;
  for (Address at = begin; at < end; at += each) {
    const auto mapping = segment.mappings.find(at);
    device_.unmap(at, each);
    device_.destroy(mapping->second.handle, each);
    segment.mappings.erase(mapping);
  }
  heap_.count_released(segment, end - begin, static_cast<std::int64_t>((end - begin) / each));
  heap_.log(Action::kSegmentUnmap, begin, end - begin, segment, heap_.releasing);

  heap_.remove_free(block);
  block = heap_.isolate(block, begin, end - begin, Block::State::kUnmapped);
  Unmapped& rooms = unmapped(segment);
  for (const Block* neighbour : {block->previous, block->next}) {
    if (neighbour && neighbour->state == Block::State::kUnmapped) rooms.erase(neighbour->address);
  }
  block = heap_.join_unmapped(block);
  rooms[block->address] = block;
  erase_if_empty(block);
}

void ExpandableSupply::erase_if_empty(Block* block) {
  if (block->is_split()) return;
  Segment& segment = *block->segment;
  const auto found = unmapped_.find({segment.pool, segment.stream});
  found->second.erase(block->address);
  if (found->second.empty()) unmapped_.erase(found);  // the pool may be erased next
  device_.unreserve(segment.address, segment.size);
  heap_.erase_segment(segment);
}

void ExpandableSupply::release_unused(PoolGroup& group) {
  for (Pool* pool : {&group.large, &group.small}) {
    // A copy: unmapping changes the set, but the free blocks that stay hold no whole page.
    for (Block* block : std::vector<Block*>(pool->free.begin(), pool->free.end())) unmap(block);
  }
}

}  // namespace

std::unique_ptr<Supply> make_expandable_supply(Heap& heap, Device& device, StreamOrder& order) {
  return std::make_unique<ExpandableSupply>(heap, device, order);
}

}  // namespace pac::alloc
