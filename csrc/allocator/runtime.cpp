#include "allocator/runtime.hpp"

#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "allocator/caching_allocator.hpp"
#include "allocator/sharing.hpp"
#include "common/check.hpp"
#include "device/cuda_device.hpp"

namespace pac::alloc {

namespace {

/// The number of devices that torch's device index can tell apart.
constexpr int kMaxDevices = 128;

thread_local int last_device = 0;

Config config_from_environment() {
  const char* text = std::getenv(kConfigVariable);
  if (text == nullptr) return {};
  try {
    return parse_config(text);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(kConfigVariable) + "=\"" + text + "\": " + error.what());
  }
}

class CudaRuntime final : public Runtime {
 public:
  void configure(const Config& config) override {
    validate(config);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Slot& slot : slots_) {
      if (slot.allocator && config.growth != config_->growth) {
        throw std::invalid_argument("growth cannot change once " + slot.device->name() +
                                    " has been allocated on; configure the allocator before the first CUDA tensor");
      }
    }
    for (const Slot& slot : slots_) {
      if (slot.allocator) slot.allocator->configure(suited(config, *slot.device));
    }
    config_ = config;
  }

  Config config() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return settings();
  }

  int device_count() override { return CudaDevice::count(); }

  void on_growth_by_malloc(std::function<void(const std::string&)> told) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    on_growth_by_malloc_ = std::move(told);
  }

  Allocator& device(int index) override {
    if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
    Allocator* const known = existing(index);
    return known != nullptr ? *known : create(index);
  }

  Allocator* existing(int index) noexcept override {
    if (index < 0 || index >= kMaxDevices) return nullptr;
    return published_[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
  }

  Address allocate(Bytes size, int device, Stream stream, Context context) override {
    Allocator& allocator = this->device(device);
    last_device = device;
    return allocator.allocate(size, stream, std::move(context));
  }

  bool try_free(Address address, Context context) override {
    // A forked child frees copies of the parent's tensors: both memory and locks are the parent's.
    if (forked_after_cuda()) return true;
    if (Allocator* const likely = existing(last_device); likely != nullptr && likely->try_free(address, context)) {
      return true;
    }
    const int end = end_.load(std::memory_order_acquire);
    for (int index = 0; index < end; ++index) {
      if (index == last_device) continue;
      Allocator* const allocator = existing(index);
      if (allocator == nullptr || !allocator->try_free(address, context)) continue;
      last_device = index;
      return true;
    }
    return false;
  }

  int owner(Address address) override {
    const int end = end_.load(std::memory_order_acquire);
    for (int index = 0; index < end; ++index) {
      Allocator* const allocator = existing(index);
      if (allocator != nullptr && allocator->owns(address)) return index;
    }
    return -1;
  }

  void enable_peer_access(int device, int peer) override {
    checked(peer);
    this->device(device);
    port(device).enable_peer(peer);
  }

  std::shared_ptr<const Address> open_shared(const std::string& text, int device) override {
    const std::optional<SharedBlock> block = from_text(text);
    return block ? importer(device)->open(*block) : nullptr;
  }

  std::optional<Address> acquire_segment(Bytes size, int device) override { return port(device).acquire(size); }

  void release_segment(Address address, Bytes size, int device) override { port(device).release(address, size); }

 private:
  struct Slot {
    std::shared_ptr<CudaDevice> device;
    std::shared_ptr<Allocator> allocator;
    std::shared_ptr<Importer> importer;
  };

  static int checked(int index) {
    const int count = CudaDevice::count();
    PAC_CHECK(index >= 0 && index < count && index < kMaxDevices, "device is the index of one of ", count,
              " CUDA devices, got ", index);
    return index;
  }

  static Config suited(Config config, const CudaDevice& device) {
    if (!device.has_virtual_memory()) config.growth = Growth::kMalloc;
    return config;
  }

  /// With the lock held.
  const Config& settings() {
    if (!config_) config_ = config_from_environment();
    return *config_;
  }

  /// With the lock held.
  Slot& slot_with_device(int index) {
    Slot& slot = slots_[static_cast<std::size_t>(checked(index))];
    if (!slot.device) slot.device = std::make_shared<CudaDevice>(index);
    return slot;
  }

  CudaDevice& port(int index) {
    if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
    const std::lock_guard<std::mutex> lock(mutex_);
    return *slot_with_device(index).device;
  }

  std::shared_ptr<Importer> importer(int index) {
    if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& slot = slot_with_device(index);
    if (!slot.importer) slot.importer = std::make_shared<Importer>(slot.device);
    return slot.importer;
  }

  Allocator& create(int index) {
    std::unique_lock<std::mutex> lock(mutex_);
    const Config& wanted = settings();
    Slot& slot = slot_with_device(index);
    if (!slot.allocator) {
      auto allocator = std::make_shared<CachingAllocator>(slot.device, suited(wanted, *slot.device));
      for (int other = 0; other < kMaxDevices; ++other) {
        const Slot& peer = slots_[static_cast<std::size_t>(other)];
        if (!peer.allocator) continue;
        if (CudaDevice::can_access_peer(other, index)) slot.device->enable_peer(other);
        if (CudaDevice::can_access_peer(index, other)) peer.device->enable_peer(index);
      }
      slot.allocator = std::move(allocator);
      published_[static_cast<std::size_t>(index)].store(slot.allocator.get(), std::memory_order_release);
      if (end_.load(std::memory_order_relaxed) <= index) end_.store(index + 1, std::memory_order_release);
    }
    Allocator& created = *slot.allocator;
    if (wanted.growth == Growth::kVmm && !slot.device->has_virtual_memory()) {
      const std::string text = slot.device->name() + " maps no memory (" + slot.device->unmappable() +
                               "), so pyactcomp's allocator grows by cudaMalloc there: it makes PyTorch's decisions "
                               "and fragments as much. To silence this, set growth='malloc', or growth:malloc in " +
                               kConfigVariable;
      const auto told = std::exchange(on_growth_by_malloc_, nullptr);
      lock.unlock();
      if (told) told(text);
    }
    return created;
  }

  std::mutex mutex_;  // guards creation and configuration
  std::optional<Config> config_;
  std::array<Slot, kMaxDevices> slots_;
  std::array<std::atomic<Allocator*>, kMaxDevices> published_{};
  std::function<void(const std::string&)> on_growth_by_malloc_;
  std::atomic<int> end_{0};  // one more than the highest index published
};

}  // namespace

Runtime& runtime() {
  static Runtime& instance = *std::make_unique<CudaRuntime>().release();
  return instance;
}

}  // namespace pac::alloc
