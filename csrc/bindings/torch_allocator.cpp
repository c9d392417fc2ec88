// The module pyactcomp._torch_allocator: the allocators of _core as torch's own. Only this file and the torch_*.hpp
// beside it include torch here; the module is compiled for one release of torch and implements the virtual functions of
// this release. Longer than 400 lines: torch's interface has some 50 of them, in one class.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "allocator/runtime.hpp"
#include "allocator/segments.hpp"
#include "bindings/pool_routes.hpp"
#include "bindings/torch_convert.hpp"
#include "bindings/torch_devices.hpp"
#include "bindings/torch_headers.hpp"
#include "bindings/torch_recorder.hpp"
#include "bindings/torch_sharing.hpp"
#include "bindings/torch_tags.hpp"

namespace pac::bindings {
namespace {

namespace py = pybind11;
namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;
using c10::CachingDeviceAllocator::AllocatorTraceTracker;
using c10::CachingDeviceAllocator::CreateContextFn;
using c10::CachingDeviceAllocator::RecordContext;

void delete_block(void* pointer) noexcept;

void trace_allocation(const void* memory) {
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
    (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, address_of(memory));
  }
}

void trace_deallocation(const void* memory) {
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
    (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, address_of(memory));
  }
}

// With caching disabled: memory straight from the device, for tools that check every access.
void* take_uncached(size_t size) {
  void* memory = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&memory, size));
  trace_allocation(memory);
  return memory;
}

void delete_uncached(void* memory) {
  trace_deallocation(memory);
  C10_CUDA_CHECK(cudaFree(memory));
}

/// Torch's allocator once installed. The native allocator keeps the memory it handed out before; frees, queries and
/// statistics reach this memory through here.
class TorchAllocator final : public native::CUDAAllocator {
 public:
  TorchAllocator(alloc::Runtime& runtime, native::CUDAAllocator& native)
      : runtime_(runtime),
        native_(native),
        took_over_(native.initialized()),
        uncached_always_(c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true),
        enabled_(!uncached_always_),
        devices_(runtime, [] { free_returned(); }, [this](DeviceIndex device) { return free_elsewhere(device); }) {
    devices_.add_oom_observer([this](std::int64_t device, size_t requested, size_t, size_t) {
      report_oom_to_profiler(static_cast<DeviceIndex>(device), requested);
    });
    if (took_over_) devices_.set_count(c10::cuda::device_count());
  }

  std::string name() override { return "pyactcomp"; }
  /// True from the start: torch refuses to swap an initialised allocator, and memory of this one may be in use.
  bool initialized() override { return true; }
  void init(int device_count) override {
    native_.init(device_count);  // the native allocator opens other processes' memory
    devices_.set_count(device_count);
  }

  // Allocation.

  at::DataPtr allocate(size_t size) override {
    const DeviceIndex device = current_device();
    const c10::Device where(c10::DeviceType::CUDA, device);
    if (C10_UNLIKELY(!isEnabled())) {
      void* memory = take_uncached(size);
      return {memory, memory, &delete_uncached, where};
    }
    void* block = size == 0 ? nullptr : take(size, device, current_stream(device));
    return {block, block, &delete_block, where};
  }

  void* raw_alloc(size_t size) override {
    const DeviceIndex device = current_device();
    return size == 0 ? nullptr : isEnabled() ? take(size, device, current_stream(device)) : take_uncached(size);
  }

  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return size == 0 ? nullptr : isEnabled() ? take(size, current_device(), number_of(stream)) : take_uncached(size);
  }

  void raw_delete(void* pointer) override {
    if (pointer == nullptr || give_back(pointer)) return;
    if (isEnabled()) {
      native_.raw_delete(pointer);
    } else {
      delete_uncached(pointer);
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return isEnabled() ? &delete_block : &delete_uncached; }

  /// False, without a change, if the pointer is not of our allocators.
  bool give_back(void* pointer) {
    const alloc::Address address = address_of(pointer);
    if (C10_UNLIKELY(c10::memoryProfilingEnabled() || c10::impl::GPUTrace::get_trace())) {
      return give_back_observed(pointer, address);
    }
    return runtime_.try_free(address, origin_of_free(address));
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    C10_CUDA_CHECK(cudaMemcpy(destination, source, count, cudaMemcpyDeviceToDevice));
  }

  using CUDAAllocator::recordStream;
  void recordStream(const at::DataPtr& data, c10::cuda::CUDAStream stream) override {
    if (data.get() == nullptr) return;
    if (data.get_deleter() != &delete_block) {
      native_.recordStream(data, stream);  // the native allocator leaves unknown memory alone
      return;
    }
    devices_[data.device().index()].record_stream(address_of(data.get()), number_of(stream.stream()));
  }

  void* getBaseAllocation(void* pointer, size_t* size) override {
    const int device = runtime_.owner(address_of(pointer));
    if (device < 0) return native_.getBaseAllocation(pointer, size);
    const alloc::BaseAllocation base = devices_[device].base_allocation(address_of(pointer));
    if (size) *size = base.size;
    return pointer_to(base.address);
  }

  void cacheInfo(DeviceIndex device, size_t* largest) override {
    *largest = std::max<size_t>(*largest, devices_[device].largest_available());
  }

  void emptyCache(MempoolId_t pool = {0, 0}) override {
    const alloc::Context context = recorder_.origin(RecordContext::ALL);
    devices_.for_each([&](DeviceIndex, alloc::Allocation& core) { core.empty_cache(to_core(pool), context); });
    if (took_over_) native_.emptyCache(pool);
  }

  void enable(bool value) override { enabled_ = value && !uncached_always_; }
  bool isEnabled() const override { return enabled_.load(std::memory_order_relaxed); }

  double getMemoryFraction(DeviceIndex device) override {
    const alloc::Allocation* existing = devices_.find(device);
    return (existing ? existing->config() : runtime_.config()).memory_fraction;
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    alloc::Config config = devices_[device].config();
    config.memory_fraction = fraction;
    devices_[device].configure(config);
  }

  // Peer access, and memory shared with other processes.

  void enablePeerAccess(DeviceIndex device, DeviceIndex accessed) override {
    native_.enablePeerAccess(device, accessed);
    runtime_.enable_peer_access(accessed, device);
  }

  cudaError_t memcpyAsync(void* destination, int destination_device, const void* source, int source_device,
                          size_t count, cudaStream_t stream, bool p2p_enabled) override {
    if (p2p_enabled || destination_device == source_device) {
      return cudaMemcpyAsync(destination, source, count, cudaMemcpyDeviceToDevice, stream);
    }
    // The other device has no access to mapped memory.
    return cudaMemcpyPeerAsync(destination, destination_device, source, source_device, count, stream);
  }

  native::ShareableHandle shareIpcHandle(void* pointer) override {
    const int device = runtime_.owner(address_of(pointer));
    if (device < 0) return native_.shareIpcHandle(pointer);
    if (const auto mapped = devices_[device].share(address_of(pointer))) {
      return {static_cast<std::ptrdiff_t>(mapped->offset), text_for_torch(*mapped) + mapped->text};
    }
    const alloc::BaseAllocation base = devices_[device].base_allocation(address_of(pointer));
    const c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(device));
    cudaIpcMemHandle_t handle;
    C10_CUDA_CHECK(cudaIpcGetMemHandle(&handle, pointer_to(base.address)));
    return {static_cast<std::ptrdiff_t>(address_of(pointer) - base.address), text_for_torch(handle)};
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    if (const auto opened = runtime_.open_shared(handle, current_device())) {
      return {opened, pointer_to(*opened)};
    }
    TORCH_CHECK(handle.compare(0, kOursAlone.size(), kOursAlone) != 0,
                "the description of a CUDA tensor shared by another process is cut off");
    return native_.getIpcDevPtr(std::move(handle));
  }

  // Private pools.

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    check_ours(device, pool);
    const bool captures = is_capture(filter);
    devices_[device].begin_allocate_to_pool(
        to_core(pool), [filter = std::move(filter)](alloc::Stream stream) { return filter(stream_of(stream)); },
        ThreadTag::get(), captures);
  }

  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    devices_[device].end_allocate_to_pool(to_core(pool));
  }

  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<native::CUDAAllocator> allocator = nullptr) override {
    check_ours(device, pool);
    std::shared_ptr<alloc::SegmentSource> source;
    if (allocator) source = std::make_shared<PoolSegments>(std::move(allocator), device);
    devices_[device].create_or_incref_pool(to_core(pool), std::move(source), ThreadTag::get());
  }

  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    if (native_has(device, pool)) return native_.releasePool(device, pool);
    devices_[device].release_pool(to_core(pool));
  }

  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    if (native_has(device, pool)) return native_.getPoolUseCount(device, pool);
    return devices_[device].pool_use_count(to_core(pool));
  }

  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use_on_oom) override {
    if (native_has(device, pool)) return native_.setUseOnOOM(device, pool, use_on_oom);
    devices_[device].set_use_on_oom(to_core(pool), use_on_oom);
  }

  void setNoSplit(DeviceIndex device, MempoolId_t pool) override { devices_[device].set_no_split(to_core(pool)); }

  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    if (native_has(device, pool)) return native_.checkPoolLiveAllocations(device, pool, expected);
    const std::vector<alloc::Address> live = devices_[device].live_allocations(to_core(pool));
    return live.size() == expected.size() && std::all_of(live.begin(), live.end(), [&](alloc::Address address) {
             return expected.count(pointer_to(address)) != 0;
           });
  }

  std::shared_ptr<native::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    if (native_has(device, pool)) return native_.getCheckpointState(device, pool);
    return std::make_shared<Checkpoint>(devices_[device].checkpoint(to_core(pool)));
  }

  native::CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                                 std::shared_ptr<native::AllocatorState> state) override {
    const auto* ours = dynamic_cast<const Checkpoint*>(state.get());
    if (!ours) return native_.setCheckpointPoolState(device, std::move(state));
    native::CheckpointDelta result;
    const alloc::CheckpointDelta delta = devices_[device].restore(ours->pool);
    for (const alloc::Address address : delta.freed) result.ptrs_freed.push_back(pointer_to(address));
    for (const alloc::Address address : delta.allocated) {
      void* block = pointer_to(address);
      result.dataptrs_allocd.emplace_back(block, block, &delete_block, c10::Device(c10::DeviceType::CUDA, device));
    }
    return result;
  }

  // Statistics, snapshots and history.

  DeviceStats getDeviceStats(DeviceIndex device) override {
    alloc::Reports* existing = devices_.find(device);
    DeviceStats stats = existing ? to_torch(existing->stats()) : DeviceStats{};
    stats.max_split_size = static_cast<std::int64_t>(runtime_.config().max_split_size);
    if (took_over_) add_native(stats, native_.getDeviceStats(device));
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    if (alloc::Reports* existing = devices_.find(device)) existing->reset_accumulated_stats();
    if (took_over_) native_.resetAccumulatedStats(device);
  }

  void resetPeakStats(DeviceIndex device) override {
    if (alloc::Reports* existing = devices_.find(device)) existing->reset_peak_stats();
    if (took_over_) native_.resetPeakStats(device);
  }

  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    std::map<std::pair<alloc::Stream, bool>, size_t> sizes;
    if (alloc::Reports* existing = devices_.find(device)) {
      for (const alloc::SegmentInfo& segment : alloc::with_memory(existing->segments())) {
        if (segment.expandable) sizes[{segment.stream, segment.kind == alloc::PoolKind::kSmall}] += segment.size;
      }
    }
    std::vector<native::StreamSegmentSize> result;
    for (const auto& [key, size] : sizes) result.emplace_back(stream_of(key.first), key.second, size);
    return result;
  }

  native::SnapshotInfo snapshot(MempoolId_t pool = {0, 0}, bool include_traces = true) override {
    native::SnapshotInfo result;
    if (took_over_) result = native_.snapshot(pool, include_traces);
    result.device_traces.resize(static_cast<std::size_t>(devices_.count()));
    devices_.for_each([&](DeviceIndex device, alloc::Reports& core) {
      if (include_traces) {
        auto& trace = result.device_traces[static_cast<std::size_t>(device)];
        const auto before = static_cast<std::ptrdiff_t>(trace.size());
        for (const alloc::TraceEntry& entry : core.trace().entries) trace.push_back(to_snapshot(entry, device));
        std::inplace_merge(trace.begin(), trace.begin() + before, trace.end(),
                           [](const auto& a, const auto& b) { return a.time_.t_ < b.time_.t_; });
      }
      for (const alloc::SegmentInfo& segment : alloc::with_memory(core.segments(to_core(pool)))) {
        result.segments.push_back(to_torch(segment, device));
      }
    });
    result.config_metadata = to_torch(runtime_.config());
    for (auto& annotation : recorder_.annotations()) result.external_annotations.push_back(std::move(annotation));
    return result;
  }

  bool isHistoryEnabled() override { return recorder_.recording(); }

  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear,
                     const std::vector<std::string>& skip_actions) override {
    alloc::HistoryOptions history;
    history.enabled = history.record_trace = enabled;
    history.max_entries = max_entries;
    history.clear = clear || !enabled;
    for (const std::string& action : skip_actions) {
      history.skip_actions |= 1U << c10::CachingDeviceAllocator::parseTraceEntryAction(action);
    }
    recorder_.configure(enabled, recorder, max_entries, when, clear);
    if (took_over_) native_.recordHistory(enabled, recorder, max_entries, when, clear, skip_actions);
    devices_.record_history(history);
  }

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    if (recorder_.recording()) recorder_.annotate(current_device(), values);
  }

  void pushCompileContext(std::string& context) override {
    if (recorder_.recording()) recorder_.push_compile_context(context);
  }
  void popCompileContext() override { recorder_.pop_compile_context(); }
  void setUserMetadata(const std::string& metadata) override { recorder_.user_metadata() = metadata; }
  std::string getUserMetadata() override { return recorder_.user_metadata(); }

  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override {
    devices_.add_oom_observer(std::move(observer));
  }

  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    if (took_over_) native_.attachAllocatorTraceTracker(tracker);
    devices_.add_tracker(std::move(tracker));
  }

#if PAC_TORCH_AT_LEAST(2, 12)
  /// No request is refused before the device was asked: there is nothing to observe.
  void attachOomRejectionObserver(native::OomRejectionObserver) override {}

  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override {
    const int device = runtime_.owner(address_of(pointer));
    if (device < 0) return native_.getContextForPointer(pointer);
    return stack_of(devices_[device].block(address_of(pointer)).context);
  }
#endif

 private:
  static DeviceIndex current_device() {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
  }

  static alloc::Stream current_stream(DeviceIndex device) {
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
    // The default stream needs no look-up; a look-up changes the device and back.
    return stream.id() == 0 ? 0 : number_of(stream.stream());
  }

  /// Frees tensors that other processes have done with. The native allocator does so before it grows, too.
  static bool free_returned() {
    bool freed = false;
    for (const std::string& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
    return freed;
  }

  /// Frees memory outside our allocators: returned tensors and the native allocator's cache.
  bool free_elsewhere(DeviceIndex device) {
    bool freed = free_returned();
    // Giving memory back breaks a capture.
    if (took_over_ && c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
      const auto reserved = [&] { return native_.getDeviceStats(device).reserved_bytes[0].current; };
      const std::int64_t before = reserved();
      if (before > 0) native_.emptyCache();
      freed |= reserved() < before;
    }
    return freed;
  }

  /// Whether the pool was made before the switch.
  bool native_has(DeviceIndex device, const MempoolId_t& pool) {
    if (!took_over_ || devices_[device].pool_use_count(to_core(pool)) > 0) return false;
    try {
      return native_.getPoolUseCount(device, pool) > 0;
    } catch (const c10::Error&) {  // the native allocator throws for an unknown pool
      return false;
    }
  }

  void check_ours(DeviceIndex device, const MempoolId_t& pool) {
    TORCH_CHECK(!native_has(device, pool), "the memory pool (", pool.first, ", ", pool.second,
                ") was made before pyactcomp's allocator was enabled; use a new pool, or enable it earlier");
  }

  void* take(size_t size, DeviceIndex device, alloc::Stream stream) {
    alloc::Allocation& core = devices_[device];
    void* block = nullptr;
    try {
      block = pointer_to(core.allocate(size, stream, recorder_.origin(RecordContext::STATE), ThreadTag::get()));
    } catch (const alloc::OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    } catch (const alloc::PauseError& error) {
      TORCH_CHECK(false, error.what());
    }
    if (C10_UNLIKELY(c10::memoryProfilingEnabled() || c10::impl::GPUTrace::get_trace())) {
      trace_allocation(block);
      report_to_profiler(block, static_cast<std::int64_t>(core.block(address_of(block)).size), device);
    }
    return block;
  }

  /// The context of a free: torch's stack of the free, or the allocation's if frees record none.
  alloc::Context origin_of_free(alloc::Address address) {
    if (C10_LIKELY(!recorder_.recording())) return {};
    const int device = runtime_.owner(address);
    return device < 0 ? alloc::Context() : recorder_.origin_of_free(devices_[device].block(address).context);
  }

  bool give_back_observed(void* pointer, alloc::Address address) {
    const int device = runtime_.owner(address);
    if (device < 0) return false;
    const auto size = static_cast<std::int64_t>(devices_[device].block(address).size);
    trace_deallocation(pointer);
    if (!runtime_.try_free(address, origin_of_free(address))) return false;
    report_to_profiler(pointer, -size, static_cast<DeviceIndex>(device));
    return true;
  }

  void report_to_profiler(void* block, std::int64_t change, DeviceIndex device) {
    const DeviceStats stats = getDeviceStats(device);
    c10::reportMemoryUsageToProfiler(block, change, static_cast<size_t>(stats.allocated_bytes[0].current),
                                     static_cast<size_t>(stats.reserved_bytes[0].current),
                                     c10::Device(c10::DeviceType::CUDA, device));
  }

  void report_oom_to_profiler(DeviceIndex device, size_t requested) {
    const DeviceStats stats = getDeviceStats(device);
    c10::reportOutOfMemoryToProfiler(
        static_cast<std::int64_t>(requested), static_cast<size_t>(stats.allocated_bytes[0].current),
        static_cast<size_t>(stats.reserved_bytes[0].current), c10::Device(c10::DeviceType::CUDA, device));
  }

  alloc::Runtime& runtime_;
  native::CUDAAllocator& native_;
  const bool took_over_;  ///< CUDA was initialised before: the native allocator has memory, pools and statistics
  const bool uncached_always_;
  std::atomic<bool> enabled_;
  Recorder recorder_;
  Devices devices_;
};

/// Never destroyed: tensors outlive the interpreter, and threads the statics.
TorchAllocator* installed = nullptr;

void delete_block(void* pointer) noexcept {
  try {
    installed->raw_delete(pointer);
  } catch (const std::exception& error) {
    int device = 0;
    if (cudaGetDevice(&device) == cudaErrorCudartUnloading) return;  // the process is ending
    TORCH_WARN("a CUDA memory block could not be freed: ", error.what());
  }
}

/// Raises PyactcompError: the state is at fault, not an argument.
[[noreturn]] void refuse(const std::string& text) {
  py::set_error(py::module_::import("pyactcomp.errors").attr("PyactcompError"), text.c_str());
  throw py::error_already_set();
}

void install(const py::object& capsule) {
  if (installed) refuse("pyactcomp's allocator is installed already, and stays installed as long as the process lives");
  if (!PyCapsule_IsValid(capsule.ptr(), alloc::kRuntimeCapsule)) {
    refuse("pyactcomp._torch_allocator and pyactcomp._core are of different versions (expected a capsule named " +
           std::string(alloc::kRuntimeCapsule) + ", got " + std::string(py::repr(capsule)) +
           "): run pyactcomp build-allocator");
  }
  native::CUDAAllocator* current = native::get();
  if (current->name() != "native") {
    refuse("torch's allocator is '" + current->name() +
           "', and only its native one can be replaced: enable pyactcomp before any other allocator, and set no "
           "backend in PYTORCH_ALLOC_CONF");
  }
  auto& runtime = *static_cast<alloc::Runtime*>(PyCapsule_GetPointer(capsule.ptr(), alloc::kRuntimeCapsule));
  installed = std::make_unique<TorchAllocator>(runtime, *current).release();
  // torch.accelerator looks here. The highest priority: the registry silently refuses a lower one than the last.
  c10::SetAllocator(c10::DeviceType::CUDA, installed, std::numeric_limits<std::uint8_t>::max());
  native::allocator.store(installed);
}

}  // namespace
}  // namespace pac::bindings

PYBIND11_MODULE(_torch_allocator, module) {
  module.doc() = "pyactcomp's allocators as torch's own, for the one release of torch that BUILT_FOR names.";
  module.attr("BUILT_FOR") = PAC_BUILT_FOR;
  module.def("set_tag", &pac::bindings::ThreadTag::set, pybind11::arg("tag"),
             "Set the tag of the calling thread's allocations; returns the tag before.");
  module.def("install", &pac::bindings::install, pybind11::arg("runtime"),
             "Let torch allocate through _core's runtime_capsule(). PyactcompError where it cannot.");
}
