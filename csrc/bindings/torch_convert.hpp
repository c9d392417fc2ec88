// Converts the core's values to torch's, and back.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "allocator/allocator.hpp"
#include "bindings/torch_headers.hpp"
#include "bindings/torch_recorder.hpp"

namespace pac::bindings {

using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::CUDACachingAllocator::AllocatorConfigInfo;
using c10::cuda::CUDACachingAllocator::AllocatorState;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using TorchStat = c10::CachingAllocator::Stat;
using TorchStatArray = c10::CachingAllocator::StatArray;
using TorchSegment = c10::CachingDeviceAllocator::SegmentInfo;
using TorchTraceEntry = c10::CachingDeviceAllocator::TraceEntry;

inline alloc::Address address_of(const void* pointer) { return reinterpret_cast<alloc::Address>(pointer); }
inline void* pointer_to(alloc::Address address) { return reinterpret_cast<void*>(address); }
inline alloc::Stream number_of(cudaStream_t stream) { return reinterpret_cast<alloc::Stream>(stream); }
inline cudaStream_t stream_of(alloc::Stream number) { return reinterpret_cast<cudaStream_t>(number); }
inline alloc::PoolId to_core(const c10::MempoolId_t& id) { return {id.first, id.second}; }
inline c10::MempoolId_t to_torch(const alloc::PoolId& id) { return {id.first, id.second}; }

inline std::shared_ptr<c10::GatheredContext> stack_of(const alloc::Context& context) {
  const Origin* origin = Origin::of(context);
  return origin ? origin->stack : nullptr;
}

// Statistics.

constexpr std::pair<TorchStatArray DeviceStats::*, alloc::StatArray alloc::Stats::*> kStatArrays[] = {
    {&DeviceStats::allocation, &alloc::Stats::allocation},
    {&DeviceStats::segment, &alloc::Stats::segment},
    {&DeviceStats::active, &alloc::Stats::active},
    {&DeviceStats::inactive_split, &alloc::Stats::inactive_split},
    {&DeviceStats::allocated_bytes, &alloc::Stats::allocated_bytes},
    {&DeviceStats::reserved_bytes, &alloc::Stats::reserved_bytes},
    {&DeviceStats::active_bytes, &alloc::Stats::active_bytes},
    {&DeviceStats::inactive_split_bytes, &alloc::Stats::inactive_split_bytes},
    {&DeviceStats::requested_bytes, &alloc::Stats::requested_bytes},
};
constexpr std::pair<TorchStat DeviceStats::*, alloc::Stat alloc::Stats::*> kStats[] = {
    {&DeviceStats::oversize_allocations, &alloc::Stats::oversize_allocations},
    {&DeviceStats::oversize_segments, &alloc::Stats::oversize_segments},
};
constexpr std::pair<std::int64_t DeviceStats::*, std::int64_t alloc::Stats::*> kCounters[] = {
    {&DeviceStats::num_alloc_retries, &alloc::Stats::num_alloc_retries},
    {&DeviceStats::num_ooms, &alloc::Stats::num_ooms},
    {&DeviceStats::num_sync_all_streams, &alloc::Stats::num_sync_all_streams},
    {&DeviceStats::num_device_alloc, &alloc::Stats::num_device_alloc},
    {&DeviceStats::num_device_free, &alloc::Stats::num_device_free},
};

inline TorchStat to_torch(const alloc::Stat& stat) {
  TorchStat result;
  result.current = stat.current;
  result.peak = stat.peak;
  result.allocated = stat.allocated;
  result.freed = stat.freed;
  return result;
}

inline DeviceStats to_torch(const alloc::Stats& stats) {
  DeviceStats result;
  for (const auto& [theirs, ours] : kStatArrays) {
    const auto& from = (stats.*ours).of;
    std::transform(from.begin(), from.end(), (result.*theirs).begin(), [](const auto& stat) { return to_torch(stat); });
  }
  for (const auto& [theirs, ours] : kStats) result.*theirs = to_torch(stats.*ours);
  for (const auto& [theirs, ours] : kCounters) result.*theirs = stats.*ours;
#if PAC_TORCH_AT_LEAST(2, 13)
  for (const auto& [pool, reserved] : stats.reserved_bytes_by_private_pool) {
    result.reserved_bytes_by_private_pools[to_torch(pool)][0] = to_torch(reserved);
  }
#endif
  return result;
}

/// Adds the native allocator's counts. Native memory only shrinks after the switch: the native peak came before, ours
/// after.
inline void add_native(TorchStat& total, const TorchStat& native) {
  total.peak = std::max(total.peak + native.current, native.peak);
  total.current += native.current;
  total.allocated += native.allocated;
  total.freed += native.freed;
}

inline void add_native(DeviceStats& total, const DeviceStats& native) {
  for (const auto& [theirs, ours] : kStatArrays) {
    for (std::size_t i = 0; i < (total.*theirs).size(); ++i) add_native((total.*theirs)[i], (native.*theirs)[i]);
  }
  for (const auto& [theirs, ours] : kStats) add_native(total.*theirs, native.*theirs);
  for (const auto& [theirs, ours] : kCounters) total.*theirs += native.*theirs;
#if PAC_TORCH_AT_LEAST(2, 13)
  for (const auto& [pool, reserved] : native.reserved_bytes_by_private_pools) {
    total.reserved_bytes_by_private_pools[pool] = reserved;
  }
#endif
}

// Snapshots.

inline TorchSegment to_torch(const alloc::SegmentInfo& segment, c10::DeviceIndex device) {
  TorchSegment result;
  result.device = device;
  // NCCL registers the segments of a pool in this order, which must be the same in every process.
  result.registration_counter = static_cast<std::int32_t>(segment.order);
  result.address = segment.address;
  result.total_size = segment.size;
  result.stream = pointer_to(segment.stream);
  result.is_large = segment.kind == alloc::PoolKind::kLarge;
  result.is_expandable = segment.expandable;
  result.owner_private_pool_id = to_torch(segment.pool);
  // Stacks of live blocks alone are kept if torch records no more.
  const Origin* origin = Origin::of(segment.context);
  result.context_when_allocated = origin && origin->stack_in_trace ? origin->stack : nullptr;
  for (const alloc::BlockInfo& block : segment.blocks) {
    auto& added = result.blocks.emplace_back();
    added.size = block.size;
    added.requested_size = block.requested;
    added.allocated = block.state == alloc::BlockState::kAllocated;
    added.active = block.state != alloc::BlockState::kFree;
    added.context_when_allocated = stack_of(block.context);
    if (added.allocated) result.allocated_size += block.size;
    if (added.active) {
      result.active_size += block.size;
      result.requested_size += block.requested;
    }
  }
  return result;
}

static_assert(static_cast<int>(alloc::Action::kAlloc) == TorchTraceEntry::ALLOC &&
              static_cast<int>(alloc::Action::kSegmentAlloc) == TorchTraceEntry::SEGMENT_ALLOC &&
              static_cast<int>(alloc::Action::kSegmentMap) == TorchTraceEntry::SEGMENT_MAP &&
              static_cast<int>(alloc::Action::kOutOfMemory) == TorchTraceEntry::OOM);

/// Stamped with the present time, on the clock of torch's trackers.
inline TorchTraceEntry to_torch(const alloc::TraceEntry& entry, c10::DeviceIndex device) {
  const Origin* origin = Origin::of(entry.context);
  return {static_cast<TorchTraceEntry::Action>(entry.action),
          device,
          entry.address,
          entry.size,
          pointer_to(entry.stream),
          to_torch(entry.pool),
          c10::getApproximateTime(),
          origin && origin->stack_in_trace ? origin->stack : nullptr,
          origin && !origin->compile_context.empty() ? origin->compile_context : "N/A",
          origin ? origin->user_metadata : ""};
}

/// Stamped with the event's time in microseconds since the epoch, as in snapshots.
inline TorchTraceEntry to_snapshot(const alloc::TraceEntry& entry, c10::DeviceIndex device) {
  TorchTraceEntry result = to_torch(entry, device);
  result.time_.t_ = entry.time_us;
  return result;
}

inline AllocatorConfigInfo to_torch(const alloc::Config& config) {
  using c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig;
  AllocatorConfigInfo result{};
  result.garbage_collection_threshold = config.garbage_collection_threshold;
  result.max_split_size = config.max_split_size;
  result.expandable_segments = config.growth == alloc::Growth::kVmm;
  result.last_allocator_settings = alloc::to_string(config);
  result.roundup_power2_divisions.assign(config.roundup_power2_divisions.begin(),
                                         config.roundup_power2_divisions.end());
  result.graph_capture_record_stream_reuse = config.graph_capture_record_stream_reuse;
  // Host memory stays torch's.
  result.pinned_num_register_threads = CUDAAllocatorConfig::pinned_num_register_threads();
  result.pinned_use_host_register = CUDAAllocatorConfig::pinned_use_cuda_host_register();
#if PAC_TORCH_AT_LEAST(2, 13)
  result.max_round_threshold = c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_round_threshold();
  result.max_cached_size = c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_cached_size();
#endif
  return result;
}

// Private pools.

/// The segments of a torch.cuda.MemPool with an allocator of its own.
class PoolSegments final : public alloc::SegmentSource {
 public:
  PoolSegments(std::shared_ptr<CUDAAllocator> allocator, c10::DeviceIndex device)
      : allocator_(std::move(allocator)), device_(device) {}

  std::optional<alloc::Address> acquire(alloc::Bytes size, alloc::Stream stream) override {
    const c10::cuda::CUDAGuard guard(device_);
    try {
      if (void* segment = allocator_->raw_alloc_with_stream(size, stream_of(stream))) return address_of(segment);
    } catch (const c10::OutOfMemoryError&) {
      // A failure like any other: the remedies follow, then a fuller error.
    }
    return std::nullopt;
  }
  void release(alloc::Address address, alloc::Bytes) override {
    const c10::cuda::CUDAGuard guard(device_);
    allocator_->raw_delete(pointer_to(address));
  }

 private:
  std::shared_ptr<CUDAAllocator> allocator_;
  c10::DeviceIndex device_;
};

struct Checkpoint final : AllocatorState {
  explicit Checkpoint(alloc::PoolCheckpoint taken) : pool(std::move(taken)) {}
  alloc::PoolCheckpoint pool;
};

}  // namespace pac::bindings
