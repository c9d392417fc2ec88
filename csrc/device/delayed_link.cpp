#include "device/delayed_link.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace pac {
namespace {

constexpr int kOut = 0;
constexpr int kBack = 1;
constexpr int kPoison = 0xA5;

}  // namespace

DelayedLink::DelayedLink(When when, std::uint64_t seed, std::size_t host_memory)
    : when_(when), random_(seed), host_memory_(host_memory) {}

DelayedLink::~DelayedLink() = default;

Link::Event DelayedLink::event_of(int queue, std::uint64_t number) {
  places_[++next_] = {queue, number};
  times_[next_] = busy_until_[queue];
  live_.insert(next_);
  return next_;
}

std::uint64_t DelayedLink::put(int queue, const Job& job) {
  queues_[queue].push_back(job);
  queues_[queue].back().number = ++put_[queue];
  if (rate > 0) busy_until_[queue] = std::max(busy_until_[queue], clock) + static_cast<double>(job.size) / rate;
  if (when_ == When::kEarly) run_until(queue, put_[queue]);
  if (when_ == When::kRandom) run_some();
  return put_[queue];
}

void DelayedLink::run_until(int queue, std::uint64_t number) {
  while (!queues_[queue].empty() && queues_[queue].front().number <= number) {
    const Job job = queues_[queue].front();
    queues_[queue].pop_front();
    const auto after = places_.find(job.after);
    if (after != places_.end()) run_until(after->second.first, after->second.second);
    std::memcpy(job.to, job.from, job.size);
  }
}

void DelayedLink::run_some() {
  for (const int queue : {kOut, kBack}) {
    while (!queues_[queue].empty() && (random_() & 1) != 0) run_until(queue, queues_[queue].front().number);
  }
}

Link::Status DelayedLink::send(Stream, const Copy* copies, std::size_t count, Event* done) noexcept {
  std::uint64_t last = put_[kOut];
  for (std::size_t i = 0; i < count; ++i) {
    last = put(kOut, {copies[i].device, copies[i].host, copies[i].size, copies[i].after, 0});
  }
  *done = event_of(kOut, last);
  return 0;
}

Link::Status DelayedLink::bring(Stream, const Copy* copies, std::size_t count, Event* done) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    std::memset(copies[i].device, kPoison, copies[i].size);
    done[i] = event_of(kBack, put(kBack, {copies[i].host, copies[i].device, copies[i].size, copies[i].after, 0}));
  }
  return 0;
}

Link::Status DelayedLink::wait(Stream, Event event) noexcept {
  if (event == 0) return 0;
  if (live_.count(event) == 0) return kUnknownEvent;
  const auto [queue, number] = places_[event];
  run_until(queue, number);
  clock = std::max(clock, times_[event]);
  return 0;
}

void DelayedLink::recycle(Event event) noexcept { live_.erase(event); }

Link::Status DelayedLink::mark(Stream, Event* made) noexcept {
  *made = ++next_;
  times_[*made] = clock;
  live_.insert(*made);
  return 0;
}

double DelayedLink::elapsed(Event begin, Event end) noexcept { return times_[end] - times_[begin]; }

void DelayedLink::recycle_mark(Event event) noexcept { live_.erase(event); }

void* DelayedLink::pin(std::size_t size) noexcept {
  if (size > available()) return nullptr;
  void* const memory = std::malloc(size);  // NOLINT(cppcoreguidelines-no-malloc)
  if (memory == nullptr) return nullptr;
  std::memset(memory, kPoison, size);
  pinned_ += size;
  ++pins_;
  return memory;
}

void DelayedLink::unpin(void* memory, std::size_t size) noexcept {
  run_until(kOut, put_[kOut]);
  run_until(kBack, put_[kBack]);
  pinned_ -= size;
  std::free(memory);  // NOLINT(cppcoreguidelines-no-malloc)
}

void DelayedLink::describe(Status, char* text, std::size_t capacity) noexcept {
  std::snprintf(text, capacity, "an event was waited for after it was recycled");
}

}  // namespace pac
