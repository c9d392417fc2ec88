// Events of an allocator: the last ones, oldest dropped first, and a tracker called with each.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "allocator/types.hpp"

namespace pac::alloc {

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

class History {
 public:
  void configure(const HistoryOptions& options) {
    if (options.clear || !options.enabled) {
      entries_.clear();
      dropped_ = 0;
    }
    options_ = options;
    trim();
    update();
  }
  void set_tracker(std::function<void(const TraceEntry&)> tracker) {
    tracker_ = std::move(tracker);
    update();
  }

  /// Whether blocks keep the context of their allocation.
  bool keeps_contexts() const { return options_.enabled; }

  void add(Action action, Address address, Bytes size, Stream stream, PoolId pool, const Context& context) {
    if (!listening_) return;
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    TraceEntry entry{action, address, size,
                     stream, pool,    std::chrono::duration_cast<std::chrono::microseconds>(since).count(),
                     context};
    if (tracker_) tracker_(entry);
    if (!options_.record_trace || (options_.skip_actions >> static_cast<unsigned>(action) & 1U)) return;
    entries_.push_back(std::move(entry));
    trim();
  }

  Trace trace() const { return {{entries_.begin(), entries_.end()}, dropped_}; }

 private:
  void trim() {
    while (entries_.size() > options_.max_entries) {
      entries_.pop_front();
      ++dropped_;
    }
  }
  void update() { listening_ = tracker_ || (options_.enabled && options_.record_trace); }

  HistoryOptions options_;
  std::function<void(const TraceEntry&)> tracker_;
  std::deque<TraceEntry> entries_;
  std::uint64_t dropped_ = 0;
  bool listening_ = false;
};

}  // namespace pac::alloc
