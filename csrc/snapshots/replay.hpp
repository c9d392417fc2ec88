// Replays a recording under other settings: its allocations and frees go to the core on a simulated device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "allocator/address_table.hpp"
#include "allocator/caching_allocator.hpp"
#include "device/simulated_device.hpp"
#include "snapshots/event_columns.hpp"
#include "snapshots/pauses.hpp"

namespace pac::alloc {

/// The peaks within a stretch of events.
struct TimelinePoint {
  std::size_t end = 0;  ///< the stretch ends before this event
  Bytes allocated = 0;
  Bytes active = 0;
  Bytes reserved = 0;
};

struct ReplayCounts {
  std::uint64_t allocations = 0;
  std::uint64_t unknown_frees = 0;  ///< of addresses without a recorded allocation
  std::uint64_t lost_frees = 0;     ///< addresses allocated again while in use: taken as freed just before
  std::uint64_t cache_emptied = 0;  ///< times the cache was emptied, as in the recording
};

/// A block paused or live before the first event, for a recording that pauses memory.
struct ReplayedBefore {
  BlockBefore block;
  Bytes requested = 0;
  Stream stream = 0;
  std::uint32_t pool = 0;
};

class Replay {
 public:
  /// `pools`: the first is the default one. `existing`: the segments and blocks of these pools when the recording
  /// began. Under malloc growth segments are recreated at their addresses, with their blocks; otherwise, and for
  /// expandable segments, the blocks are allocated in the order given. `emptied`: the events, in order, after which the
  /// program had emptied the cache. `points`: approximate length of the timeline. Throws std::invalid_argument for
  /// impossible segments and blocks.
  Replay(const EventColumns& events, std::vector<PoolId> pools, std::vector<std::uint64_t> emptied,
         const Config& config, Bytes capacity, const std::vector<SegmentInfo>& existing, std::size_t points);

  /// Follows the recording's pauses: a paused block is freed, and allocated again when it is resumed. `before`: all
  /// blocks before the first event; the paused ones are not among the existing. Call before advance().
  void follow_pauses(std::vector<ReplayedBefore> before);

  /// Replays up to `count` more events. False after the last one, or when memory has run out.
  bool advance(std::size_t count);

  /// How many events were replayed.
  std::size_t position() const { return position_; }
  /// The event whose allocation failed; 0 also if the blocks from before the recording did not fit.
  std::optional<std::size_t> out_of_memory_at() const { return out_of_memory_at_; }
  /// Counters so far, with the peaks since the beginning.
  Stats stats();
  /// Calls for memory and addresses, and the host time in them, since the first event: the memory from before the
  /// recording cost the recorded program nothing here.
  std::uint64_t driver_calls() const { return memory_calls() - calls_before_; }
  double driver_seconds() const { return device_->memory_seconds() - seconds_before_; }
  const ReplayCounts& counts() const { return counts_; }
  const std::vector<TimelinePoint>& timeline() const { return timeline_; }

 private:
  /// A recorded memory block in use, and the core's block in its place.
  struct Live {
    Address ours = 0;
    Stream waits_for = 0;  ///< once freed: the stream whose event completes the free
  };
  /// The peaks so far; the core's own peaks are of the current stretch.
  struct Peaks {
    std::int64_t allocated = 0, active = 0, requested = 0, reserved = 0;
  };

  std::uint64_t memory_calls() const;
  void place(const std::vector<SegmentInfo>& existing);
  /// Allocates the mapped free memory between an expandable segment's blocks: once the fillers are freed, the core has
  /// this memory too.
  void fill(const SegmentInfo& segment, Bytes size, std::vector<Address>& fillers);
  /// Throws DeviceError if the simulated driver has no addresses for the replay, which says nothing about memory.
  Address request(Bytes size, Stream stream);
  Address take(const SegmentInfo& segment, const BlockInfo& block, std::vector<Address>& fillers);
  /// The private pool of the run of releases up to this event, if there is only one: a destroyed MemPool empties no
  /// other pool.
  PoolId only_pool(std::size_t row) const;
  void replay(std::size_t row);
  void allocate(std::size_t row);
  bool serve(std::size_t row, Address recorded, Bytes size, Stream stream, std::uint32_t pool);
  void pause(PauseTracker::Change block);
  void resume(std::size_t row, PauseTracker::Change block);
  void request_free(std::size_t row);
  void complete_free(std::size_t row);
  void give_back(std::size_t row);
  void add_live(Address recorded, Address ours);
  void forget(Address recorded, Live& live);
  void free_later(Live& live);
  void complete(Live& live);
  void use_pool(std::uint32_t pool);
  void let_streams_run();
  void end_stretch();

  EventColumns events_;
  std::vector<PoolId> pools_;
  std::vector<std::uint64_t> emptied_;
  std::size_t next_emptied_ = 0;
  std::shared_ptr<SimulatedDevice> device_;
  CachingAllocator core_;
  bool places_segments_;
  bool has_completions_;
  std::uint32_t open_pool_ = 0;
  std::size_t position_ = 0;
  std::size_t stretch_;
  std::optional<std::size_t> out_of_memory_at_;

  AddressTable<Live> live_;
  std::deque<Live> entries_;
  std::vector<Live*> spare_;
  std::vector<Stream> spare_streams_;
  Stream next_stream_;
  std::set<Stream> streams_;
  std::optional<Stream> last_stream_;
  std::optional<PauseTracker> pauses_;
  std::vector<ReplayedBefore> before_;
  std::set<Address> paused_;  ///< recorded blocks

  Peaks peaks_;
  std::uint64_t calls_before_ = 0;
  double seconds_before_ = 0.0;
  ReplayCounts counts_;
  std::vector<TimelinePoint> timeline_;
};

}  // namespace pac::alloc
