#include "snapshots/pauses.hpp"

#include <algorithm>
#include <iterator>
#include <set>

#include "allocator/history.hpp"
#include "snapshots/plain_data.hpp"

namespace pac::alloc {

namespace {

// A thousand pauses of a hundred thousand blocks; a small file could else claim many blocks under many pages.
constexpr std::uint64_t kMostVisits = 100'000'000;

bool is_pages(Action action) { return action == Action::kSegmentMap || action == Action::kSegmentUnmap; }

/// Clears `absent` unless an event maps pages under a block: else the file's segments are missing or wrong. A block
/// that is freed before its pages are mapped is then paused too.
void keep_paused(const EventColumns& events, std::vector<BlockBefore>& before) {
  std::map<Address, BlockBefore*> open;
  for (BlockBefore& block : before) {
    if (block.absent > 0) open.emplace(block.address, &block);
  }
  const auto last_before = [&](Address end) {
    const auto at = open.lower_bound(end);
    return at == open.begin() ? open.end() : std::prev(at);
  };
  bool mapped = false;
  for (std::size_t row = 0; row < events.count && !open.empty(); ++row) {
    const Action action = events.action_at(row);
    const Address begin = events.address[row];
    if (action == Action::kAlloc || action == Action::kFreeCompleted) {
      open.erase(begin);
    } else if (is_pages(action)) {
      const Address end = begin + events.size[row];
      for (auto at = last_before(end); at != open.end() && at->first + at->second->size > begin;
           at = last_before(end)) {
        if (action == Action::kSegmentMap) {
          mapped = true;
        } else {
          at->second->absent = 0;  // the pages had memory
        }
        open.erase(at);
      }
    }
  }
  if (mapped) return;
  for (BlockBefore& block : before) block.absent = 0;
}

}  // namespace

PauseTracker::PauseTracker(const EventColumns& events, const std::vector<BlockBefore>& before) : events_(events) {
  const auto last = static_cast<std::uint8_t>(Action::kFreeCompleted);
  has_completions_ = std::find(events.action, events.action + events.count, last) != events.action + events.count;
  for (std::size_t i = 0; i < before.size(); ++i) {
    add(before[i].address, before[i].size, before[i].absent, ~static_cast<std::int64_t>(i));
  }
}

void PauseTracker::advance() {
  paused_.clear();
  resumed_.clear();
  const std::size_t row = row_++;
  const Address address = events_.address[row];
  switch (events_.action_at(row)) {
    case Action::kAlloc:
      add(address, events_.size[row], 0, static_cast<std::int64_t>(row));
      break;
    case Action::kFreeRequested:
      if (!has_completions_) remove(address);
      break;
    case Action::kFreeCompleted:
      remove(address);
      break;
    case Action::kSegmentMap:
    case Action::kSegmentUnmap:
      change_pages(address, address + events_.size[row], events_.action_at(row) == Action::kSegmentMap);
      break;
    default:
      break;
  }
}

void PauseTracker::add(Address address, Bytes size, Bytes absent, std::int64_t source) {
  remove(address);  // of a lost free
  live_.emplace(address, Live{address + std::max<Bytes>(size, 1), absent, source});
  absent_ += absent;
}

void PauseTracker::remove(Address address) {
  const auto at = live_.find(address);
  if (at == live_.end()) return;
  absent_ -= at->second.absent;
  live_.erase(at);
}

void PauseTracker::change_pages(Address begin, Address end, bool mapped) {
  auto at = live_.upper_bound(begin);
  if (at != live_.begin() && std::prev(at)->second.end > begin) --at;
  for (; at != live_.end() && at->first < end; ++at) {
    expect(++visits_ <= kMostVisits, "event ", row_ - 1, ": pages are mapped and unmapped under more live blocks than ",
           "any allocator has");
    auto& [address, block] = *at;
    const Bytes covered = std::min(end, block.end) - std::max(begin, address);
    if (mapped) {
      const Bytes given = std::min(covered, block.absent);
      block.absent -= given;
      absent_ -= given;
      if (given > 0 && block.absent == 0) resumed_.push_back({address, block.source});
    } else {
      const Bytes taken = std::min(covered, block.end - address - block.absent);
      if (taken > 0 && block.absent == 0) paused_.push_back({address, block.source});
      block.absent += taken;
      absent_ += taken;
    }
  }
}

Pauses find_pauses(const EventColumns& events, std::vector<BlockBefore> before, std::size_t count) {
  keep_paused(events, before);
  Pauses found;
  for (const BlockBefore& block : before) {
    if (block.absent > 0) found.before.push_back(block.address);
  }
  PauseTracker tracker(events, before);
  found.most = tracker.absent();
  while (tracker.row() < std::min(count, events.count)) {
    tracker.advance();
    found.most = std::max(found.most, tracker.absent());
    if (!tracker.paused().empty()) found.rows.push_back(tracker.row() - 1);
  }
  tracker.for_each_paused([&](Address address, Bytes absent) { found.after.push_back({address, 0, absent}); });
  return found;
}

}  // namespace pac::alloc
