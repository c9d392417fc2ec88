// Allocations and frees, and what is asked of them.
#include <algorithm>
#include <functional>

#include "allocator/caching_allocator.hpp"
#include "allocator/tags.hpp"
#include "common/check.hpp"
#include "modelled.hpp"

namespace stress {
Modelled::Modelled(const Options& options)
    : options_(options),
      random_(options.seed + 1),
      setup_(setup_of(options.seed)),
      device_(setup_.capacity, setup_.virtual_memory, setup_.asynchronous),
      model_(device_),
      watched_(std::make_shared<WatchedDevice>(device_, model_)),
      core_(std::make_shared<CachingAllocator>(watched_, setup_.config)),
      receiver_(std::make_shared<SimulatedDevice>(setup_.capacity)),
      importer_(std::make_shared<Importer>(receiver_)) {
  for (const Tag tag : kTags)
    require(tag == 0 || tag_named("tag " + std::to_string(tag)) == tag, "tags are numbered in order");
  for (int i = 0; i < 12; ++i) sizes_.push_back(any_size(random_, 96_MiB));
  core_->add_oom_observer([this](Bytes, Bytes total, Bytes free) {
    ++observed_;
    require(total == setup_.capacity && free <= total, "the observer was told of ", free, " of ", total, " bytes");
  });
  if (options.seed % 3 == 0) {
    core_->add_pressure_callback([this](Bytes) {
      if (live_.size() < setup_.target / 2) return false;
      free(random_.below(live_.size()));
      return true;
    });
  }
  if (options.seed % 5 == 0) {
    HistoryOptions history;
    history.enabled = history.record_trace = true;
    history.max_entries = 100;
    core_->record_history(history);
  }
}

Bytes Modelled::next_size() {
  switch (random_.below(8)) {
    case 0:
    case 1:
    case 2:
      return sizes_[random_.below(sizes_.size())];
    case 3:
      return 1 + random_.below(64) * 512;
    default:
      return any_size(random_, std::min(700_MiB, setup_.capacity));
  }
}

void Modelled::allocate(Bytes size, Stream stream, Tag tag) {
  PoolLife pool = 0;
  for (const PrivatePool* open : open_) {
    if (pool == 0 && open->open.count(stream) > 0) pool = open->life;
  }
  const Bytes reserved = device_.reserved();
  Address address = 0;
  try {
    address = core_->allocate(size, stream, {}, tag);
  } catch (const OutOfMemory& error) {
    ++expected_.out_of_memory;
    require(std::string(error.what()).find("CUDA out of memory. Tried to allocate ") == 0, "the text is ",
            error.what());
    return;
  } catch (const pac::DeviceError&) {
    if (!failing_) throw;
    return;
  }
  if (size == 0) {
    require(address == 0, "0 bytes are at ", address);
    return;
  }
  const BlockInfo block = core_->block(address);
  require(address % 512 == 0 && block.address == address && block.size % 512 == 0 && block.size >= size &&
              block.requested == size && block.state == BlockState::kAllocated,
          size, " bytes became a block of ", block.size, " at ", address, " for ", block.requested);
  const PoolLife owner = model_.allocated(address, block.size, stream, pool);
  const Bytes after = device_.reserved();
  require(after <= reserved || after <= limit_of(core_->config(), setup_.capacity), "reserved ", after,
          " bytes, beyond the limit");
  live_.push_back({address, block.size, size, owner, {stream}, tag, {}});
  expected_.allocation.add(1);
  expected_.allocated.add(block.size);
  expected_.requested.add(size);
  for (OpenScope& open : scopes_) {
    ScopeStats& scope = open.counts;
    ++scope.allocations;
    scope.total_bytes += static_cast<std::int64_t>(block.size);
    scope.peak_bytes = std::max(scope.peak_bytes, expected_.allocated.current - scope.allocated_bytes);
  }
}

void Modelled::free(std::size_t index) {
  Live block = live_[index];
  live_[index].opened.clear();
  block.opened.clear();  // the owner frees only when its receivers are done
  live_[index] = live_.back();
  live_.pop_back();
  std::vector<Use> uses;
  for (const Stream stream : block.streams) uses.push_back({stream, device_.now()});
  model_.freed(block.address, block.size, block.owner, uses, watched_->with_memory(block.address, block.size));
  expected_.allocation.take(1);
  expected_.allocated.take(block.size);

  const std::uint64_t synchronising = device_.calls().synchronising;
  if (random_.below(2) == 0) {
    core_->free(block.address);
  } else {
    require(core_->try_free(block.address), "the block at ", block.address, " was not recognised");
  }
  require(device_.calls().synchronising == synchronising, "a free waited for the device");
  freed_.push_back(block.address);
  if (freed_.size() > 64) freed_.pop_front();
}

void Modelled::record_stream() {
  if (live_.empty()) return;
  Live& block = any_live();
  const Stream stream = any_stream();
  core_->record_stream(block.address, stream);
  block.streams.push_back(stream);
  const BaseAllocation base = core_->base_allocation(block.address);
  require(base.address <= block.address && block.address + block.size <= base.address + base.size, "the block at ",
          block.address, " is not within its base allocation at ", base.address);
  require(core_->owns(block.address), "the block at ", block.address, " is not owned");
}

/// Another process opens a block, or closes one. The block is the same memory there.
void Modelled::share_or_close() {
  if (live_.empty()) return;
  Live& block = any_live();
  if (!block.opened.empty() && random_.below(2) == 0) {
    block.opened.pop_back();
    return;
  }
  if (random_.below(8) == 0) receiver_->fail(random_.below(2) == 0 ? "import" : "map", 1, random_.below(3));
  try {
    const std::optional<SharedMemory> memory = core_->share(block.address);
    const std::vector<SegmentInfo> segments = core_->segments();
    const bool has_handles = std::any_of(segments.begin(), segments.end(), [&](const SegmentInfo& segment) {
      return segment.expandable && block.address - segment.address < segment.size;
    });
    require(memory.has_value() == has_handles, "the block at ", block.address,
            " is shared, and has no handles, or the other way round");
    if (!memory) return;
    const std::shared_ptr<const Address> opened = importer_->open(from_text("a prefix" + memory->text).value());
    const Address there = *opened + memory->offset;
    for (Bytes at = 0; at < block.size;) {
      const SimulatedDevice::Piece mine = device_.physical(block.address + at);
      const SimulatedDevice::Piece theirs = receiver_->physical(there + at);
      require(mine.offset == theirs.offset && mine.size == theirs.size &&
                  device_.shared_memory(block.address + at) == receiver_->shared_memory(there + at),
              "byte ", at, " of the block at ", block.address, " is other memory in the receiver");
      at += mine.size;
    }
    block.opened.push_back(opened);
  } catch (const PauseError&) {
    require(core_->paused().size() > 0, "memory that is not paused was not shared");
  } catch (const pac::DeviceError&) {
    // Refused as the simulated devices were asked to; invariants are checked after every step.
  }
  for (const char* call : {"import", "map"}) receiver_->fail(call, 0);
}

void Modelled::refuse_unknown() {
  Address address = random_() | 1;
  if (random_.below(2) == 0 && !freed_.empty()) address = freed_[random_.below(freed_.size())];
  if (random_.below(4) == 0 && !live_.empty()) address = any_live().address + 512;
  const auto is = [address](const Live& block) { return block.address == address; };
  if (std::any_of(live_.begin(), live_.end(), is)) return;

  const SimulatedDevice::Calls before = device_.calls();
  const std::function<void()> calls[] = {
      [&] { core_->free(address); },  [&] { core_->record_stream(address, any_stream()); },
      [&] { core_->block(address); }, [&] { core_->base_allocation(address); },
      [&] { core_->share(address); },
  };
  for (const auto& call : calls) {
    bool refused = false;
    try {
      call();
    } catch (const UnknownAddress&) {
      refused = true;
    }
    require(refused, "the unknown address ", address, " was not refused");
  }
  require(!core_->try_free(address), "the unknown address ", address, " was freed");
  const SimulatedDevice::Calls after = device_.calls();
  require(before.record == after.record && before.map == after.map && before.unmap == after.unmap &&
              before.synchronising == after.synchronising,
          "an unknown address reached the device");
}

void Modelled::complete_events() {
  if (random_.below(8) == 0) {
    device_.complete_all();
  } else {
    device_.complete(any_stream(), 1 + random_.below(6));
  }
}

void Modelled::empty_cache() {
  core_->empty_cache();
  model_.check();
  if (!open_.empty() || failing_) return;
  // What is left holds a live block, or belongs to a private pool that lives.
  const std::vector<SegmentInfo> segments = core_->segments();
  for (const auto& [address, size] : watched_->mapped) {
    const auto at = address;
    const auto holds = [at](const SegmentInfo& segment) {
      return segment.address <= at && at - segment.address < segment.size;
    };
    const auto segment = std::find_if(segments.begin(), segments.end(), holds);
    const bool kept =
        segment != segments.end() && !segment->pool.is_default() && core_->pool_use_count(segment->pool) > 0;
    require(kept || model_.is_used(address, size), "empty_cache left ", size, " unused bytes at ", address);
  }
}

void Modelled::inject_failures() {
  constexpr const char* kCalls[] = {"acquire", "create", "map", "reserve", "export"};
  device_.fail(kCalls[random_.below(std::size(kCalls))], 1 + random_.below(3), random_.below(3));
  failing_ = true;
  for (int i = 0; i < 4; ++i) {
    share_or_close();
    allocate(random_.below(2) == 0 ? next_size() : any_size(random_, 4_MiB) * 64, any_stream());
    model_.check();
    if (random_.below(8) == 0) empty_cache();
    check_counters();
  }
  for (const char* call : kCalls) device_.fail(call, 0);
  failing_ = false;
}

void Modelled::step() {
  const std::uint64_t kind = random_.below(1000);
  if (kind < 450) {
    const Tag tag = random_.below(4) == 0 ? kTags[1 + random_.below(2)] : 0;
    allocate(random_.below(200) == 0 ? 0 : next_size(), any_stream(), tag);
  } else if (kind < 800) {
    if (!live_.empty() && random_.below(2 * setup_.target) < setup_.target / 2 + live_.size()) {
      free(random_.below(live_.size()));
    }
  } else if (kind < 840) {
    record_stream();
  } else if (kind < 870) {
    share_or_close();
  } else if (kind < 940) {
    complete_events();
  } else if (kind < 960) {
    refuse_unknown();
  } else if (kind < 970) {
    change_scopes();
  } else if (kind < 980) {
    change_pools();
  } else if (kind < 982) {
    pause_and_resume();
  } else if (kind < 985) {
    reset_stats();
  } else if (kind < 990) {
    inject_failures();
  } else if (kind < 993) {
    configure();
  } else if (kind < 996) {
    empty_cache();
  } else if (kind < 998) {
    sizes_[random_.below(sizes_.size())] = any_size(random_, 96_MiB);
  } else {
    // A phase ends: most of what is live goes.
    while (live_.size() > setup_.target / 8) free(random_.below(live_.size()));
  }
}

void Modelled::run() {
  for (; done_ < options_.operations; ++done_) {
    step();
    model_.check();
    if (done_ % options_.every != 0) continue;
    core_->check_invariants();
    check_counters();
    check_blocks();
  }
  finish();
}

void Modelled::finish() {
  while (!open_.empty()) end_capture(*open_.back());
  while (!live_.empty()) free(live_.size() - 1);
  for (PrivatePool& pool : pools_) {
    while (pool.uses > 0) release(pool);
  }
  device_.complete_all();
  empty_cache();
  core_->check_invariants();
  check_counters();
  check_blocks();
  require(importer_->mapped() == 0 && receiver_->calls().reserve == receiver_->calls().unreserve,
          "the receiver still has ", importer_->mapped(), " bytes mapped");
  require(device_.open_exports() == 0 && device_.kept_by_importers() == 0, device_.open_exports(),
          " exports are still open");
  require(device_.reserved() == 0, device_.reserved(), " bytes are still reserved");
  require(device_.live_events() == 0, device_.live_events(), " events were not given back");

  Bytes most = 2_MiB;
  while (2 * most <= limit_of(core_->config(), setup_.capacity)) most *= 2;
  const std::int64_t refusals = expected_.out_of_memory;
  allocate(most, 0);
  require(expected_.out_of_memory == refusals, "with nothing live, ", most, " bytes were refused");
  core_.reset();
  require(device_.reserved() == 0 && device_.live_events() == 0, "an allocator that ended left ", device_.reserved(),
          " bytes and ", device_.live_events(), " events");
}

void run_modelled(const Options& options) {
  Modelled modelled(options);
  try {
    modelled.run();
  } catch (const std::exception& error) {
    throw Violation("--seed " + std::to_string(options.seed) + ", operation " + std::to_string(modelled.done()) + ": " +
                    error.what());
  }
}

}  // namespace stress
