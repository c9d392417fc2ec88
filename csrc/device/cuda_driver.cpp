#include "device/cuda_driver.hpp"

#include <dlfcn.h>
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

/// Never closed: its functions are called until the process ends.
void* open_library() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* const reason = dlerror();
  throw DeviceError(std::string("no CUDA driver to allocate with: ") +
                    (reason != nullptr ? reason : "libcuda.so.1 does not load") + "; install NVIDIA's driver");
}

/// Null where the driver has no such function.
template <class Function>
Function found(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

template <class Function>
Function required(void* library, const char* name) {
  const auto function = found<Function>(library, name);
  if (function != nullptr) return function;
  throw DeviceError(std::string("the CUDA driver has no ") + name + "; a newer driver is needed");
}

CudaDriver load() {
  void* const library = open_library();
  CudaDriver driver;
#define PAC_NAME(call) #call
#define PAC_LOAD(call) driver.call = required<decltype(driver.call)>(library, PAC_NAME(call));
  PAC_DRIVER_CALLS(PAC_LOAD)
#undef PAC_LOAD
  bool complete = true;
#define PAC_LOAD(call)                                                 \
  driver.call = found<decltype(driver.call)>(library, PAC_NAME(call)); \
  complete = complete && driver.call != nullptr;
  PAC_VIRTUAL_MEMORY_CALLS(PAC_LOAD)
  driver.virtual_memory = complete;
  PAC_SHARING_CALLS(PAC_LOAD)
  driver.sharing = complete;
#undef PAC_LOAD
#undef PAC_NAME
  driver.event_elapsed_time = required<EventElapsedTime>(library, "cuEventElapsedTime");
  driver.stream_capture_info = found<StreamCaptureInfo>(library, "cuStreamGetCaptureInfo_v2");
  driver.node_dependencies = found<NodeDependencies>(library, "cuGraphNodeGetDependencies");

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
