// A link without a device, for tests: both ends are host memory, and a copy runs as early, as late or as randomly as
// the events allow. Copies take time of a simulated clock. A program that reads memory before its copy has run finds
// bytes that nobody wrote.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device/link.hpp"

namespace pac {

class DelayedLink final : public Link {
 public:
  enum class When { kEarly, kLate, kRandom };

  DelayedLink(When when, std::uint64_t seed, std::size_t host_memory);
  ~DelayedLink();

  Status send(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept override;
  Status bring(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept override;
  Status wait(Stream stream, Event event) noexcept override;
  void recycle(Event event) noexcept override;
  Status mark(Stream stream, Event* made) noexcept override;
  Status finish(Event) noexcept override { return 0; }
  double elapsed(Event begin, Event end) noexcept override;
  void recycle_mark(Event event) noexcept override;
  bool is_capturing(Stream) noexcept override { return capturing; }
  void* pin(std::size_t size) noexcept override;
  void unpin(void* memory, std::size_t size) noexcept override;
  std::size_t available() noexcept override { return host_memory_ - pinned_; }
  void describe(Status status, char* text, std::size_t capacity) noexcept override;

  std::size_t pinned() const { return pinned_; }
  std::size_t pins() const { return pins_; }
  /// Events that were given out and not recycled.
  std::size_t live_events() const { return live_.size(); }
  /// Copies that have not run.
  std::size_t queued() const { return queues_[0].size() + queues_[1].size(); }

  bool capturing = false;
  /// The simulated device's time in seconds. It works while copies run; waiting for a copy moves the time to its end.
  double clock = 0;
  /// Bytes a second of each of the two streams; 0: copies take no time.
  double rate = 0;

 private:
  /// A copy on one of the two streams, and its number on the stream.
  struct Job {
    const void* from;
    void* to;
    std::size_t size;
    Event after;
    std::uint64_t number;
  };
  static constexpr Status kUnknownEvent = 1;

  Event event_of(int queue, std::uint64_t number);
  std::uint64_t put(int queue, const Job& job);
  void run_until(int queue, std::uint64_t number);
  void run_some();

  When when_;
  std::mt19937_64 random_;
  std::size_t host_memory_, pinned_ = 0, pins_ = 0;
  std::deque<Job> queues_[2];
  std::uint64_t put_[2] = {0, 0};
  double busy_until_[2] = {0, 0};
  std::map<Event, double> times_;
  std::set<Event> live_;
  std::uint64_t next_ = 0;
  std::map<Event, std::pair<int, std::uint64_t>> places_;  ///< also of recycled events: a queued copy may name one
};

}  // namespace pac
