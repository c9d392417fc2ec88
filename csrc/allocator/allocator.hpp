// What the library for torch asks of one device's caching allocator. That library is built apart and links nothing of
// the core, so these functions are virtual: one class for each use. All other functions of CachingAllocator are not.
//
// Every function may be called from any thread. With an address of another allocator, a function throws UnknownAddress
// and changes nothing.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/config.hpp"
#include "allocator/history.hpp"
#include "allocator/segments.hpp"
#include "allocator/stats.hpp"
#include "allocator/types.hpp"
#include "device/device.hpp"

namespace pac::alloc {

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

/// Blocks of memory, and the settings by which they are chosen. The Runtime frees blocks: an address does not tell its
/// device.
class Allocation {
 public:
  /// At least `size` bytes, aligned to 512. Size 0 gives address 0. Throws OutOfMemory, or PauseError while the tag is
  /// paused. A private pool keeps the tag of the call that made the pool.
  virtual Address allocate(Bytes size, Stream stream, Context context = {}, Tag tag = 0) = 0;
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

 protected:
  ~Allocation() = default;
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

/// Pools of CUDA graphs and of MemPool. Between begin and end, allocations on the streams accepted by `filter` come
/// from the pool, and only from there. A pool lives while the use count is positive; afterwards the memory may be given
/// back. `captures` says that the streams are captured into a graph: no event is recorded and the device is not waited
/// for until the end.
class PrivatePools {
 public:
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

 protected:
  ~PrivatePools() = default;
};

/// Statistics, history and snapshots.
class Reports {
 public:
  virtual Stats stats() = 0;
  virtual void reset_peak_stats() = 0;
  virtual void reset_accumulated_stats() = 0;
  /// All segments, or one private pool's, with the paused ones; with_memory() leaves these out.
  virtual std::vector<SegmentInfo> segments(PoolId pool = {}) = 0;
  virtual void record_history(const HistoryOptions& options) = 0;
  virtual Trace trace() = 0;
  /// `tracker` gets every event, recorded or not, under the lock: it must not call the allocator or wait for a lock.
  virtual void set_tracker(std::function<void(const TraceEntry&)> tracker) = 0;

 protected:
  ~Reports() = default;
};

/// Functions that an allocation calls, without the lock, before it takes memory from the device or fails.
class Callbacks {
 public:
  /// Sets a callback, called before the allocator grows: it may free memory that other processes have done with.
  virtual void set_growth_callback(std::function<void()> callback) = 0;
  /// Registers a callback, called before an allocation fails: takes the missing bytes, returns whether memory was
  /// freed. An exception counts as false and is quoted in OutOfMemory's text. Returns the id for
  /// remove_pressure_callback.
  virtual int add_pressure_callback(std::function<bool(Bytes)> callback) = 0;
  /// Registers an observer, called when every remedy has failed, before OutOfMemory is thrown: requested bytes, device
  /// total, device free.
  virtual int add_oom_observer(std::function<void(Bytes, Bytes, Bytes)> observer) = 0;

 protected:
  ~Callbacks() = default;
};

class Allocator : public Allocation, public PrivatePools, public Reports, public Callbacks {
 public:
  Allocator() = default;
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

 protected:
  ~Allocator() = default;
};

}  // namespace pac::alloc
