// The allocator of each device, with torch's trackers, observers and history settings for all of them.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "allocator/runtime.hpp"
#include "bindings/torch_convert.hpp"
#include "bindings/torch_headers.hpp"

namespace pac::bindings {

class Devices {
 public:
  using Tracker = c10::CachingDeviceAllocator::AllocatorTraceTracker;
  using OutOfMemoryObserver = c10::cuda::CUDACachingAllocator::OutOfMemoryObserver;
  /// Called before an allocation on the device fails; returns whether memory was freed.
  using PressureCallback = std::function<bool(c10::DeviceIndex)>;

  Devices(alloc::Runtime& runtime, std::function<void()> before_growth, PressureCallback on_pressure)
      : runtime_(runtime), before_growth_(std::move(before_growth)), on_pressure_(std::move(on_pressure)) {}

  void set_count(int count) { count_ = count; }
  int count() const { return count_; }

  alloc::Allocator& operator[](int device) {
    check(device);
    alloc::Allocator* known = known_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
    return C10_LIKELY(known != nullptr) ? *known : adopt(static_cast<c10::DeviceIndex>(device));
  }

  /// nullptr if the device's allocator was not created yet.
  alloc::Allocator* find(int device) {
    check(device);
    return runtime_.existing(device) ? &(*this)[device] : nullptr;
  }

  template <class Function>
  void for_each(const Function& function) {
    for (c10::DeviceIndex device = 0; device < count_; ++device) {
      if (alloc::Allocator* existing = find(device)) function(device, *existing);
    }
  }

  void record_history(alloc::HistoryOptions options) {
    const std::lock_guard lock(mutex_);
    for_each([&](c10::DeviceIndex, alloc::Reports& reports) { reports.record_history(options); });
    history_ = std::move(options);
  }

  void add_tracker(Tracker tracker) {
    const std::lock_guard lock(mutex_);
    trackers_.push_back(std::move(tracker));
    for_each([&](c10::DeviceIndex device, alloc::Reports& reports) { set_trackers(device, reports); });
  }

  void add_oom_observer(OutOfMemoryObserver observer) {
    const std::lock_guard lock(mutex_);
    oom_observers_.push_back(std::move(observer));
  }

 private:
  void check(int device) const {
    // The count is not known before CUDA is initialised.
    const int end = count_ > 0 ? count_.load() : C10_COMPILE_TIME_MAX_GPUS;
    TORCH_CHECK(device >= 0 && device < end, "Invalid device argument ", device, ": CUDA has ", end, " devices");
  }

  alloc::Allocator& adopt(c10::DeviceIndex device) {
    alloc::Allocator& created = runtime_.device(device);
    const std::lock_guard lock(mutex_);
    std::atomic<alloc::Allocator*>& known = known_[static_cast<std::size_t>(device)];
    if (known) return created;
    created.set_growth_callback(before_growth_);
    created.add_pressure_callback([this, device](alloc::Bytes) { return on_pressure_(device); });
    created.add_oom_observer([this, device](alloc::Bytes requested, alloc::Bytes total, alloc::Bytes free) {
      std::unique_lock observing(mutex_);
      const std::vector<OutOfMemoryObserver> observers = oom_observers_;
      observing.unlock();
      for (const OutOfMemoryObserver& observer : observers) observer(device, requested, total, free);
    });
    if (history_.enabled) created.record_history(history_);
    if (!trackers_.empty()) set_trackers(device, created);
    known.store(&created, std::memory_order_release);
    return created;
  }

  void set_trackers(c10::DeviceIndex device, alloc::Reports& reports) {
    reports.set_tracker([device, trackers = trackers_](const alloc::TraceEntry& entry) {
      const TorchTraceEntry event = to_torch(entry, device);
      for (const Tracker& tracker : trackers) tracker(event);
    });
  }

  alloc::Runtime& runtime_;
  const std::function<void()> before_growth_;
  const PressureCallback on_pressure_;
  std::atomic<int> count_{0};
  std::array<std::atomic<alloc::Allocator*>, C10_COMPILE_TIME_MAX_GPUS> known_{};

  // Guards the members below; taken before an allocator's lock, never after. Recursive: a walk over all devices adopts
  // them.
  std::recursive_mutex mutex_;
  alloc::HistoryOptions history_;
  std::vector<OutOfMemoryObserver> oom_observers_;
  std::vector<Tracker> trackers_;
};

}  // namespace pac::bindings
