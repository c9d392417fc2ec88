// One device's caching allocator: a heap, two supplies, the stream order, and the lock around them.
#pragma once

#include <functional>
#include <list>
#include <map>
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
#include "allocator/host_store.hpp"
#include "allocator/stream_order.hpp"
#include "allocator/supply.hpp"

namespace pac::alloc {

class CachingAllocator final : public Allocator {
 public:
  /// Throws std::invalid_argument for settings out of range. A device without virtual memory always grows by malloc;
  /// config() shows the growth in use.
  explicit CachingAllocator(std::shared_ptr<Device> device, const Config& config = {});
  ~CachingAllocator() override;

  Address allocate(Bytes size, Stream stream, Context context = {}, Tag tag = 0) override;
  void free(Address address, Context context) override;
  bool try_free(Address address, Context context) override;
  bool owns(Address address) override;
  void record_stream(Address address, Stream stream) override;
  BaseAllocation base_allocation(Address address) override;
  BlockInfo block(Address address) override;
  std::optional<SharedMemory> share(Address address) override;
  void empty_cache(PoolId pool = {}, Context context = {}) override;
  Bytes largest_available() override;

  Config config() const override;
  void configure(const Config& config) override;

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

  void check_pause(const PauseOptions& options) override;
  PauseReport pause(const PauseOptions& options) override;
  ResumeReport resume(const std::vector<Tag>& tags) override;
  std::vector<PausedInfo> paused() override;
  std::vector<HostRange> saved(Address address, Bytes size) override;
  void hold(PoolId pool, bool held) override;
  void trim_host() override;

  Stats stats() override;
  void reset_peak_stats() override;
  void reset_accumulated_stats() override;
  Fragmentation fragmentation() override;
  std::int64_t push_scope() override;
  ScopeStats pop_scope(std::int64_t id) override;

  void record_history(const HistoryOptions& options) override;
  Trace trace() override;
  std::vector<SegmentInfo> segments(PoolId pool) override;
  void set_tracker(std::function<void(const TraceEntry&)> tracker) override;
  int add_pressure_callback(std::function<bool(Bytes)> callback) override;
  void remove_pressure_callback(int id) override;
  void set_growth_callback(std::function<void()> callback) override;
  int add_oom_observer(std::function<void(Bytes, Bytes, Bytes)> observer) override;
  void check_invariants() override;

  /// Recreates a recorded segment and allocates the blocks in use there. The device must place its next segment at the
  /// recorded address. Throws OutOfMemory, and std::invalid_argument for an impossible or overlapping segment; the
  /// allocator is then unusable.
  void adopt(const SegmentInfo& info);

 private:
  using Lock = std::unique_lock<std::mutex>;
  /// An allocation is counted in the latest scope alone; pop_scope adds later scopes' counts to the earlier ones'.
  struct Scope {
    std::int64_t id;
    std::int64_t allocated;  ///< at the beginning
    std::int64_t reserved;   ///< at the beginning
    std::int64_t peak;
    std::int64_t total = 0;
    std::int64_t allocations = 0;
  };

  /// Where allocations of some streams or of a thread go.
  struct Route {
    PoolId pool;
    std::function<bool(Stream)> filter;
    bool captures;  ///< the streams are captured into a graph
  };
  /// A piece of a block's contents.
  struct Saved {
    Bytes offset;  ///< in the block
    Bytes size;
    std::shared_ptr<const HostStore::Chunk> chunk;
    Bytes at;  ///< in the chunk
  };
  /// A block freed during a capture, when no event may be recorded.
  struct Deferred {
    Block* block;
    std::optional<CaptureOrder::Marks> marks;  ///< nullopt: free after the capture only
  };
  struct Paused {
    bool resume_on_allocation = false;
    std::map<Address, std::vector<Saved>> saved;  ///< by block; a free drops the block's
  };

  Block& live(Address address);
  PoolGroup& private_group(PoolId pool);
  bool capturing() const { return captures_ > 0; }
  PoolGroup& group_for(Stream stream, Tag tag);
  /// The same; PauseError if the group is paused.
  PoolGroup& running_group(Stream stream, Tag tag);
  bool is_paused(const PoolGroup& group) const;
  void resume_for(PoolGroup& group, Lock& lock);
  void check_can_pause(const PauseOptions& options) const;
  void check_paused(const std::vector<Tag>& tags) const;
  /// Copies the contents of live blocks to the host, for the tags that keep them.
  std::map<Tag, Paused> save(const PauseOptions& options, const std::vector<PoolGroup*>& groups, PauseReport& report);
  /// Unmaps and destroys every handle of the group; returns the bytes.
  Bytes take_memory(PoolGroup& group);
  /// Creates and maps every handle of the groups. False, without a change, if the device, the driver or the limit
  /// refuses; refused_ then has the driver's words.
  bool give_memory(const std::vector<PoolGroup*>& groups, ResumeReport& report);
  ResumeReport resume_tags(const std::vector<Tag>& tags, Lock& lock);
  /// The paused groups of the tags, without the handles whose blocks were all freed.
  std::vector<PoolGroup*> paused_groups(const std::vector<Tag>& tags);
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
  std::vector<Scope> scopes_;      ///< the latest last
  HostStore store_;
  std::map<Tag, Paused> paused_;
  std::vector<std::pair<int, std::function<bool(Bytes)>>> callbacks_;
  std::function<void()> before_growth_;
  std::vector<std::function<void(Bytes, Bytes, Bytes)>> observers_;
  std::string refused_;  ///< the driver's words, if it refused virtual memory during the last growth
  int next_callback_ = 0;
  std::int64_t next_scope_ = 0;
};

}  // namespace pac::alloc
