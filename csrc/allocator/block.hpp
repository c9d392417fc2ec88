// Segments of device memory, tiled by memory blocks. Each pool keeps an ordered set of its free blocks.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "allocator/stats.hpp"
#include "allocator/types.hpp"
#include "device/device.hpp"

namespace pac::alloc {

struct Block;
struct Pool;
struct PoolGroup;

/// A moment in an allocator's life: the number of frees so far. A fence on a stream covers all frees up to a serial.
using Serial = std::uint64_t;

struct FitKey {
  Stream stream;
  Bytes size;
  Address address;
};

/// The native allocator's order: lower_bound is then the best fit on the stream, at the lowest address.
struct FitOrder {
  using is_transparent = void;
  bool operator()(const Block* a, const Block* b) const;
  bool operator()(const Block* a, const FitKey& b) const;
};
using FreeSet = std::set<Block*, FitOrder>;

/// Stands for the memory that paused addresses had.
constexpr Handle kNoHandle = 0;

/// Physical memory mapped at one address.
struct Mapping {
  Handle handle = kNoHandle;
  Bytes size = 0;
  std::uint64_t shared_id = 0;      ///< of the handle, for other processes; 0 until it is shared
  int descriptor = -1;              ///< of the open export
  std::uint32_t shared_blocks = 0;  ///< blocks in use that other processes may have open; the export closes at 0
};

/// One device allocation, or a reserved range of addresses into which handles are mapped.
struct Segment {
  Address address = 0;
  Bytes size = 0;
  Stream stream = 0;
  Pool* pool = nullptr;
  bool expandable = false;
  bool oversize = false;  ///< counted in oversize_segments when acquired
  Block* first = nullptr;
  std::map<Address, Mapping> mappings;  ///< of an expandable segment, by address
  std::list<Segment>::iterator self;    ///< in the heap's list
  Context context;                      ///< of the allocation that caused the last growth
};

struct Block {
  enum class State : std::uint8_t {
    kFree,
    kAllocated,
    kPending,   ///< freed, but other streams may still use the memory
    kUnmapped,  ///< addresses without memory
    kRetired,   ///< memory moved away; the old mapping stays until the stream has passed an event
  };

  Address address = 0;
  Bytes size = 0;
  Bytes requested = 0;
  Segment* segment = nullptr;
  Block* previous = nullptr;
  Block* next = nullptr;
  State state = State::kFree;
  bool oversize = false;        ///< counted in oversize_allocations when allocated
  bool shared = false;          ///< other processes may have it open
  std::uint32_t events = 0;     ///< of a pending block: events not yet completed
  Serial freed = 0;             ///< of the last free among the merged parts
  std::uint64_t fit_calls = 0;  ///< the pool's fit_calls when the block became free: the age for garbage collection
  std::vector<Stream> uses;     ///< other streams of the block, from record_stream
  Context context;
  FreeSet::iterator position;  ///< in the pool's set, while free
  FreeSet::node_type node;     ///< the set's node, kept here while not free: the hot path allocates nothing

  Stream stream() const { return segment->stream; }
  Pool& pool() const { return *segment->pool; }
  Address end() const { return address + size; }
  bool is_split() const { return previous != nullptr || next != nullptr; }
  bool has_memory() const { return state != State::kUnmapped && state != State::kRetired; }
};

inline bool FitOrder::operator()(const Block* a, const Block* b) const {
  return (*this)(a, FitKey{b->stream(), b->size, b->address});
}

inline bool FitOrder::operator()(const Block* a, const FitKey& b) const {
  if (a->stream() != b.stream) return a->stream() < b.stream;
  if (a->size != b.size) return a->size < b.size;
  return a->address < b.address;
}

struct Pool {
  Pool(PoolKind kind_of, bool is_oversize, PoolGroup& group_of)
      : kind(kind_of), oversize(is_oversize), group(group_of) {}

  PoolKind kind;
  bool oversize;  ///< under vmm growth: for requests of at least max_split_size
  PoolGroup& group;
  FreeSet free;
  std::uint64_t fit_calls = 0;
};

/// The pools of one id: the default pools of one tag, or the private pools of a graph or a MemPool.
struct PoolGroup {
  explicit PoolGroup(PoolId pool_id, Tag tag_of = 0) : id(pool_id), tag(tag_of) {}
  PoolGroup(const PoolGroup&) = delete;
  PoolGroup& operator=(const PoolGroup&) = delete;

  bool is_private() const { return !id.is_default(); }
  /// Whether unused memory may go back to the device: not while a graph may still replay these addresses.
  bool is_releasable() const { return !is_private() || use_count == 0; }

  PoolId id;
  Tag tag;
  bool paused = false;  ///< the segments have addresses and no memory
  bool held = false;    ///< others know the physical memory: never paused
  Pool small{PoolKind::kSmall, false, *this};
  Pool large{PoolKind::kLarge, false, *this};
  Pool oversize{PoolKind::kLarge, true, *this};
  int use_count = 0;
  Serial released = 0;  ///< when the last user left: graphs launched until then may still run
  bool use_on_oom = false;
  bool no_split = false;
  bool by_malloc = false;  ///< segments of cudaMalloc, also under vmm growth
  std::shared_ptr<SegmentSource> source;
  std::map<Address, Segment*> segments;
};

/// An allocation's demands on the heap.
struct Request {
  Bytes requested = 0;
  Bytes size = 0;  ///< rounded
  Stream stream = 0;
  Pool* pool = nullptr;
  const Context* context = nullptr;
  Tag tag = 0;
};

}  // namespace pac::alloc
