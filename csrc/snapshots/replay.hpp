// A replay under other settings: a recording's allocations and frees, given to the core on a
// simulated device.
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

namespace pac::alloc {

/// The most of each in a stretch of events.
struct TimelinePoint {
  std::size_t end = 0;  ///< the stretch's events came before this one
  Bytes allocated = 0;
  Bytes active = 0;
  Bytes reserved = 0;
};

struct ReplayCounts {
  std::uint64_t allocations = 0;
  std::uint64_t unknown_frees = 0;  ///< of addresses that nothing was seen to allocate
  std::uint64_t lost_frees = 0;     ///< blocks in use whose address was allocated again: taken as freed just before
  std::uint64_t cache_emptied = 0;  ///< times that unused memory was given back, as in the recording
};

class Replay {
 public:
  /// `pools`: the first is the default one. `existing`: the segments and blocks of these pools when the recording
  /// began. Under malloc growth segments are taken over where they lay, with their blocks by address; otherwise, and
  /// from expandable ones, the blocks are allocated in the order given. `emptied`: the events, in order, after which
  /// the program had emptied the cache. `points`: of the timeline, about. Throws std::invalid_argument for segments and
  /// blocks that cannot have existed.
  Replay(const EventColumns& events, std::vector<PoolId> pools, std::vector<std::uint64_t> emptied,
         const Config& config, Bytes capacity, const std::vector<SegmentInfo>& existing, std::size_t points);

  /// Replays up to `count` more events. False once all are, or memory has run out.
  bool advance(std::size_t count);

  /// How many events were replayed.
  std::size_t position() const { return position_; }
  /// The event whose allocation failed; 0 also where what existed before did not fit.
  std::optional<std::size_t> out_of_memory_at() const { return out_of_memory_at_; }
  /// Counters so far, with the peaks since the beginning.
  Stats stats();
  SimulatedDevice::Calls calls() const { return device_->calls(); }
  double driver_seconds() const { return device_->memory_seconds(); }
  const ReplayCounts& counts() const { return counts_; }
  const std::vector<TimelinePoint>& timeline() const { return timeline_; }

 private:
  /// A recorded block in use, and ours in its place.
  struct Live {
    Address ours = 0;
    Stream waits_for = 0;  ///< once it was freed: the stream whose event completes it
  };
  /// The most so far; the core's own peaks are of the current stretch.
  struct Peaks {
    std::int64_t allocated = 0, active = 0, requested = 0, reserved = 0;
  };

  void place(const std::vector<SegmentInfo>& existing);
  /// Takes mapped free memory between blocks of a segment that expands, so that it is there once it is freed.
  void fill(const SegmentInfo& segment, Bytes size, std::vector<Address>& fillers);
  Address take(const SegmentInfo& segment, const BlockInfo& block, std::vector<Address>& fillers);
  /// The private pool that the row of events up to this one gave back, alone: a MemPool that goes empties only its own.
  PoolId only_pool(std::size_t row) const;
  void replay(std::size_t row);
  void allocate(std::size_t row);
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

  Peaks peaks_;
  ReplayCounts counts_;
  std::vector<TimelinePoint> timeline_;
};

}  // namespace pac::alloc
