// The C functions for PyTorch's CUDAPluggableAllocator, by name or by address:
//
//   CUDAPluggableAllocator(path, "pyactcomp_malloc", "pyactcomp_free")            the process's allocator
//   CUDAPluggableAllocator(path, "pyactcomp_pool_malloc", "pyactcomp_pool_free")  segments of a torch.cuda.MemPool
//
// The addresses of the other functions go to set_*_fn. Functions called where torch can take an exception throw (C
// linkage is for the names only); functions called from destructors keep the fault for pyactcomp_last_error() and
// pyactcomp_fault_count().
//
// pyactcomp_malloc and pyactcomp_free under a MemPool work too. If this allocator is torch's own, they act as the pool
// functions; otherwise the allocator would wait for its own lock. Under torch's native allocator there are two
// differences: running out of memory throws, which torch survives but does not answer by giving cached memory back, and
// memory given back by torch stays cached here.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include "allocator/cuda_runtime.hpp"
#include "allocator/supply.hpp"
#include "bindings/pool_routes.hpp"

#define PAC_EXPORT extern "C" __attribute__((visibility("default")))

struct CUstream_st;

namespace {

using namespace pac::alloc;
using CudaStream = CUstream_st*;
using MempoolId = std::pair<unsigned long long, unsigned long long>;

Address number(const void* address) { return reinterpret_cast<Address>(address); }
void* pointer(Address address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)
PoolId pool_of(MempoolId id) { return {id.first, id.second}; }

/// Faults in functions that must not throw. Fixed arrays: keeping a fault cannot fail.
class Faults {
 public:
  using Text = std::array<char, 1024>;

  void keep(const char* text) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    const std::size_t length = std::min(std::strlen(text), last_.size() - 1);
    std::memcpy(last_.data(), text, length);
    last_[length] = '\0';
  }
  std::uint64_t count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }
  Text last() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return last_;
  }

 private:
  std::mutex mutex_;
  std::uint64_t count_ = 0;
  Text last_{};
};

/// Never destroyed, like runtime().
Faults& faults() {
  static Faults& instance = *std::make_unique<Faults>().release();
  return instance;
}

template <class Call>
void without_throwing(Call&& call) noexcept {
  try {
    call();
  } catch (const std::exception& error) {
    faults().keep(error.what());
  }
}

}  // namespace

/// Uncached, because torch caches above this function, and memory given back by torch is to be free for others. nullptr
/// makes torch give cached memory back and try again, then raise torch.OutOfMemoryError; failures of another kind are
/// kept as faults, too.
PAC_EXPORT void* pyactcomp_pool_malloc(std::size_t size, int device, CudaStream) {
  void* segment = nullptr;
  if (size == 0) return segment;
  without_throwing([&] {
    if (const auto address = runtime().acquire_segment(size, device)) segment = pointer(*address);
  });
  return segment;
}

PAC_EXPORT void pyactcomp_pool_free(void* address, std::size_t size, int device, CudaStream) {
  if (address == nullptr) return;
  without_throwing([&] { runtime().release_segment(number(address), size, device); });
}

/// Throws OutOfMemory, with a text that begins as PyTorch's own, and any error of CUDA.
PAC_EXPORT void* pyactcomp_malloc(std::size_t size, int device, CudaStream stream) {
  if (size == 0) return nullptr;
  if (inside_segment_source()) return pyactcomp_pool_malloc(size, device, stream);
  return pointer(runtime().allocate(size, device, number(stream)));
}

/// Does not need torch's size, device and stream: in some releases they are an earlier block's.
PAC_EXPORT void pyactcomp_free(void* address, std::size_t size, int device, CudaStream stream) {
  if (address == nullptr) return;
  if (inside_segment_source()) return pyactcomp_pool_free(address, size, device, stream);
  without_throwing([&] {
    if (runtime().try_free(number(address))) return;
    std::ostringstream text;
    text << "pyactcomp_free: " << address << " is not in use: it was never allocated here, or was freed before";
    throw UnknownAddress(text.str());
  });
}

/// Reads the settings: a mistake there surfaces when CUDA is initialised.
PAC_EXPORT void pyactcomp_init(int) { runtime().config(); }

PAC_EXPORT void pyactcomp_reset() {
  for (int index = 0, count = runtime().device_count(); index < count; ++index) {
    if (CachingAllocator* const allocator = runtime().existing(index)) allocator->empty_cache();
  }
}

PAC_EXPORT void pyactcomp_memory_fraction(double fraction, int device) {
  CachingAllocator& allocator = runtime().device(device);
  Config config = allocator.config();
  config.memory_fraction = fraction;
  allocator.configure(config);
}

PAC_EXPORT void* pyactcomp_base_alloc(void* address, std::size_t* size) {
  const int device = runtime().owner(number(address));
  if (device < 0) throw UnknownAddress("pyactcomp_base_alloc: the address is not of a block in use");
  const BaseAllocation base = runtime().device(device).base_allocation(number(address));
  if (size != nullptr) *size = base.size;
  return pointer(base.address);
}

/// Leaves another library's address alone (a tensor made by from_dlpack, say), as PyTorch's own allocator does.
PAC_EXPORT void pyactcomp_record_stream(void* address, CudaStream stream) {
  const int device = runtime().owner(number(address));
  if (device >= 0) runtime().device(device).record_stream(number(address), number(stream));
}

PAC_EXPORT void pyactcomp_begin_allocate_to_pool(int device, MempoolId id, std::function<bool(CudaStream)> filter) {
  const bool captures = pac::bindings::is_capture(filter);
  const auto accepts = [filter = std::move(filter)](Stream stream) {
    return filter(static_cast<CudaStream>(pointer(stream)));
  };
  runtime().device(device).begin_allocate_to_pool(pool_of(id), accepts, 0, captures);
}

PAC_EXPORT void pyactcomp_end_allocate_to_pool(int device, MempoolId id) {
  runtime().device(device).end_allocate_to_pool(pool_of(id));
}

PAC_EXPORT void pyactcomp_release_pool(int device, MempoolId id) {
  without_throwing([&] { runtime().device(device).release_pool(pool_of(id)); });
}

PAC_EXPORT std::uint64_t pyactcomp_fault_count() { return faults().count(); }

/// The text of the last fault, empty if there was none; valid until the calling thread asks again.
PAC_EXPORT const char* pyactcomp_last_error() {
  thread_local Faults::Text copy;
  copy = faults().last();
  return copy.data();
}
