// The last events, oldest dropped first, and a tracker called with each event.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <utility>

#include "allocator/allocator.hpp"

namespace pac::alloc {

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
