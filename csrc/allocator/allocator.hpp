// Interface of one device's caching allocator, a table of virtual functions. The Python module, the pluggable library
// and the separately built torch subclass all reach the core through this class.
//
// Every function may be called from any thread. With an address of another allocator, a function throws UnknownAddress
// and changes nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/config.hpp"
#include "allocator/stats.hpp"
#include "allocator/types.hpp"
#include "device/device.hpp"

namespace pac::alloc {

enum class BlockState : std::uint8_t { kFree, kAllocated, kPending };

struct BlockInfo {
  Address address = 0;
  Bytes size = 0;
  Bytes requested = 0;
  BlockState state = BlockState::kFree;
  Context context;  ///< of the allocation
};

struct AddressRange {
  Address address = 0;
  Bytes size = 0;
};

/// A contiguous range of mapped or paused memory, tiled by `blocks` in address order.
struct SegmentInfo {
  Address address = 0;
  Bytes size = 0;
  Stream stream = 0;
  PoolKind kind = PoolKind::kSmall;
  PoolId pool;
  bool expandable = false;  ///< made of mapped handles
  Context context;          ///< of the allocation that caused the last growth
  std::vector<BlockInfo> blocks;
  std::size_t order = 0;               ///< in the report: older segments first, then by address
  std::vector<AddressRange> absent{};  ///< paused parts, which have no memory, by address
};

/// In torch's order. The core never records kSnapshot: callers make snapshots from segments() and trace().
enum class Action : std::uint8_t {
  kAlloc,
  kFreeRequested,
  kFreeCompleted,
  kSegmentAlloc,
  kSegmentFree,
  kSegmentMap,
  kSegmentUnmap,
  kSnapshot,
  kOutOfMemory,
};

struct TraceEntry {
  Action action = Action::kAlloc;
  Address address = 0;  ///< for kOutOfMemory: the device's free bytes
  Bytes size = 0;       ///< requested, for allocations and frees; whole, for segments
  Stream stream = 0;
  PoolId pool;
  std::int64_t time_us = 0;  ///< since the epoch
  Context context;
};

struct HistoryOptions {
  bool enabled = false;
  std::size_t max_entries = 0;     ///< beyond this number the oldest entries are dropped
  bool record_trace = false;       ///< false: contexts of live blocks only
  bool clear = false;              ///< forget earlier entries
  std::uint32_t skip_actions = 0;  ///< bit 1 << Action: not recorded
};

struct Trace {
  std::vector<TraceEntry> entries;  ///< oldest first
  std::uint64_t dropped = 0;
};

/// A memory block in use, and the free bytes that this block alone keeps from being merged or given back.
struct Pin {
  BlockInfo block;
  Bytes pinned = 0;
};

struct Fragmentation {
  Bytes reserved = 0;
  Bytes allocated = 0;
  Bytes pending = 0;
  Bytes free = 0;
  Bytes largest_free = 0;
  Bytes requested = 0;
  Bytes paused = 0;  ///< of allocated bytes: in memory that is paused, and not among the reserved
  std::map<Stream, Bytes> free_by_stream;
  std::map<Bytes, std::uint64_t> histogram;  ///< lower bound (a power of two) -> number of free blocks
  std::map<Bytes, Bytes> free_below;         ///< size (a power of two) -> free bytes in blocks below this size
  std::vector<Pin> pins;                     ///< most pinned bytes first, 10 at most
};

/// The memory blocks of a private pool at one moment, for restore().
struct PoolCheckpoint {
  PoolId pool;
  std::vector<SegmentInfo> segments;
};

struct CheckpointDelta {
  std::vector<Address> freed;
  std::vector<Address> allocated;
};

struct PauseOptions {
  std::map<Tag, bool> keep;           ///< the tags to pause, and whether to keep the contents of live blocks
  bool resume_on_allocation = false;  ///< an allocation in a paused tag resumes the tag; otherwise PauseError
};

/// A private pool that stayed as it was.
struct NotPaused {
  PoolId pool;
  Bytes bytes = 0;          ///< reserved
  const char* reason = "";  ///< "is held", say
};

struct PauseReport {
  Bytes released = 0;  ///< physical memory given back to the device
  Bytes saved = 0;     ///< contents kept in host memory
  Bytes pinned = 0;    ///< host memory pinned anew
  std::vector<NotPaused> skipped;
};

struct ResumeReport {
  Bytes mapped = 0;    ///< physical memory taken from the device
  Bytes restored = 0;  ///< contents copied back
};

struct PausedInfo {
  Tag tag = 0;
  Bytes released = 0;  ///< physical memory that resume() takes again
  Bytes saved = 0;
};

/// A piece of pinned host memory.
struct HostRange {
  Address address = 0;
  Bytes size = 0;
};

struct BaseAllocation {
  Address address = 0;
  Bytes size = 0;
};

/// What another process needs to open a block.
struct SharedMemory {
  std::string text;              ///< for Runtime::open_shared
  Bytes offset = 0;              ///< of the block in the first of its handles
  Bytes piece_size = 0;          ///< of each handle; 0 if they differ
  std::vector<int> descriptors;  ///< one a handle, open until the block is freed
};

class Allocator {
 public:
  Allocator() = default;
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;
  virtual ~Allocator() = default;

  /// At least `size` bytes, aligned to 512. Size 0 gives address 0. Throws OutOfMemory.
  /// PauseError while the tag is paused. A private pool keeps the tag of the call that made the pool.
  virtual Address allocate(Bytes size, Stream stream, Context context = {}, Tag tag = 0) = 0;
  /// Never synchronises. try_free returns false, and changes nothing, if the address is not this allocator's.
  virtual void free(Address address, Context context = {}) = 0;
  virtual bool try_free(Address address, Context context = {}) = 0;
  virtual bool owns(Address address) = 0;
  /// Notes that `stream` uses the block too: once freed, the block is reused only after `stream` has finished the work
  /// queued until then.
  virtual void record_stream(Address address, Stream stream) = 0;
  virtual BaseAllocation base_allocation(Address address) = 0;
  virtual BlockInfo block(Address address) = 0;
  /// Lets other processes open the block's memory, which neither moves nor is given back until the block is freed.
  /// nullopt for memory that is not of mapped handles (malloc growth, a SegmentSource). Throws DeviceError.
  virtual std::optional<SharedMemory> share(Address address) = 0;
  /// Gives all unused memory back to the device, or one private pool's. May synchronise.
  virtual void empty_cache(PoolId pool = {}, Context context = {}) = 0;
  /// The largest possible allocation, growth included.
  virtual Bytes largest_available() = 0;

  virtual Config config() const = 0;
  /// Changes settings of a running allocator. Throws std::invalid_argument for a change of growth.
  virtual void configure(const Config& config) = 0;

  // Private pools: between begin and end, allocations on the streams accepted by `filter` come from the pool, and only
  // from there. A pool lives while the use count is positive; afterwards the memory may be given back. `captures` says
  // that the streams are captured into a graph: no event is recorded and the device is not waited for until the end.
  virtual void begin_allocate_to_pool(PoolId pool, std::function<bool(Stream)> filter, Tag tag = 0,
                                      bool captures = true) = 0;
  virtual void end_allocate_to_pool(PoolId pool) = 0;
  virtual void create_or_incref_pool(PoolId pool, std::shared_ptr<SegmentSource> source = nullptr, Tag tag = 0) = 0;
  virtual void release_pool(PoolId pool) = 0;
  virtual int pool_use_count(PoolId pool) = 0;
  virtual void set_use_on_oom(PoolId pool, bool use) = 0;
  virtual void set_no_split(PoolId pool) = 0;
  virtual std::vector<Address> live_allocations(PoolId pool) = 0;
  virtual PoolCheckpoint checkpoint(PoolId pool) = 0;
  virtual CheckpointDelta restore(const PoolCheckpoint& checkpoint) = 0;

  // Pausing: the physical memory of tags goes back to the device, and addresses, blocks and counters of allocations
  // stay. The caller queues no work that touches the memory until resume(). Both throw PauseError, and change nothing,
  // for a tag already in the wanted state, during a capture, and without growth by virtual memory.

  /// Throws what pause() would throw but for host memory.
  virtual void check_pause(const PauseOptions& options) = 0;
  /// Waits for the device. Throws PauseError if the host has too little memory for the contents.
  virtual PauseReport pause(const PauseOptions& options) = 0;
  /// Throws OutOfMemory, with the tags still paused, if the device has too little memory.
  virtual ResumeReport resume(const std::vector<Tag>& tags) = 0;
  virtual std::vector<PausedInfo> paused() = 0;
  /// The saved contents of a range of paused memory, in order; nothing where no contents were kept.
  virtual std::vector<HostRange> saved(Address address, Bytes size) = 0;
  /// Whether a private pool stays as it is while its tag is paused, because others know the physical memory.
  virtual void hold(PoolId pool, bool held) = 0;
  /// Gives host memory that no paused tag uses back to the host.
  virtual void trim_host() = 0;

  virtual Stats stats() = 0;
  virtual void reset_peak_stats() = 0;
  virtual void reset_accumulated_stats() = 0;
  virtual Fragmentation fragmentation() = 0;
  /// Opens a scope, and returns a number that no other scope of this allocator ever has.
  virtual std::int64_t push_scope() = 0;
  /// Closes a scope, the latest or an earlier one; later scopes stay open. Throws std::logic_error if this scope is not
  /// open.
  virtual ScopeStats pop_scope(std::int64_t id) = 0;

  virtual void record_history(const HistoryOptions& options) = 0;
  virtual Trace trace() = 0;
  /// All segments, or one private pool's, with the paused ones; with_memory() leaves these out.
  virtual std::vector<SegmentInfo> segments(PoolId pool = {}) = 0;
  /// `tracker` gets every event, recorded or not, under the lock: it must not call the allocator or wait for a lock.
  virtual void set_tracker(std::function<void(const TraceEntry&)> tracker) = 0;

  /// Registers a callback, called without the lock before an allocation fails: takes the missing bytes, returns whether
  /// memory was freed. An exception counts as false and is quoted in OutOfMemory's text. Returns the id for
  /// remove_pressure_callback.
  virtual int add_pressure_callback(std::function<bool(Bytes)> callback) = 0;
  virtual void remove_pressure_callback(int id) = 0;
  /// Sets a callback, called without the lock before the allocator grows: it may free memory that other processes have
  /// done with.
  virtual void set_growth_callback(std::function<void()> callback) = 0;
  /// Registers an observer, called without the lock when every remedy has failed, before OutOfMemory is thrown:
  /// requested bytes, device total, device free.
  virtual int add_oom_observer(std::function<void(Bytes, Bytes, Bytes)> observer) = 0;

  /// Throws std::logic_error naming the first broken invariant. Slow: for tests.
  virtual void check_invariants() = 0;
};

}  // namespace pac::alloc
