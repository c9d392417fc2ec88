// What an allocator remembers beside its blocks: private pools, settings, scopes and counters.
#include <algorithm>

#include "common/check.hpp"
#include "modelled.hpp"

namespace stress {

void Modelled::release(PrivatePool& pool) {
  if (--pool.uses == 0) {
    model_.alive.erase(pool.life);
    pool.life = 0;
  }
  core_->release_pool(pool.id);
}

void Modelled::end_capture(PrivatePool& pool) {
  pool.open.clear();
  open_.erase(std::find(open_.begin(), open_.end(), &pool));
  model_.captured.clear();
  for (const PrivatePool* open : open_) model_.captured.insert(open->open.begin(), open->open.end());
  core_->end_allocate_to_pool(pool.id);
}

void Modelled::change_pools() {
  PrivatePool& pool = pools_[random_.below(std::size(pools_))];
  const auto born = [&] {
    if (++pool.uses > 1) return;
    pool.life = ++lives_;
    model_.alive.insert(pool.life);
  };
  bool lend = false;
  switch (random_.below(7)) {
    case 0:
      if (!pool.open.empty()) return;
      for (const Stream stream : kStreams) {
        if (random_.below(2) == 0) pool.open.insert(stream);
      }
      if (pool.open.empty()) return;
      born();
      open_.insert(open_.begin(), &pool);
      core_->begin_allocate_to_pool(pool.id,
                                    [streams = pool.open](Stream stream) { return streams.count(stream) > 0; });
      // As with graphs: the capture begins after, and ends before.
      model_.captured.insert(pool.open.begin(), pool.open.end());
      break;
    case 1:
      born();
      core_->create_or_incref_pool(pool.id);
      break;
    case 2:
      if (pool.uses > (pool.open.empty() ? 0 : 1)) release(pool);
      break;
    case 3:
      if (pool.uses == 0) return;
      lend = random_.below(2) == 0;
      lend ? static_cast<void>(model_.lent.insert(pool.life)) : static_cast<void>(model_.lent.erase(pool.life));
      core_->set_use_on_oom(pool.id, lend);
      break;
    case 4:
      if (pool.uses > 0) core_->set_no_split(pool.id);
      break;
    default:
      if (pool.open.empty()) return;
      end_capture(pool);
      break;
  }
  if (pool.uses > 0) {
    require(core_->pool_use_count(pool.id) == pool.uses, "a pool is used ", core_->pool_use_count(pool.id),
            " times, not ", pool.uses);
    if (random_.below(4) == 0) core_->empty_cache(pool.id);
  }
}

void Modelled::pause_and_resume() {
  PauseOptions options;
  std::vector<Tag> tags;
  for (const Tag tag : kTags) {
    if (random_.below(2) == 0) continue;
    options.keep[tag] = random_.below(3) > 0;
    tags.push_back(tag);
  }
  const auto refused = [](const auto& call) {
    try {
      call();
    } catch (const PauseError&) {
      return true;
    }
    return false;
  };
  if (setup_.config.growth != Growth::kVmm || !open_.empty()) {
    require(refused([&] { core_->pause(options); }), "memory was paused during a capture or under malloc growth");
    return;
  }
  // A pool may be lent to a request with a tag; its memory keeps the pool's own.
  std::set<Address> in_pools;
  for (const SegmentInfo& segment : core_->segments()) {
    if (segment.pool.is_default()) continue;
    for (const BlockInfo& block : segment.blocks) in_pools.insert(block.address);
  }
  std::map<Address, std::uint64_t> contents;
  for (const Live& block : live_) {
    device_.write(block.address, contents[block.address] = random_());
  }
  watched_->pausing = true;
  const Bytes before = device_.reserved();
  const PauseReport report = core_->pause(options);
  require(device_.reserved() <= before - report.released, "a pause released less than it said");
  core_->check_invariants();
  check_counters();
  for (const Tag tag : tags) {
    require(refused([&] { core_->allocate(1 + random_.below(4096), any_stream(), {}, tag); }),
            "memory of a paused tag was allocated");
  }
  require(tags.empty() || refused([&] { core_->pause(options); }), "a tag was paused twice");
  for (std::uint64_t i = random_.below(4); i > 0 && !live_.empty(); --i) free(random_.below(live_.size()));
  if (random_.below(4) == 0) core_->empty_cache();
  if (random_.below(3) == 0) {
    constexpr const char* kCalls[] = {"create", "map", "copy"};
    const char* call = kCalls[random_.below(3)];
    device_.fail(call, 1 + random_.below(2), random_.below(3));
    try {
      core_->resume(tags);
      tags.clear();
    } catch (const OutOfMemory&) {
    } catch (const pac::DeviceError&) {
    }
    device_.fail(call, 0);
    core_->check_invariants();
    check_counters();
  }
  if (!tags.empty()) {
    // The limit may have fallen below what was reserved.
    const Config config = core_->config();
    Config unlimited = config;
    unlimited.memory_fraction = 1.0;
    core_->configure(unlimited);
    core_->resume(tags);
    core_->configure(config);
  }
  watched_->pausing = false;
  for (const Live& block : live_) {
    const auto keep = options.keep.find(in_pools.count(block.address) == 0 ? block.tag : 0);
    if (keep != options.keep.end() && !keep->second) continue;
    require(device_.read(block.address) == contents.at(block.address), "the block at ", block.address,
            " lost its contents");
  }
}

void Modelled::configure() {
  Config config = setup_.config;
  constexpr double kFractions[] = {1.0, 0.9, 0.7, 0.5};
  config.memory_fraction = kFractions[random_.below(4)];
  config.garbage_collection_threshold = config.memory_fraction < 1.0 && random_.below(2) == 0 ? 0.6 : 0.0;
  config.max_split_size = random_.below(2) == 0 ? kUnlimited : 80_MiB;
  config.roundup_power2_divisions.fill(random_.below(2) == 0 ? 0 : 4);
  core_->configure(config);
  if (setup_.virtual_memory) {
    Config other = config;
    other.growth = config.growth == Growth::kVmm ? Growth::kMalloc : Growth::kVmm;
    bool refused = false;
    try {
      core_->configure(other);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    require(refused && core_->config() == config, "a change of growth was not refused");
  }
  core_->configure(random_.below(2) == 0 ? config : setup_.config);
}

void Modelled::reset_stats() {
  if (random_.below(2) == 0) {
    core_->reset_peak_stats();
    for (Counter* counter : {&expected_.allocation, &expected_.allocated}) counter->peak = counter->current;
  } else {
    core_->reset_accumulated_stats();
    for (Counter* counter : {&expected_.allocation, &expected_.allocated, &expected_.requested}) {
      counter->added = counter->taken = 0;
    }
    expected_.out_of_memory = observed_ = 0;
  }
}

void Modelled::change_scopes() {
  if (scopes_.size() < 3 && random_.below(2) == 0) {
    const std::int64_t id = core_->push_scope();
    for (const OpenScope& open : scopes_) require(id != open.id, "two scopes have the number ", id);
    scopes_.push_back({id, {expected_.allocated.current, 0, 0, 0, static_cast<std::int64_t>(device_.reserved())}});
    return;
  }
  if (scopes_.empty()) {
    bool refused = false;
    try {
      core_->pop_scope(0);
    } catch (const std::logic_error&) {
      refused = true;
    }
    require(refused, "a scope that was not open was closed");
    return;
  }
  // The scopes of several threads end in any order.
  const auto open = scopes_.begin() + static_cast<std::ptrdiff_t>(random_.below(scopes_.size()));
  const ScopeStats scope = core_->pop_scope(open->id);
  const ScopeStats& known = open->counts;
  require(scope.allocated_bytes == expected_.allocated.current - known.allocated_bytes &&
              scope.peak_bytes == known.peak_bytes && scope.total_bytes == known.total_bytes &&
              scope.allocations == known.allocations &&
              scope.reserved_bytes == static_cast<std::int64_t>(device_.reserved()) - known.reserved_bytes,
          "a scope counted ", scope.allocated_bytes, " left, ", scope.peak_bytes, " at most, ", scope.total_bytes,
          " in all, ", scope.allocations, " allocations and ", scope.reserved_bytes, " reserved, not ",
          expected_.allocated.current - known.allocated_bytes, ", ", known.peak_bytes, ", ", known.total_bytes, ", ",
          known.allocations, " and ", static_cast<std::int64_t>(device_.reserved()) - known.reserved_bytes);
  scopes_.erase(open);
}

void Modelled::check_counters() {
  const Stats stats = core_->stats();
  const auto same = [](const char* name, const Stat& is, const Counter& expected) {
    require(is.current == expected.current && is.peak == expected.peak && is.allocated == expected.added &&
                is.freed == expected.taken,
            name, " is ", is.current, ", peak ", is.peak, ", allocated ", is.allocated, ", freed ", is.freed, ", not ",
            expected.current, ", ", expected.peak, ", ", expected.added, ", ", expected.taken);
  };
  same("allocation", stats.allocation.all(), expected_.allocation);
  same("allocated_bytes", stats.allocated_bytes.all(), expected_.allocated);
  require(stats.requested_bytes.all().allocated == expected_.requested.added, "requested_bytes.allocated is ",
          stats.requested_bytes.all().allocated, ", not ", expected_.requested.added);
  require(stats.num_ooms == expected_.out_of_memory && observed_ == expected_.out_of_memory, "num_ooms is ",
          stats.num_ooms, ", observed ", observed_, ", not ", expected_.out_of_memory);
  require(stats.reserved_bytes.all().current == static_cast<std::int64_t>(device_.reserved()), "reserved_bytes is ",
          stats.reserved_bytes.all().current, ", the device's ", device_.reserved());
}

void Modelled::check_blocks() {
  std::map<Address, const Live*> live;
  for (const Live& block : live_) live[block.address] = &block;
  Stats stats = core_->stats();
  std::int64_t active = 0;
  std::int64_t requested = 0;
  Bytes reserved = 0;
  for (const SegmentInfo& segment : core_->segments()) {
    Address at = segment.address;
    for (const BlockInfo& block : segment.blocks) {
      require(block.address == at, "the blocks of the segment at ", segment.address, " leave a gap at ", at);
      at += block.size;
      if (block.state == BlockState::kFree) continue;
      active += static_cast<std::int64_t>(block.size);
      requested += static_cast<std::int64_t>(block.requested);
      if (block.state == BlockState::kPending) continue;
      const auto known = live.find(block.address);
      require(known != live.end() && known->second->size == block.size && known->second->requested == block.requested,
              "the snapshot's block at ", block.address, " is not live");
      live.erase(known);
    }
    require(at == segment.address + segment.size, "the blocks of the segment at ", segment.address, " end at ", at);
    reserved += segment.size;
  }
  require(live.empty(), live.size(), " live blocks are in no segment");
  require(reserved == device_.reserved(), "the segments have ", reserved, " bytes, the device ", device_.reserved());
  require(stats.active_bytes.all().current == active, "active_bytes is ", stats.active_bytes.all().current, ", not ",
          active);
  require(stats.requested_bytes.all().current == requested, "requested_bytes is ", stats.requested_bytes.all().current,
          ", not ", requested);
  const Fragmentation fragmentation = core_->fragmentation();
  require(fragmentation.reserved == reserved &&
              fragmentation.allocated + fragmentation.pending + fragmentation.free == reserved,
          "the fragmentation's bytes do not add up to ", reserved);
  require(core_->largest_available() >= fragmentation.largest_free, "less is available than is free in one block");
}

}  // namespace stress
