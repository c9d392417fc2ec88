#include "device/cuda_driver.hpp"

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <atomic>
#include <string>

#include "common/check.hpp"

namespace pac::alloc {

const char kForkedAfterCuda[] =
    "this process was forked from one that had initialised CUDA, and cannot use its devices; start it with the "
    "\"spawn\" or \"forkserver\" method (torch.multiprocessing.set_start_method), or fork before CUDA is used";

namespace {

std::atomic<bool> forked{false};

cudaError_t look_up(const char* name, unsigned version, void** address, cudaDriverEntryPointQueryResult* found) {
#if CUDART_VERSION >= 12050
  return cudaGetDriverEntryPointByVersion(name, address, version, cudaEnableLegacyStream, found);
#else
  static_cast<void>(version);
  return cudaGetDriverEntryPoint(name, address, cudaEnableLegacyStream, found);
#endif
}

[[noreturn]] void no_driver(cudaError_t status) {
  // The status was read: the runtime's memory of it must not surface in somebody else's check.
  static_cast<void>(cudaGetLastError());
  throw DeviceError(std::string("no CUDA driver to allocate with: ") + cudaGetErrorName(status) + ": " +
                    cudaGetErrorString(status));
}

/// Null where the driver has no such function.
template <class Function>
Function entry_point(const char* name, unsigned version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = look_up(name, version, &address, &found);
  if (status == cudaErrorInitializationError) throw DeviceError(kForkedAfterCuda);
  if (status != cudaSuccess) no_driver(status);
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(address) : nullptr;
}

CudaDriver load() {
  CudaDriver driver;
#define PAC_LOAD(call, version)                                     \
  driver.call = entry_point<decltype(driver.call)>(#call, version); \
  if (driver.call == nullptr) throw DeviceError("the CUDA driver has no " #call "; a newer driver is needed");
  PAC_DRIVER_CALLS(PAC_LOAD)
#undef PAC_LOAD
  driver.virtual_memory = true;
#define PAC_LOAD(call, version)                                     \
  driver.call = entry_point<decltype(driver.call)>(#call, version); \
  driver.virtual_memory = driver.virtual_memory && driver.call != nullptr;
  PAC_VIRTUAL_MEMORY_CALLS(PAC_LOAD)
#undef PAC_LOAD

  const CUresult status = driver.cuInit(0);
  if (status == CUDA_ERROR_NOT_INITIALIZED) throw DeviceError(kForkedAfterCuda);
  if (status != CUDA_SUCCESS) {
    const char* text = nullptr;
    driver.cuGetErrorString(status, &text);
    throw DeviceError(std::string("cuInit failed: ") + (text != nullptr ? text : "unknown error"));
  }
  if (pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); }) != 0) {
    throw DeviceError("pthread_atfork failed: out of memory");
  }
  return driver;
}

}  // namespace

const CudaDriver& cuda_driver() {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  static const CudaDriver driver = load();
  return driver;
}

bool forked_after_cuda() noexcept { return forked.load(std::memory_order_relaxed); }

}  // namespace pac::alloc
