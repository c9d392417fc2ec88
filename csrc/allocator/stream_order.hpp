// The host's knowledge of each stream's progress: memory blocks pending on other streams, and fences.
#pragma once

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "allocator/block.hpp"
#include "device/device.hpp"

namespace pac::alloc {

class StreamOrder {
 public:
  explicit StreamOrder(Device& device) : device_(device) {}

  /// Records an event on every stream in block->uses; the block is pending until all events have completed. Throws
  /// DeviceError and changes nothing if a stream cannot record.
  void add_pending(Block* block);
  bool has_pending() const { return !pending_.empty(); }
  /// Calls `done` with each pending block whose last event has completed.
  template <class Done>
  void poll_pending(Done done) {
    const std::optional<std::set<Stream>> advanced = device_.advanced();
    if (!advanced) {
      for (auto at = pending_.begin(); at != pending_.end();) at = poll_stream(at, done);
      return;
    }
    for (const Stream stream : *advanced) {
      if (const auto at = pending_.find(stream); at != pending_.end()) poll_stream(at, done);
    }
  }

  /// Records a fence after all work queued on the stream: passed() is true for `now` once the stream reaches the
  /// fence.
  void fence(Stream stream, Serial now);
  /// Notes that the whole device has finished all work queued by `now`.
  void all_passed(Serial now) {
    all_passed_ = std::max(all_passed_, now);
    for (auto& [stream, fences] : fences_) {
      while (!fences.open.empty() && fences.open.front().serial <= all_passed_) {
        recycle(fences.open.front().event);
        fences.open.pop_front();
      }
    }
  }
  /// Whether the stream has finished all work on memory freed at `freed`; 0 stands for memory never used.
  bool passed(Stream stream, Serial freed);

  /// Threads wait without the core's lock, so an event is recycled only after the last waiting thread.
  struct Wait {
    Event event;
  };
  /// The pending event recorded first: the cheapest to wait for.
  std::optional<Wait> hold_oldest_pending();
  /// The stream's last fence, unless already passed.
  std::optional<Wait> hold_fence(Stream stream);
  void end_wait(Wait wait);

  /// Recycles every event; no block is pending afterwards.
  void clear();
  void recycle(Event event);

 private:
  struct Pending {
    Event event;
    Block* block;
    std::uint64_t order;
  };
  struct Fence {
    Event event;
    Serial serial;
  };
  struct Fences {
    std::deque<Fence> open;
    Serial passed = 0;
  };
  using Queues = std::map<Stream, std::deque<Pending>>;
  struct Held {
    int waiters = 0;
    bool dropped = false;
  };

  /// Returns the queue after this one.
  template <class Done>
  Queues::iterator poll_stream(Queues::iterator at, Done& done) {
    std::deque<Pending>& queue = at->second;
    while (!queue.empty() && device_.completed(queue.front().event)) {
      Block* block = queue.front().block;
      recycle(queue.front().event);
      queue.pop_front();
      if (--block->events == 0) done(block);
    }
    return queue.empty() ? pending_.erase(at) : std::next(at);
  }

  Device& device_;
  Queues pending_;
  std::map<Stream, Fences> fences_;
  std::map<Event, Held> held_;
  std::uint64_t order_ = 0;
  Serial all_passed_ = 0;
};

}  // namespace pac::alloc
