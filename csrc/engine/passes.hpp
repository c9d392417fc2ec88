// What a tape learns from the steps so far: how long forward and backward waited for copies, and the bytes of a layer.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
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

/// Events with a time around each forward and each backward, and around each of their waits for a copy.
///
/// A forward begins when it packs its first tensor, and ends when backward reads the first. A backward ends with its
/// last wait: what follows, as the optimizer's step, waits for no copy.
class Passes {
 public:
  struct Timing {
    bool backward;
    double seconds, waited;
  };

  Passes() = default;
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;

  /// How many are over and were not read.
  std::size_t unread() const { return over_.size(); }

  /// Begin a forward, unless a pass runs.
  void begin_forward(Link& link, std::int64_t stream) {
    if (!running() && !link.is_capturing(stream)) check_copy(link, link.mark(stream, &now_.begin));
  }

  /// End the forward that runs, and begin its backward.
  void begin_backward(Link& link, std::int64_t stream) {
    if (!running() || now_.backward || link.is_capturing(stream)) return;
    check_copy(link, link.mark(stream, &now_.end));
    add(link);
    now_.backward = true;
    check_copy(link, link.mark(stream, &now_.begin));
  }

  /// End the backward that runs.
  void end_backward(Link& link) {
    if (running() && now_.backward) add(link);
  }

  void wait(Link& link, std::int64_t stream, Link::Event copy) {
    std::pair<Link::Event, Link::Event> around{0, 0};
    const bool timed = running() && !link.is_capturing(stream);
    if (timed) check_copy(link, link.mark(stream, &around.first));
    check_copy(link, link.wait(stream, copy));
    if (!timed) return;
    now_.waits.push_back(around);
    check_copy(link, link.mark(stream, &now_.waits.back().second));
  }

  /// End the backward that runs, or forget a forward that had none.
  void finish_step(Link& link) {
    end_backward(link);
    recycle(link, now_);
    now_ = {};
  }

  /// Return the oldest pass that is over, nothing while the device is not through with it; `finish` waits for that.
  std::optional<Timing> next(Link& link, bool finish) {
    if (over_.empty()) return std::nullopt;
    if (finish) {
      // Another thread may take the oldest as soon as the GIL is released.
      const Link::Event last = over_.front().last();
      const observer::WithoutGil released;
      if (link.finish(last) != 0) return std::nullopt;
    }
    if (over_.empty()) return std::nullopt;
    const Pass& oldest = over_.front();
    Timing found{oldest.backward, link.elapsed(oldest.begin, oldest.last()), 0};
    if (found.seconds < 0) return std::nullopt;
    for (const auto& [before, after] : oldest.waits) found.waited += std::max(0.0, link.elapsed(before, after));
    drop_oldest(link);
    return found;
  }

  void drop_all(Link& link) {
    finish_step(link);
    while (!over_.empty()) drop_oldest(link);
  }

 private:
  struct Pass {
    bool backward = false;
    Link::Event begin = 0, end = 0;
    std::vector<std::pair<Link::Event, Link::Event>> waits;

    Link::Event last() const {
      if (end) return end;
      return waits.empty() ? begin : waits.back().second;
    }
  };
  static constexpr std::size_t kMost = 32;

  bool running() const { return now_.begin != 0; }

  void add(Link& link) {
    over_.push_back(std::exchange(now_, {}));
    // Who never asks is no reason to hold more and more events.
    if (over_.size() > kMost) drop_oldest(link);
  }

  static void recycle(Link& link, const Pass& pass) {
    link.recycle_mark(pass.begin);
    link.recycle_mark(pass.end);
    for (const auto& [before, after] : pass.waits) {
      link.recycle_mark(before);
      link.recycle_mark(after);
    }
  }
  void drop_oldest(Link& link) {
    recycle(link, over_.front());
    over_.pop_front();
  }

  Pass now_;
  std::deque<Pass> over_;
};

/// Return the bytes of one layer, as the sizes that a forward packed tell.
///
/// Layers repeat: the bytes are those of the shortest period of the sizes, in the middle of the forward, since
/// embeddings, tables of positions and heads stand at its ends. Without a period they are an eighth of all bytes. There
/// is room for two tensors in any case, so that one comes while the other is read: checkpointed layers pack one each.
inline std::size_t bytes_of_layer(const std::vector<std::size_t>& sizes) {
  constexpr std::size_t kLongestLayer = 512;
  for (std::size_t period = 1; period <= std::min(sizes.size() / 2, kLongestLayer); ++period) {
    const std::size_t allowed = (sizes.size() - period) / 10;  // norms and heads around the layers
    std::size_t different = 0;
    for (std::size_t i = period; i < sizes.size() && different <= allowed; ++i) {
      different += sizes[i] != sizes[i - period];
    }
    if (different > allowed) continue;
    const auto begin = sizes.begin() + static_cast<std::ptrdiff_t>((sizes.size() - period) / 2);
    const std::size_t bytes = std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(period), std::size_t{0});
    return period == 1 ? 2 * bytes : bytes;
  }
  std::size_t largest = 0, second = 0;
  for (const std::size_t each : sizes) {
    second = std::max(second, std::min(each, largest));
    largest = std::max(largest, each);
  }
  return std::max(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}) / 8, largest + second);
}

}  // namespace pac::engine
