// What a tape learns from the forwards so far: the time that they waited for copies, and how many bytes a layer packs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "device/link.hpp"
#include "engine/python.hpp"
#include "observer/tensors.hpp"

namespace pac::engine {

/// Throw PyactcompError for a call of a link that failed.
inline void check_copy(Link& link, Link::Status status) {
  if (status == 0) return;
  std::array<char, 256> text{};
  link.describe(status, text.data(), text.size());
  rare("refuse_failed_copy", {checked(PyUnicode_FromString(text.data())).get()});
}

/// Events with a time around a forward, and around each of its waits for a copy.
///
/// A forward begins when it packs its first tensor, and ends when backward reads the first.
class Forwards {
 public:
  struct Timing {
    double seconds, waited;
  };

  Forwards() = default;
  Forwards(const Forwards&) = delete;
  Forwards& operator=(const Forwards&) = delete;

  bool running() const { return now_.begin != 0; }

  void begin(Link& link, std::int64_t stream) {
    if (!running() && !link.is_capturing(stream)) check_copy(link, link.mark(stream, &now_.begin));
  }

  void wait(Link& link, std::int64_t stream, Link::Event copy) {
    std::pair<Link::Event, Link::Event> around{0, 0};
    if (running()) check_copy(link, link.mark(stream, &around.first));
    check_copy(link, link.wait(stream, copy));
    if (!running()) return;
    now_.waits.push_back(around);
    check_copy(link, link.mark(stream, &now_.waits.back().second));
  }

  void end(Link& link, std::int64_t stream) {
    if (!running() || link.is_capturing(stream)) return;
    check_copy(link, link.mark(stream, &now_.end));
    over_.push_back(std::exchange(now_, {}));
    // Who never asks is no reason to hold more and more events.
    if (over_.size() > kMost) drop_oldest(link);
  }

  /// Forget a forward that had no backward.
  void abandon(Link& link) {
    recycle(link, now_);
    now_ = {};
  }

  /// Return the oldest forward that is over, nothing while the device is not through with it; `finish` waits for that.
  std::optional<Timing> next(Link& link, bool finish) {
    if (over_.empty()) return std::nullopt;
    if (finish) {
      // Another thread may take the oldest as soon as the GIL is released.
      const Link::Event end = over_.front().end;
      const observer::WithoutGil released;
      if (link.finish(end) != 0) return std::nullopt;
    }
    if (over_.empty()) return std::nullopt;
    const Forward& oldest = over_.front();
    Timing found{link.elapsed(oldest.begin, oldest.end), 0};
    if (found.seconds < 0) return std::nullopt;
    for (const auto& [before, after] : oldest.waits) found.waited += std::max(0.0, link.elapsed(before, after));
    drop_oldest(link);
    return found;
  }

  void drop_all(Link& link) {
    abandon(link);
    while (!over_.empty()) drop_oldest(link);
  }

 private:
  struct Forward {
    Link::Event begin = 0, end = 0;
    std::vector<std::pair<Link::Event, Link::Event>> waits;
  };
  static constexpr std::size_t kMost = 16;

  static void recycle(Link& link, const Forward& forward) {
    link.recycle_mark(forward.begin);
    link.recycle_mark(forward.end);
    for (const auto& [before, after] : forward.waits) {
      link.recycle_mark(before);
      link.recycle_mark(after);
    }
  }
  void drop_oldest(Link& link) {
    recycle(link, over_.front());
    over_.pop_front();
  }

  Forward now_;
  std::deque<Forward> over_;
};

/// Return the bytes of one layer: those of the shortest period of the sizes that a forward packed, else an eighth.
inline std::size_t bytes_of_layer(const std::vector<std::size_t>& sizes) {
  constexpr std::size_t kLongestLayer = 512;
  std::size_t bytes = 0;
  for (std::size_t period = 1; period <= std::min(sizes.size() / 2, kLongestLayer); ++period) {
    bytes += sizes[period - 1];
    const std::size_t allowed = (sizes.size() - period) / 10;  // norms and heads around the layers
    std::size_t different = 0;
    for (std::size_t i = period; i < sizes.size() && different <= allowed; ++i) {
      different += sizes[i] != sizes[i - period];
    }
    if (different <= allowed) return bytes;
  }
  std::size_t total = 0;
  for (const std::size_t each : sizes) total += each;
  return total / 8;
}

}  // namespace pac::engine
