#include "allocator/stream_order.hpp"

#include <vector>

#include "common/check.hpp"

namespace pac::alloc {

void StreamOrder::add_pending(Block* block) {
  std::vector<Event> events;
  try {
    for (const Stream stream : block->uses) events.push_back(device_.record(stream));
  } catch (...) {
    for (const Event event : events) device_.recycle(event);
    throw;
  }
  for (std::size_t i = 0; i < events.size(); ++i) pending_[block->uses[i]].push_back({events[i], block, ++order_});
  block->events = static_cast<std::uint32_t>(events.size());
  block->uses.clear();
}

void StreamOrder::fence(Stream stream, Serial now) {
  Fences& fences = fences_[stream];
  if (fences.passed >= now || (!fences.open.empty() && fences.open.back().serial >= now)) return;
  try {
    fences.open.push_back({device_.record(stream), now});
  } catch (const DeviceError&) {
    // The owner destroyed the stream. The stream's memory serves no other stream: this wastes memory but is never
    // wrong.
    return;
  }
}

bool StreamOrder::passed(Stream stream, Serial freed) {
  if (freed <= all_passed_) return true;
  const auto found = fences_.find(stream);
  if (found == fences_.end()) return false;
  Fences& fences = found->second;
  while (fences.passed < freed && !fences.open.empty() && device_.completed(fences.open.front().event)) {
    fences.passed = fences.open.front().serial;
    recycle(fences.open.front().event);
    fences.open.pop_front();
  }
  return fences.passed >= freed;
}

std::optional<StreamOrder::Wait> StreamOrder::hold_oldest_pending() {
  const Pending* oldest = nullptr;
  for (const auto& [stream, queue] : pending_) {
    if (!oldest || queue.front().order < oldest->order) oldest = &queue.front();
  }
  if (!oldest) return std::nullopt;
  ++held_[oldest->event].waiters;
  return Wait{oldest->event};
}

std::optional<StreamOrder::Wait> StreamOrder::hold_fence(Stream stream) {
  const auto found = fences_.find(stream);
  if (found == fences_.end() || found->second.open.empty()) return std::nullopt;
  const Event event = found->second.open.back().event;
  ++held_[event].waiters;
  return Wait{event};
}

void StreamOrder::end_wait(Wait wait) {
  const auto found = held_.find(wait.event);
  if (--found->second.waiters > 0) return;
  const bool dropped = found->second.dropped;
  held_.erase(found);
  if (dropped) device_.recycle(wait.event);
}

void StreamOrder::clear() {
  for (auto& [stream, queue] : pending_) {
    for (const Pending& pending : queue) recycle(pending.event);
  }
  for (auto& [stream, fences] : fences_) {
    for (const Fence& fence : fences.open) recycle(fence.event);
  }
  pending_.clear();
  fences_.clear();
}

void StreamOrder::recycle(Event event) {
  if (const auto held = held_.find(event); held != held_.end()) {
    held->second.dropped = true;
  } else {
    device_.recycle(event);
  }
}

}  // namespace pac::alloc
