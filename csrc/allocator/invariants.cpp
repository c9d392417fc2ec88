// Invariants that hold between any two calls; tests check them after every operation.
#include <sstream>

#include "allocator/heap.hpp"

namespace pac::alloc {

namespace {

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::logic_error(text.str());
}

struct Recount {
  std::array<std::int64_t, 3> allocation{}, allocated{}, active{}, active_bytes{}, requested{}, reserved{}, segments{};
  std::array<std::int64_t, 3> inactive_split{}, inactive_split_bytes{};
  std::int64_t oversize = 0;
  std::int64_t oversize_segments = 0;
  std::int64_t free = 0;
  std::int64_t pending = 0;
  std::int64_t paused = 0;  ///< bytes of blocks whose memory went back to the device
  std::size_t live = 0;
  std::map<PoolId, std::int64_t> by_private_pool;
  std::map<const Pool*, std::size_t> free_blocks;

  static void add(std::array<std::int64_t, 3>& to, PoolKind kind, std::int64_t amount) {
    to[0] += amount;
    to[static_cast<std::size_t>(kind)] += amount;
  }
};

void count_block(const Block& block, const AddressTable<Block>& live, Recount& count) {
  const PoolKind kind = block.pool().kind;
  const auto size = static_cast<std::int64_t>(block.size);
  switch (block.state) {
    case Block::State::kAllocated:
      require(live.find(block.address) == &block, "the block at ", block.address, " is allocated but not in the table");
      Recount::add(count.allocation, kind, 1);
      Recount::add(count.allocated, kind, size);
      count.oversize += block.oversize;
      ++count.live;
      [[fallthrough]];
    case Block::State::kPending:
      require(block.requested <= block.size, "the block at ", block.address, " is smaller than what was requested");
      Recount::add(count.active, kind, 1);
      Recount::add(count.active_bytes, kind, size);
      Recount::add(count.requested, kind, static_cast<std::int64_t>(block.requested));
      if (block.state == Block::State::kPending) count.pending += size;
      break;
    case Block::State::kFree:
      require(block.node.empty() && *block.position == &block, "the free block at ", block.address, " is in no set");
      ++count.free_blocks[&block.pool()];
      count.free += size;
      if (block.is_split() && !block.segment->expandable) {
        Recount::add(count.inactive_split, kind, 1);
        Recount::add(count.inactive_split_bytes, kind, size);
      }
      break;
    default:
      break;
  }
}

/// Only blocks in use are shared, and a handle is exported exactly while a shared block lies on it.
void check_sharing(const Segment& segment) {
  std::map<Address, std::uint32_t> shared;
  for (const Block* block = segment.first; block; block = block->next) {
    if (!block->shared) continue;
    require(block->state == Block::State::kAllocated && segment.expandable, "the block at ", block->address,
            " is shared, and not in use");
    for (auto mapping = --segment.mappings.upper_bound(block->address);
         mapping != segment.mappings.end() && mapping->first < block->end(); ++mapping) {
      ++shared[mapping->first];
    }
  }
  for (const auto& [address, mapping] : segment.mappings) {
    require(mapping.shared_blocks == shared[address], "the handle at ", address, " counts ", mapping.shared_blocks,
            " shared blocks, a recount gives ", shared[address]);
    require((mapping.descriptor >= 0) == (mapping.shared_blocks > 0), "the handle at ", address,
            " is exported without a shared block, or not with one");
  }
}

/// The mappings cover exactly the blocks with memory.
void check_mappings(const Segment& segment) {
  for (const Block* block = segment.first; block; block = block->next) {
    auto mapping = segment.mappings.upper_bound(block->address);
    if (mapping != segment.mappings.begin()) --mapping;
    Address covered = block->address;
    while (mapping != segment.mappings.end() && mapping->first < block->end()) {
      const Address end = mapping->first + mapping->second.size;
      if (end > block->address) {
        require(block->has_memory(), "memory is mapped at ", mapping->first, " under a block that has none");
        require(mapping->first <= covered, "no memory is mapped at ", covered);
        covered = end;
      }
      ++mapping;
    }
    require(!block->has_memory() || covered >= block->end(), "no memory is mapped at ", covered);
  }
}

void check_segment(const Segment& segment, const AddressTable<Block>& live, Recount& count) {
  Address at = segment.address;
  const Block* previous = nullptr;
  for (const Block* block = segment.first; block; previous = block, block = block->next) {
    require(block->address == at && block->size > 0, "the blocks of segment ", segment.address, " leave a gap at ", at);
    require(block->previous == previous && block->segment == &segment, "the block at ", at, " is linked wrongly");
    require(block->address % kMinBlockSize == 0 && block->size % kMinBlockSize == 0, "the block at ", at,
            " is not aligned");
    require(!previous || previous->state != block->state ||
                !(block->state == Block::State::kFree || block->state == Block::State::kUnmapped),
            "the blocks before and at ", at, " should be one");
    require((block->state == Block::State::kPending) || block->events == 0, "the block at ", at, " waits for events");
    count_block(*block, live, count);
    at = block->end();
  }
  require(at == segment.address + segment.size, "the blocks of segment ", segment.address, " end at ", at);

  const PoolKind kind = segment.pool->kind;
  Bytes reserved = segment.size;
  std::int64_t pieces = 1;
  if (segment.expandable) {
    reserved = 0;
    Bytes absent = 0;
    const bool paused = segment.pool->group.paused;
    pieces = 0;
    for (const auto& [address, mapping] : segment.mappings) {
      const bool there = mapping.handle != kNoHandle;
      require(there || paused, "the memory at ", address, " is not paused, and has no handle");
      require(there || mapping.shared_blocks == 0, "the memory at ", address, " was shared, and has no handle");
      pieces += there;
      (there ? reserved : absent) += mapping.size;
    }
    count.paused += static_cast<std::int64_t>(absent);
    check_mappings(segment);
  }
  check_sharing(segment);
  Recount::add(count.reserved, kind, static_cast<std::int64_t>(reserved));
  Recount::add(count.segments, kind, pieces);
  count.oversize_segments += segment.oversize;
  if (segment.pool->group.is_private())
    count.by_private_pool[segment.pool->group.id] += static_cast<std::int64_t>(reserved);
}

void compare(const char* name, const StatArray& stat, const std::array<std::int64_t, 3>& recount) {
  for (std::size_t kind = 0; kind < recount.size(); ++kind) {
    const Stat& of = stat.of[kind];
    require(of.current == recount[kind], name, '[', kind, "] is ", of.current, ", a recount gives ", recount[kind]);
    require(of.peak >= of.current, name, '[', kind, "] has a peak of ", of.peak, " below its current ", of.current);
  }
}

}  // namespace

void Heap::check_pool(Pool& pool) {
  const Block* before = nullptr;
  for (const Block* block : pool.free) {
    require(block->state == Block::State::kFree && &block->pool() == &pool, "the block at ", block->address,
            " is in a set it does not belong in");
    require(!before || FitOrder{}(before, block), "a set of free blocks is out of order at ", block->address);
    before = block;
  }
}

void Heap::check_invariants() {
  Recount count;
  for (const Segment& segment : segments_) check_segment(segment, live_, count);
  for_each_pool([&](Pool& pool) {
    check_pool(pool);
    require(pool.free.size() == count.free_blocks[&pool], "a set holds ", pool.free.size(), " free blocks of ",
            count.free_blocks[&pool]);
  });
  require(live_.size() == count.live, "the table holds ", live_.size(), " blocks of ", count.live);
  compare("allocation", stats.allocation, count.allocation);
  compare("allocated_bytes", stats.allocated_bytes, count.allocated);
  compare("active", stats.active, count.active);
  compare("active_bytes", stats.active_bytes, count.active_bytes);
  compare("requested_bytes", stats.requested_bytes, count.requested);
  compare("reserved_bytes", stats.reserved_bytes, count.reserved);
  compare("segment", stats.segment, count.segments);
  compare("inactive_split", stats.inactive_split, count.inactive_split);
  compare("inactive_split_bytes", stats.inactive_split_bytes, count.inactive_split_bytes);
  require(stats.oversize_segments.current == count.oversize_segments, "oversize_segments is ",
          stats.oversize_segments.current, ", a recount gives ", count.oversize_segments);
  require(stats.oversize_allocations.current == count.oversize, "oversize_allocations is ",
          stats.oversize_allocations.current, ", a recount gives ", count.oversize);
  require(count.reserved[0] + count.paused == count.allocated[0] + count.free + count.pending, "reserved ",
          count.reserved[0], " + paused ", count.paused, " is not allocated ", count.allocated[0], " + free ",
          count.free, " + pending ", count.pending);
  for (const auto& [id, stat] : stats.reserved_bytes_by_private_pool) {
    require(stat.current == count.by_private_pool[id], "a private pool's reserved bytes are ", stat.current,
            ", a recount gives ", count.by_private_pool[id]);
  }
}

}  // namespace pac::alloc
