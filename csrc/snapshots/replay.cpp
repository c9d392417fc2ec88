#include "snapshots/replay.hpp"

#include <algorithm>
#include <utility>

#include "common/check.hpp"

namespace pac::alloc {

namespace {

// A block that other streams still used when freed waits for a stream of its own, so that the free completes when the
// recording says; no real stream has such a number.
constexpr Stream kFirstOwnStream = Stream{1} << 63;

// The host runs ahead of a stream by the length of the launch queue, 1024; an allocation seldom comes without a launch.
constexpr std::size_t kEventsAhead = 1024;

// Far more than requests up to 1 MiB ever leave free; a file with a larger claim would take long to fill.
constexpr Bytes kMostSmall = Bytes{4} << 30;

constexpr Bytes kSegmentAlignment = Bytes{2} << 20;  // of cudaMalloc's segments

bool is_given_back(Action action) { return action == Action::kSegmentFree || action == Action::kSegmentUnmap; }

/// A free block of the large pool has more than 1 MiB: a smaller gap after a block in use belongs to this block.
SegmentInfo with_slack(SegmentInfo segment) {
  if (segment.kind == PoolKind::kSmall) return segment;
  for (std::size_t i = 0; i < segment.blocks.size(); ++i) {
    BlockInfo& block = segment.blocks[i];
    const bool last = i + 1 == segment.blocks.size();
    const Address end = last ? segment.address + segment.size : segment.blocks[i + 1].address;
    const Address own = block.address + block.size;
    if (own < end && end - own <= kSmallSize) block.size = end - block.address;
  }
  return segment;
}

}  // namespace

Replay::Replay(const EventColumns& events, std::vector<PoolId> pools, std::vector<std::uint64_t> emptied,
               const Config& config, Bytes capacity, const std::vector<SegmentInfo>& existing, std::size_t points)
    : events_(events),
      pools_(std::move(pools)),
      emptied_(std::move(emptied)),
      device_(std::make_shared<SimulatedDevice>(capacity)),
      core_(device_, config),
      places_segments_(config.growth == Growth::kMalloc),
      stretch_(std::max<std::size_t>(1, events.count / std::max<std::size_t>(1, points))),
      next_stream_(kFirstOwnStream) {
  PAC_CHECK(!pools_.empty() && pools_[0].is_default(), "the first pool is the default one, (0, 0)");
  const auto last = static_cast<std::uint8_t>(Action::kFreeCompleted);
  has_completions_ = std::find(events.action, events.action + events.count, last) != events.action + events.count;
  for (std::size_t i = 1; i < pools_.size(); ++i) core_.create_or_incref_pool(pools_[i], nullptr);
  try {
    place(existing);
  } catch (const OutOfMemory&) {
    out_of_memory_at_ = 0;
  }
  calls_before_ = memory_calls();
  seconds_before_ = device_->memory_seconds();
  end_stretch();
}

std::uint64_t Replay::memory_calls() const {
  const SimulatedDevice::Calls calls = device_->calls();
  return calls.acquire + calls.release + calls.reserve + calls.unreserve + calls.create + calls.destroy + calls.map +
         calls.unmap;
}

void Replay::place(const std::vector<SegmentInfo>& existing) {
  const auto is_adopted = [this](const SegmentInfo& each) { return places_segments_ && !each.expandable; };
  // Segments with a recorded place come first: nothing else may take their addresses.
  for (const SegmentInfo& segment : existing) {
    if (!is_adopted(segment)) continue;
    device_->suggest(segment.address);
    core_.adopt(with_slack(segment));
  }
  device_->suggest(0);
  std::vector<Address> fillers;
  for (const SegmentInfo& segment : existing) {
    const auto pool = std::find(pools_.begin(), pools_.end(), segment.pool) - pools_.begin();
    const bool adopted = is_adopted(segment);
    streams_.insert(segment.stream);
    Address end = segment.address;
    for (const BlockInfo& block : segment.blocks) {
      if (block.state == BlockState::kFree) continue;
      PAC_CHECK(!live_.find(block.address), "two memory blocks lie at ", block.address);
      use_pool(static_cast<std::uint32_t>(pool));
      if (!adopted && block.address > end) fill(segment, block.address - end, fillers);
      end = block.address + block.size;
      add_live(block.address, adopted ? block.address : take(segment, block, fillers));
      if (block.state == BlockState::kPending) free_later(*live_.find(block.address));
    }
    use_pool(static_cast<std::uint32_t>(pool));
    if (!adopted && segment.address + segment.size > end) fill(segment, segment.address + segment.size - end, fillers);
  }
  for (const Address filler : fillers) core_.free(filler, {});
  // Fillers and the retries for them are no part of the program.
  core_.reset_peak_stats();
  core_.reset_accumulated_stats();
}

Address Replay::request(Bytes size, Stream stream) {
  try {
    return core_.allocate(size, stream);
  } catch (const DriverRefusal& refusal) {
    throw DeviceError(refusal.what());
  }
}

Address Replay::take(const SegmentInfo& segment, const BlockInfo& block, std::vector<Address>& fillers) {
  const Bytes size = std::max<Bytes>(1, block.requested);
  try {
    return request(size, segment.stream);
  } catch (const OutOfMemory&) {
    if (fillers.empty()) throw;
  }
  // Memory must not run out because of fillers.
  for (const Address filler : std::exchange(fillers, {})) core_.free(filler, {});
  const std::uint32_t pool = open_pool_;
  use_pool(0);
  core_.empty_cache({});
  use_pool(pool);
  return request(size, segment.stream);
}

void Replay::fill(const SegmentInfo& segment, Bytes size, std::vector<Address>& fillers) {
  if (places_segments_ || !segment.expandable) return;
  const bool small = segment.kind == PoolKind::kSmall;
  if (small) size = std::min(size, kMostSmall);
  const Config config = core_.config();
  Config exact = config;  // fill exactly the mapped bytes, without rounding
  exact.roundup_power2_divisions = {};
  core_.configure(exact);
  // The other pool would serve a smaller request.
  const Bytes least = small ? 1 : kSmallSize + 1;
  const Bytes page = small ? kSmallBuffer : core_.config().large_segment_size;
  while (size >= least && round_up(size, page) <= device_->memory().free) {
    const Bytes piece = small ? std::min(size, kSmallSize) : size;
    try {
      fillers.push_back(request(piece, segment.stream));
    } catch (const OutOfMemory&) {  // memory_fraction is reached
      break;
    }
    size -= piece;
  }
  core_.configure(config);
}

bool Replay::advance(std::size_t count) {
  const std::size_t end = std::min(events_.count, position_ + std::min(count, events_.count));
  while (position_ < end && !out_of_memory_at_) {
    replay(position_);
    ++position_;
    if (position_ % kEventsAhead == 0) let_streams_run();
    if (position_ % stretch_ == 0 || position_ == events_.count) end_stretch();
  }
  return position_ < events_.count && !out_of_memory_at_;
}

void Replay::follow_pauses(std::vector<ReplayedBefore> before) {
  before_ = std::move(before);
  std::vector<BlockBefore> blocks;
  for (const ReplayedBefore& each : before_) {
    blocks.push_back(each.block);
    if (each.block.absent > 0) paused_.insert(each.block.address);
  }
  pauses_.emplace(events_, blocks);
}

void Replay::pause(PauseTracker::Change block) {
  Live* const live = live_.find(block.address);
  if (!live) return;
  forget(block.address, *live);
  paused_.insert(block.address);
}

void Replay::resume(std::size_t row, PauseTracker::Change block) {
  if (paused_.erase(block.address) == 0) return;
  if (block.source >= 0) {
    const auto from = static_cast<std::size_t>(block.source);
    serve(row, block.address, events_.size[from], events_.stream[from], events_.pool[from]);
  } else {
    const ReplayedBefore& each = before_[static_cast<std::size_t>(~block.source)];
    serve(row, block.address, each.requested, each.stream, each.pool);
  }
}

void Replay::replay(std::size_t row) {
  if (pauses_) {
    pauses_->advance();
    for (const PauseTracker::Change& block : pauses_->paused()) pause(block);
    for (const PauseTracker::Change& block : pauses_->resumed()) {
      if (!out_of_memory_at_) resume(row, block);
    }
  }
  switch (events_.action_at(row)) {
    case Action::kAlloc:
      allocate(row);
      break;
    case Action::kFreeRequested:
      request_free(row);
      break;
    case Action::kFreeCompleted:
      complete_free(row);
      break;
    case Action::kSegmentFree:
    case Action::kSegmentUnmap:
      give_back(row);
      break;
    default:
      break;  // the recorded allocator's own events
  }
}

void Replay::allocate(std::size_t row) {
  const Address recorded = events_.address[row];
  if (Live* lost = live_.find(recorded)) {
    ++counts_.lost_frees;
    forget(recorded, *lost);
  }
  counts_.lost_frees += paused_.erase(recorded);
  if (serve(row, recorded, events_.size[row], events_.stream[row], events_.pool[row])) ++counts_.allocations;
}

bool Replay::serve(std::size_t row, Address recorded, Bytes size, Stream stream, std::uint32_t pool) {
  if (stream != last_stream_) {
    streams_.insert(stream);
    last_stream_ = stream;
  }
  PAC_CHECK(pool < pools_.size(), "event ", row, " is of pool ", pool, " of ", pools_.size());
  use_pool(pool);
  // A segment needed by the recorded allocator too lies at the recorded address: ties among free blocks fall as
  // recorded.
  if (places_segments_) device_->suggest(recorded % kSegmentAlignment == 0 ? recorded : 0);
  try {
    if (const Address ours = request(size, stream)) add_live(recorded, ours);
    return true;
  } catch (const OutOfMemory&) {
    out_of_memory_at_ = row;
    end_stretch();
    return false;
  }
}

void Replay::request_free(std::size_t row) {
  if (paused_.count(events_.address[row]) > 0) {
    if (!has_completions_) paused_.erase(events_.address[row]);
    return;
  }
  Live* live = live_.find(events_.address[row]);
  if (!has_completions_) {
    live ? forget(events_.address[row], *live) : void(++counts_.unknown_frees);
    return;
  }
  // Without other streams the block is free at once, and the next event says so.
  const std::size_t next = row + 1;
  const bool at_once = next < events_.count && events_.address[next] == events_.address[row] &&
                       events_.action_at(next) == Action::kFreeCompleted;
  if (live && !at_once && live->waits_for == 0) free_later(*live);
}

void Replay::complete_free(std::size_t row) {
  if (paused_.erase(events_.address[row]) > 0) return;
  Live* live = live_.find(events_.address[row]);
  live ? forget(events_.address[row], *live) : void(++counts_.unknown_frees);
}

void Replay::give_back(std::size_t row) {
  // PyTorch gives a private pool's memory back only after the graph or MemPool is gone.
  PAC_CHECK(events_.pool[row] < pools_.size(), "event ", row, " is of pool ", events_.pool[row], " of ", pools_.size());
  if (events_.pool[row] != 0) {
    use_pool(0);
    const PoolId pool = pools_[events_.pool[row]];
    while (core_.pool_use_count(pool) > 0) core_.release_pool(pool);
  }
  if (next_emptied_ == emptied_.size() || emptied_[next_emptied_] != row) return;
  ++next_emptied_;
  ++counts_.cache_emptied;
  use_pool(0);
  core_.empty_cache(only_pool(row));
}

PoolId Replay::only_pool(std::size_t row) const {
  const std::uint32_t pool = events_.pool[row];
  for (std::size_t at = row; is_given_back(events_.action_at(at)); --at) {
    if (events_.pool[at] != pool) return pools_[0];
    if (at == 0) break;
  }
  return pools_[pool];
}

void Replay::add_live(Address recorded, Address ours) {
  if (spare_.empty()) spare_.push_back(&entries_.emplace_back());
  Live* live = spare_.back();
  spare_.pop_back();
  *live = {ours, 0};
  live_.insert(recorded, live);
}

void Replay::forget(Address recorded, Live& live) {
  if (live.waits_for != 0) {
    complete(live);
  } else {
    core_.free(live.ours, {});
  }
  live_.erase(recorded);
  spare_.push_back(&live);
}

void Replay::free_later(Live& live) {
  use_pool(0);  // while a stream is captured, the core would defer the event
  if (spare_streams_.empty()) spare_streams_.push_back(next_stream_++);
  live.waits_for = spare_streams_.back();
  spare_streams_.pop_back();
  core_.record_stream(live.ours, live.waits_for);
  core_.free(live.ours, {});
}

void Replay::complete(Live& live) {
  use_pool(0);  // so that the next allocation looks for completed events
  device_->complete(live.waits_for);
  spare_streams_.push_back(live.waits_for);
}

void Replay::use_pool(std::uint32_t pool) {
  if (pool == open_pool_) return;
  if (open_pool_ != 0) core_.end_allocate_to_pool(pools_[open_pool_]);
  open_pool_ = 0;
  if (pool != 0) core_.begin_allocate_to_pool(pools_[pool], [](Stream) { return true; });
  open_pool_ = pool;
}

void Replay::let_streams_run() {
  for (const Stream stream : streams_) device_->complete(stream);
}

void Replay::end_stretch() {
  const Stats now = core_.stats();
  const TimelinePoint point{position_, static_cast<Bytes>(now.allocated_bytes.all().peak),
                            static_cast<Bytes>(now.active_bytes.all().peak),
                            static_cast<Bytes>(now.reserved_bytes.all().peak)};
  timeline_.push_back(point);
  peaks_.allocated = std::max(peaks_.allocated, now.allocated_bytes.all().peak);
  peaks_.active = std::max(peaks_.active, now.active_bytes.all().peak);
  peaks_.requested = std::max(peaks_.requested, now.requested_bytes.all().peak);
  peaks_.reserved = std::max(peaks_.reserved, now.reserved_bytes.all().peak);
  core_.reset_peak_stats();
}

Stats Replay::stats() {
  Stats stats = core_.stats();
  const auto raise = [](StatArray& array, std::int64_t peak) { array.all().peak = std::max(array.all().peak, peak); };
  raise(stats.allocated_bytes, peaks_.allocated);
  raise(stats.active_bytes, peaks_.active);
  raise(stats.requested_bytes, peaks_.requested);
  raise(stats.reserved_bytes, peaks_.reserved);
  return stats;
}

}  // namespace pac::alloc
