#include "allocator/cuda_runtime.hpp"

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "common/check.hpp"

namespace pac::alloc {

namespace {

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

}  // namespace

void CudaRuntime::configure(const Config& config) {
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

Config CudaRuntime::config() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settings();
}

void CudaRuntime::on_growth_by_malloc(std::function<void(const std::string&)> told) {
  const std::lock_guard<std::mutex> lock(mutex_);
  on_growth_by_malloc_ = std::move(told);
}

CachingAllocator& CudaRuntime::device(int index) {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  CachingAllocator* const known = existing(index);
  return known != nullptr ? *known : create(index);
}

CachingAllocator* CudaRuntime::existing(int index) noexcept {
  if (index < 0 || index >= kMaxDevices) return nullptr;
  return published_[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
}

Address CudaRuntime::allocate(Bytes size, int device, Stream stream) {
  CachingAllocator& allocator = this->device(device);
  last_device = device;
  return allocator.allocate(size, stream);
}

bool CudaRuntime::try_free(Address address, Context context) {
  // A forked child frees copies of the parent's tensors: both memory and locks are the parent's.
  if (forked_after_cuda()) return true;
  if (CachingAllocator* const likely = existing(last_device); likely != nullptr && likely->try_free(address, context)) {
    return true;
  }
  const int end = end_.load(std::memory_order_acquire);
  for (int index = 0; index < end; ++index) {
    if (index == last_device) continue;
    CachingAllocator* const allocator = existing(index);
    if (allocator == nullptr || !allocator->try_free(address, context)) continue;
    last_device = index;
    return true;
  }
  return false;
}

int CudaRuntime::owner(Address address) {
  const int end = end_.load(std::memory_order_acquire);
  for (int index = 0; index < end; ++index) {
    CachingAllocator* const allocator = existing(index);
    if (allocator != nullptr && allocator->owns(address)) return index;
  }
  return -1;
}

void CudaRuntime::enable_peer_access(int device, int peer) {
  checked(peer);
  this->device(device);
  port(device).enable_peer(peer);
}

std::shared_ptr<const Address> CudaRuntime::open_shared(const std::string& text, int device) {
  const std::optional<SharedBlock> block = from_text(text);
  return block ? importer(device)->open(*block) : nullptr;
}

int CudaRuntime::checked(int index) {
  const int count = CudaDevice::count();
  PAC_CHECK(index >= 0 && index < count && index < kMaxDevices, "device is the index of one of ", count,
            " CUDA devices, got ", index);
  return index;
}

Config CudaRuntime::suited(Config config, const CudaDevice& device) {
  if (!device.has_virtual_memory()) config.growth = Growth::kMalloc;
  return config;
}

const Config& CudaRuntime::settings() {
  if (!config_) config_ = config_from_environment();
  return *config_;
}

CudaRuntime::Slot& CudaRuntime::slot_with_device(int index) {
  Slot& slot = slots_[static_cast<std::size_t>(checked(index))];
  if (!slot.device) slot.device = std::make_shared<CudaDevice>(index);
  return slot;
}

CudaDevice& CudaRuntime::port(int index) {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  const std::lock_guard<std::mutex> lock(mutex_);
  return *slot_with_device(index).device;
}

std::shared_ptr<Importer> CudaRuntime::importer(int index) {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot& slot = slot_with_device(index);
  if (!slot.importer) slot.importer = std::make_shared<Importer>(slot.device);
  return slot.importer;
}

CachingAllocator& CudaRuntime::create(int index) {
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
  CachingAllocator& created = *slot.allocator;
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

CudaRuntime& runtime() {
  static CudaRuntime& instance = *std::make_unique<CudaRuntime>().release();
  return instance;
}

}  // namespace pac::alloc
