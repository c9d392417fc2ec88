// The process's allocators, one per device, over CUDA. The pluggable library, the Python module and the library for
// torch all use this Runtime, so there is one state, however the allocator was attached.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "allocator/caching_allocator.hpp"
#include "allocator/runtime.hpp"
#include "allocator/sharing.hpp"
#include "device/cuda_device.hpp"

namespace pac::alloc {

/// Environment variable with the settings of a process without a call to configure(), in parse_config's syntax.
constexpr char kConfigVariable[] = "PYACTCOMP_ALLOC_CONF";

class CudaRuntime final : public Runtime {
 public:
  /// Sets the configuration of allocators created from now on, in place of kConfigVariable, and applies it to existing
  /// ones. Throws if an allocator exists and the growth differs.
  void configure(const Config& config);
  Config config() override;
  int device_count() const { return CudaDevice::count(); }
  /// Sets who is told, once, that a device maps no memory and so grows by malloc though its growth was to be vmm.
  /// Called without the lock, from any thread; must not throw.
  void on_growth_by_malloc(std::function<void(const std::string&)> told);
  CachingAllocator& device(int index) override;
  CachingAllocator* existing(int index) noexcept override;
  /// Allocates on a device without changing the current one.
  Address allocate(Bytes size, int device, Stream stream);
  bool try_free(Address address, Context context = {}) override;
  int owner(Address address) override;
  void enable_peer_access(int device, int peer) override;
  std::shared_ptr<const Address> open_shared(const std::string& text, int device) override;
  /// Memory straight from the device, not cached and in no statistics. nullopt: out of memory.
  std::optional<Address> acquire_segment(Bytes size, int device) { return port(device).acquire(size); }
  void release_segment(Address address, Bytes size, int device) { port(device).release(address, size); }

 private:
  struct Slot {
    std::shared_ptr<CudaDevice> device;
    std::shared_ptr<CachingAllocator> allocator;
    std::shared_ptr<Importer> importer;
  };
  /// The number of devices that torch's device index can tell apart.
  static constexpr int kMaxDevices = 128;

  static int checked(int index);
  static Config suited(Config config, const CudaDevice& device);
  // With the lock held.
  const Config& settings();
  Slot& slot_with_device(int index);
  // Without the lock.
  CudaDevice& port(int index);
  std::shared_ptr<Importer> importer(int index);
  CachingAllocator& create(int index);

  std::mutex mutex_;  ///< guards creation and configuration
  std::optional<Config> config_;
  std::array<Slot, kMaxDevices> slots_;
  std::array<std::atomic<CachingAllocator*>, kMaxDevices> published_{};
  std::function<void(const std::string&)> on_growth_by_malloc_;
  std::atomic<int> end_{0};  ///< one more than the highest index published
};

/// The process's Runtime. Never destroyed: tensors are freed after static destructors ran.
CudaRuntime& runtime();

}  // namespace pac::alloc
