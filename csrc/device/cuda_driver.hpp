// The driver's functions that the allocator calls, found when first needed: the library is never linked against
// libcuda, so it loads on a machine without one.
#pragma once

#include <cuda.h>

namespace pac::alloc {

// Name, and the CUDA version whose signature the header declares.
#define PAC_DRIVER_CALLS(X)                   \
  X(cuInit, 2000)                             \
  X(cuDeviceGet, 2000)                        \
  X(cuDeviceGetCount, 2000)                   \
  X(cuDeviceGetAttribute, 2000)               \
  X(cuDeviceCanAccessPeer, 4000)              \
  X(cuDevicePrimaryCtxRetain, 7000)           \
  X(cuDevicePrimaryCtxRelease, 11000)         \
  X(cuCtxPushCurrent, 4000)                   \
  X(cuCtxPopCurrent, 4000)                    \
  X(cuCtxSynchronize, 2000)                   \
  X(cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuMemGetInfo, 3020)                       \
  X(cuMemAlloc, 3020)                         \
  X(cuMemFree, 3020)                          \
  X(cuEventCreate, 2000)                      \
  X(cuEventRecord, 2000)                      \
  X(cuEventQuery, 2000)                       \
  X(cuEventSynchronize, 2000)                 \
  X(cuEventDestroy, 4000)                     \
  X(cuStreamGetCtx, 9020)                     \
  X(cuGetErrorName, 6000)                     \
  X(cuGetErrorString, 6000)
// Null where the driver does not have them.
#define PAC_VIRTUAL_MEMORY_CALLS(X)       \
  X(cuMemGetAllocationGranularity, 10020) \
  X(cuMemAddressReserve, 10020)           \
  X(cuMemAddressFree, 10020)              \
  X(cuMemCreate, 10020)                   \
  X(cuMemRelease, 10020)                  \
  X(cuMemMap, 10020)                      \
  X(cuMemUnmap, 10020)                    \
  X(cuMemSetAccess, 10020)

struct CudaDriver {
#define PAC_MEMBER(call, version) decltype(&::call) call = nullptr;
  PAC_DRIVER_CALLS(PAC_MEMBER)
  PAC_VIRTUAL_MEMORY_CALLS(PAC_MEMBER)
#undef PAC_MEMBER
  bool virtual_memory = false;  ///< all calls of virtual memory are there
};

/// The initialised driver. Throws DeviceError where there is none, or no device, or it was initialised before a fork.
const CudaDriver& cuda_driver();

/// This process was forked from one that had initialised the driver here, and cannot use it.
bool forked_after_cuda() noexcept;

/// The fault then, and the remedy.
extern const char kForkedAfterCuda[];

}  // namespace pac::alloc
