// Observing an allocator: counters, scopes, history, snapshots, callbacks and observers.
#include <algorithm>
#include <utility>

#include "allocator/caching_allocator.hpp"
#include "allocator/diagnosis.hpp"

namespace pac::alloc {

Stats CachingAllocator::stats() {
  const Lock lock(mutex_);
  Stats stats = heap_.stats;
  stats.driver_seconds = device_->driver_seconds();
  return stats;
}

Bytes CachingAllocator::largest_available() {
  const Lock lock(mutex_);
  const Bytes limit = malloc_->limit();
  const auto reserved = static_cast<Bytes>(heap_.stats.reserved_bytes.all().current);
  const Bytes growable = std::min(device_->memory().free, limit - std::min(limit, reserved));
  Bytes largest = growable;
  heap_.for_each_pool([&](const Pool& pool) {
    if (pool.group.paused) return;
    for (const Block* block : pool.free) largest = std::max(largest, block->size);
  });
  return largest;
}

namespace {

template <class Visit>
void for_each_stat(Stats& stats, Visit visit) {
  for (StatArray* array :
       {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
        &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
    for (Stat& stat : array->of) visit(stat);
  }
  for (auto& [id, stat] : stats.reserved_bytes_by_private_pool) visit(stat);
  visit(stats.oversize_allocations);
  visit(stats.oversize_segments);
}

}  // namespace

void CachingAllocator::reset_peak_stats() {
  const Lock lock(mutex_);
  for_each_stat(heap_.stats, [](Stat& stat) { stat.reset_peak(); });
}

void CachingAllocator::reset_accumulated_stats() {
  const Lock lock(mutex_);
  for_each_stat(heap_.stats, [](Stat& stat) { stat.reset_accumulated(); });
  Stats& stats = heap_.stats;
  stats.num_alloc_retries = stats.num_ooms = stats.num_sync_all_streams = 0;
  stats.num_device_alloc = stats.num_device_free = stats.num_pieces_moved = stats.num_stream_steals = 0;
}

Fragmentation CachingAllocator::fragmentation() {
  const Lock lock(mutex_);
  return measure_fragmentation(heap_);
}

std::int64_t CachingAllocator::push_scope() {
  const Lock lock(mutex_);
  return scopes_.open();
}

ScopeStats CachingAllocator::pop_scope(std::int64_t id) {
  const Lock lock(mutex_);
  return scopes_.close(id);
}

void CachingAllocator::record_history(const HistoryOptions& options) {
  const Lock lock(mutex_);
  heap_.history.configure(options);
}

Trace CachingAllocator::trace() {
  const Lock lock(mutex_);
  return heap_.history.trace();
}

std::vector<SegmentInfo> CachingAllocator::segments(PoolId pool) {
  const Lock lock(mutex_);
  return describe_segments(heap_, pool);
}

void CachingAllocator::set_tracker(std::function<void(const TraceEntry&)> tracker) {
  const Lock lock(mutex_);
  heap_.history.set_tracker(std::move(tracker));
}

int CachingAllocator::add_pressure_callback(std::function<bool(Bytes)> callback) {
  const Lock lock(mutex_);
  callbacks_.emplace_back(next_callback_, std::move(callback));
  return next_callback_++;
}

void CachingAllocator::remove_pressure_callback(int id) {
  const Lock lock(mutex_);
  const auto is_it = [&](const auto& each) { return each.first == id; };
  callbacks_.erase(std::remove_if(callbacks_.begin(), callbacks_.end(), is_it), callbacks_.end());
}

void CachingAllocator::set_growth_callback(std::function<void()> callback) {
  const Lock lock(mutex_);
  before_growth_ = std::move(callback);
}

void CachingAllocator::call_before_growth(Lock& lock) {
  const auto callback = before_growth_;
  lock.unlock();
  callback();
  lock.lock();
}

int CachingAllocator::add_oom_observer(std::function<void(Bytes, Bytes, Bytes)> observer) {
  const Lock lock(mutex_);
  observers_.push_back(std::move(observer));
  return static_cast<int>(observers_.size()) - 1;
}

void CachingAllocator::check_invariants() {
  const Lock lock(mutex_);
  heap_.check_invariants();
}

}  // namespace pac::alloc
