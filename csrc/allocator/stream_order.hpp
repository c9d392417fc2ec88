// How far each stream has come, as the host knows: blocks that other streams still use, and fences.
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

  /// Records an event on each stream that uses the block; it is pending until all have completed. Throws DeviceError
  /// and changes nothing where a stream cannot record.
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

  /// Marks what the stream has been given so far: passed() is true for `now` once the mark is reached.
  void fence(Stream stream, Serial now);
  /// The whole device has finished what it had been given at `now`.
  void all_passed(Serial now) {
    all_passed_ = std::max(all_passed_, now);
    for (auto& [stream, fences] : fences_) {
      while (!fences.open.empty() && fences.open.front().serial <= all_passed_) {
        recycle(fences.open.front().event);
        fences.open.pop_front();
      }
    }
  }
  /// Whether the stream has finished whatever used memory that was freed at `freed`; 0 is memory never used.
  bool passed(Stream stream, Serial freed);

  /// Waiting happens without the core's lock, so an event somebody waits for is not recycled under them.
  struct Wait {
    Event event;
  };
  /// The event of a pending block that was recorded first, which is the cheapest to wait for.
  std::optional<Wait> hold_oldest_pending();
  /// The last fence of a stream, unless it has passed.
  std::optional<Wait> hold_fence(Stream stream);
  void end_wait(Wait wait);

  /// Gives back every event; nothing is pending any more.
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
