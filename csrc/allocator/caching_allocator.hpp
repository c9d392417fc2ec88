// One device's caching allocator: a heap, two supplies, the stream order, what is paused, and the lock around them.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/allocator.hpp"
#include "allocator/capture_order.hpp"
#include "allocator/heap.hpp"
#include "allocator/pausing.hpp"
#include "allocator/scopes.hpp"
#include "allocator/stream_order.hpp"
#include "allocator/supply.hpp"

namespace pac::alloc {

/// Every function may be called from any thread. The groups are those of allocator.hpp, and pausing; the functions that
/// the library for torch does not call are not virtual.
class CachingAllocator final : public Allocator {
 public:
  /// Throws std::invalid_argument for settings out of range. A device without virtual memory always grows by malloc;
  /// config() shows the growth in use.
  explicit CachingAllocator(std::shared_ptr<Device> device, const Config& config = {});
  ~CachingAllocator();

  // Allocation.
  Address allocate(Bytes size, Stream stream, Context context = {}, Tag tag = 0) override;
  /// Never synchronises. try_free returns false, and changes nothing, if the address is not this allocator's.
  void free(Address address, Context context = {});
  bool try_free(Address address, Context context = {});
  bool owns(Address address);
  void record_stream(Address address, Stream stream) override;
  BaseAllocation base_allocation(Address address) override;
  BlockInfo block(Address address) override;
  std::optional<SharedMemory> share(Address address) override;
  void empty_cache(PoolId pool = {}, Context context = {}) override;
  Bytes largest_available() override;
  Config config() const override;
  void configure(const Config& config) override;
  /// Recreates a recorded segment and allocates the blocks in use there. The device must place its next segment at the
  /// recorded address. Throws OutOfMemory, and std::invalid_argument for an impossible or overlapping segment; the
  /// allocator is then unusable.
  void adopt(const SegmentInfo& info);

  // PrivatePools.
  void begin_allocate_to_pool(PoolId pool, std::function<bool(Stream)> filter, Tag tag = 0,
                              bool captures = true) override;
  void end_allocate_to_pool(PoolId pool) override;
  void create_or_incref_pool(PoolId pool, std::shared_ptr<SegmentSource> source = nullptr, Tag tag = 0) override;
  void release_pool(PoolId pool) override;
  int pool_use_count(PoolId pool) override;
  void set_use_on_oom(PoolId pool, bool use) override;
  void set_no_split(PoolId pool) override;
  std::vector<Address> live_allocations(PoolId pool) override;
  PoolCheckpoint checkpoint(PoolId pool) override;
  CheckpointDelta restore(const PoolCheckpoint& checkpoint) override;

  // Pausing. Addresses, blocks and counters of allocations stay, and the caller queues no work that touches the memory
  // until resume(). pause() and resume() throw PauseError, and change nothing, for a tag already in the wanted state,
  // during a capture, and without growth by virtual memory.

  /// Throws what pause() would throw but for host memory.
  void check_pause(const PauseOptions& options);
  /// Waits for the device. Throws PauseError if the host has too little memory for the contents.
  PauseReport pause(const PauseOptions& options);
  /// Throws OutOfMemory, with the tags still paused, if the device has too little memory.
  ResumeReport resume(const std::vector<Tag>& tags);
  std::vector<PausedInfo> paused();
  std::vector<HostRange> saved(Address address, Bytes size);
  /// Whether a private pool stays as it is while its tag is paused, because others know the physical memory.
  void hold(PoolId pool, bool held);
  void trim_host() { pausing_.trim_host(); }

  // Reports.
  Stats stats() override;
  void reset_peak_stats() override;
  void reset_accumulated_stats() override;
  std::vector<SegmentInfo> segments(PoolId pool = {}) override;
  void record_history(const HistoryOptions& options) override;
  Trace trace() override;
  void set_tracker(std::function<void(const TraceEntry&)> tracker) override;
  Fragmentation fragmentation();
  /// Opens a scope, and returns a number that no other scope of this allocator ever has.
  std::int64_t push_scope();
  /// Closes a scope, the latest or an earlier one; later scopes stay open. Throws std::logic_error if this scope is not
  /// open.
  ScopeStats pop_scope(std::int64_t id);
  /// Throws std::logic_error naming the first broken invariant. Slow: for tests.
  void check_invariants();

  // Callbacks.
  void set_growth_callback(std::function<void()> callback) override;
  int add_pressure_callback(std::function<bool(Bytes)> callback) override;
  void remove_pressure_callback(int id);
  int add_oom_observer(std::function<void(Bytes, Bytes, Bytes)> observer) override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// Where allocations of some streams or of a thread go.
  struct Route {
    PoolId pool;
    std::function<bool(Stream)> filter;
    bool captures;  ///< the streams are captured into a graph
  };

  /// A block freed during a capture, when no event may be recorded.
  struct Deferred {
    Block* block;
    std::optional<CaptureOrder::Marks> marks;  ///< nullopt: free after the capture only
  };

  Block& live(Address address);
  PoolGroup& private_group(PoolId pool);
  bool capturing() const { return captures_ > 0; }
  PoolGroup& group_for(Stream stream, Tag tag);
  /// The same; PauseError if the group is paused.
  PoolGroup& running_group(Stream stream, Tag tag);
  void resume_for(PoolGroup& group, Lock& lock);
  ResumeReport resume_tags(const std::vector<Tag>& tags, Lock& lock);
  Supply& supply_for(const PoolGroup& group) { return vmm_ && !group.source && !group.by_malloc ? *vmm_ : *malloc_; }
  void free_block(Block& block, const Context& context);
  void end_sharing(Block& block);
  void collect_freed();
  /// Frees the deferred blocks whose other streams' work runs before the stream's next work in the graph; returns the
  /// stream's capture. nullopt without the setting or the capture.
  std::optional<CaptureId> reuse_joined(Stream stream);
  /// What a free has to wait for within the capture that allocated the block; nullopt: for the end of the capture.
  std::optional<CaptureOrder::Marks> marks_of_free(Block& block);

  /// Sets request.pool to the group's pool; returns the best free block there, or nullptr.
  Block* find_fit(PoolGroup& group, Request& request);
  Block* attempt(Request& request, Effort effort, Lock& lock);
  /// Takes a segment from the pool's own source, without the lock.
  Block* grow_from_source(Request& request, Lock& lock);
  /// Gives segments back to their sources, without the lock.
  void return_segments(Lock& lock);
  Block* obtain(Request& request, Lock& lock);
  Block* borrow_from_private_pools(Request& request);
  Block* wait_for_streams(Request& request, Lock& lock);
  Block* ask_callbacks(Request& request, Lock& lock, std::string& error);
  void call_before_growth(Lock& lock);
  void wait(StreamOrder::Wait wait, Lock& lock);
  /// Waits for all work queued by now, without the lock; returns the moment. Blocks freed by then are free afterwards.
  Serial finish_device(Lock& lock);
  void release_cached(Lock& lock, PoolId only, const Context& context);
  [[noreturn]] void fail(const Request& request, Lock& lock, const std::string& callback_error);

  mutable std::mutex mutex_;
  std::shared_ptr<Device> device_;
  Heap heap_;
  StreamOrder order_;
  std::unique_ptr<Supply> malloc_;  ///< also for private pools with a SegmentSource
  std::unique_ptr<Supply> vmm_;     ///< growth by virtual memory; nullptr under malloc growth
  std::vector<Route> routes_;
  int captures_ = 0;  ///< routes that capture
  CaptureOrder capture_order_;
  std::unordered_map<const Block*, CaptureId>
      captured_;  ///< live blocks that captured work allocated, under the setting
  std::list<Deferred> deferred_;
  std::vector<Block*> unordered_;  ///< deferred, on destroyed streams: released after the next device synchronisation
  Pausing pausing_;
  Scopes scopes_;
  std::vector<std::pair<int, std::function<bool(Bytes)>>> callbacks_;
  std::function<void()> before_growth_;
  std::vector<std::function<void(Bytes, Bytes, Bytes)>> observers_;
  std::string refused_;  ///< the driver's words, if it refused virtual memory during the last growth
  int next_callback_ = 0;
};

}  // namespace pac::alloc
