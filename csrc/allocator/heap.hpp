// Memory blocks and segments of one device, with bookkeeping and counters. Knows no device, no lock and no policy.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "allocator/address_table.hpp"
#include "allocator/block.hpp"
#include "allocator/config.hpp"
#include "allocator/history.hpp"
#include "allocator/stats.hpp"

namespace pac::alloc {

/// PyTorch's constants.
constexpr Bytes kMinBlockSize = 512;
constexpr Bytes kSmallSize = 1_MiB;       ///< the largest request of the small pool
constexpr Bytes kSmallBuffer = 2_MiB;     ///< a segment of the small pool
constexpr Bytes kMinLargeAlloc = 10_MiB;  ///< requests from here on have segments of their own size
constexpr Bytes kRoundLarge = 2_MiB;

class Heap {
 public:
  explicit Heap(const Config& settings) : config(settings) {}

  Config config;
  Stats stats;
  History history;
  Context releasing;  ///< of the call that gives memory back now; see Releasing

  PoolGroup& default_group() { return default_group_; }
  /// nullptr if there is no such pool.
  PoolGroup* find_group(PoolId id);
  /// Makes the group, with this tag, if there is none.
  PoolGroup& private_group(PoolId id, Tag tag = 0);
  /// The default group of a tag, made at the first call.
  PoolGroup& tagged_group(Tag tag);
  /// Forgets a private group without segments.
  void erase_group(PoolId id) {
    groups_.erase(id);
    stats.reserved_bytes_by_private_pool.erase(id);
  }
  template <class Visit>
  void for_each_group(Visit visit) {
    visit(default_group_);
    for (auto& [tag, group] : tagged_) visit(*group);
    for (auto& [id, group] : groups_) visit(*group);
  }
  template <class Visit>
  void for_each_pool(Visit visit) {
    for_each_group([&](PoolGroup& group) {
      visit(group.small);
      visit(group.large);
      visit(group.oversize);
    });
  }

  Bytes round_size(Bytes size) const;

  /// Gives the request a free block, or the beginning of one.
  Block* allocate(Block* block, const Request& request);
  /// Ends the owner's use of a block. release() then makes the block free, now or once other streams are done.
  void request_free(Block* block, const Context& context);
  void release(Block* block, const Context& context);
  /// Takes exactly [address, address + size) out of a free block; `from` as in block_at. Throws std::logic_error if the
  /// range is not free.
  Block* carve(Segment& segment, Address address, Bytes size, Block* from = nullptr);

  /// A segment with one block over all of it: kFree under malloc growth, kUnmapped for a range of addresses.
  Segment& add_segment(Address address, Bytes size, Stream stream, Pool& pool, bool expandable, const Context& context);
  /// Requires a segment of one block, free or unmapped.
  void erase_segment(Segment& segment);
  std::list<Segment>& segments() { return segments_; }

  void insert_free(Block* block);
  void remove_free(Block* block);
  /// Makes a block outside every set free: merges free neighbours, inserts the merged block into the pool's set,
  /// returns it.
  Block* join_free(Block* block);
  /// Merges an unmapped block with unmapped neighbours.
  Block* join_unmapped(Block* block);
  /// Cuts a block outside every set after `size` bytes; returns the rest, in the same state.
  Block* split(Block* block, Bytes size);
  /// Cuts [address, address + size) out of a block outside every set, and sets the state of this part.
  Block* isolate(Block* block, Address address, Bytes size, Block::State state);
  /// Returns the block of an address. The search begins at `from`, a block at or before the address; null: at the
  /// segment's first block.
  Block* block_at(Segment& segment, Address address, Block* from = nullptr);

  Block* find_live(Address address) const { return live_.find(address); }
  const AddressTable<Block>& live() const { return live_; }
  Serial clock() const { return clock_; }
  Serial tick() { return ++clock_; }
  void log(Action action, Address address, Bytes size, const Segment& segment, const Context& context) {
    history.add(action, address, size, segment.stream, segment.pool->group.id, context);
  }
  void count_reserved(Segment& segment, Bytes size, std::int64_t pieces);
  void count_released(const Segment& segment, Bytes size, std::int64_t pieces);

  void check_invariants();

 private:
  Block* new_block(Segment& segment, Address address, Bytes size, Block::State state);
  void absorb_next(Block* block);
  void absorb_previous(Block* block);
  void reorder(Block* block);
  bool should_split(const Block& block, const Request& request) const;
  void check_pool(Pool& pool);

  PoolGroup default_group_{PoolId{}};
  std::map<Tag, std::unique_ptr<PoolGroup>> tagged_;
  std::map<PoolId, std::unique_ptr<PoolGroup>> groups_;
  std::list<Segment> segments_;
  AddressTable<Block> live_;
  std::deque<Block> blocks_;
  std::vector<Block*> spare_;
  Serial clock_ = 0;
};

/// Names the call that gives memory back during the guard's life.
class Releasing {
 public:
  Releasing(Heap& heap, const Context& context) : heap_(heap) { heap_.releasing = context; }
  ~Releasing() { heap_.releasing.reset(); }
  Releasing(const Releasing&) = delete;
  Releasing& operator=(const Releasing&) = delete;

 private:
  Heap& heap_;
};

}  // namespace pac::alloc
