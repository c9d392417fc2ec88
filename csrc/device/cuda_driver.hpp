// The driver's functions for the allocator, found in libcuda when first needed. Neither the driver nor the CUDA runtime
// is linked, so cuda.h is enough to build this file, and the module loads on a machine without a GPU.
//
// cuda.h defines a function's name as the name of the declared signature (cuMemAlloc is cuMemAlloc_v2); this name is
// looked up.
#pragma once

#include <cuda.h>

#include <cstddef>

namespace pac::alloc {

#define PAC_DRIVER_CALLS(X)            \
  X(cuInit)                            \
  X(cuDeviceGet)                       \
  X(cuDeviceGetCount)                  \
  X(cuDeviceGetAttribute)              \
  X(cuDeviceCanAccessPeer)             \
  X(cuDeviceGetPCIBusId)               \
  X(cuDevicePrimaryCtxRetain)          \
  X(cuDevicePrimaryCtxRelease)         \
  X(cuCtxPushCurrent)                  \
  X(cuCtxPopCurrent)                   \
  X(cuCtxSynchronize)                  \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuMemGetInfo)                      \
  X(cuMemAlloc)                        \
  X(cuMemFree)                         \
  X(cuEventCreate)                     \
  X(cuEventRecord)                     \
  X(cuEventQuery)                      \
  X(cuEventSynchronize)                \
  X(cuEventDestroy)                    \
  X(cuStreamGetCtx)                    \
  X(cuStreamCreate)                    \
  X(cuStreamSynchronize)               \
  X(cuStreamWaitEvent)                 \
  X(cuStreamIsCapturing)               \
  X(cuStreamDestroy)                   \
  X(cuMemHostAlloc)                    \
  X(cuMemFreeHost)                     \
  X(cuMemcpyDtoHAsync)                 \
  X(cuMemcpyHtoDAsync)                 \
  X(cuGetErrorName)                    \
  X(cuGetErrorString)
// Null where the driver does not have them.
#define PAC_VIRTUAL_MEMORY_CALLS(X) \
  X(cuMemGetAllocationGranularity)  \
  X(cuMemAddressReserve)            \
  X(cuMemAddressFree)               \
  X(cuMemCreate)                    \
  X(cuMemRelease)                   \
  X(cuMemMap)                       \
  X(cuMemUnmap)                     \
  X(cuMemSetAccess)
#define PAC_SHARING_CALLS(X)      \
  X(cuMemExportToShareableHandle) \
  X(cuMemImportFromShareableHandle)

// Queries of a graph being captured, without the data of its edges: newer headers declare only those with the data. A
// query fails where an edge lets a kernel begin before another has ended.
using StreamCaptureInfo = CUresult(CUDAAPI*)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                                             const CUgraphNode**, std::size_t*);
using NodeDependencies = CUresult(CUDAAPI*)(CUgraphNode, CUgraphNode*, std::size_t*);
// By the name that every driver has: newer headers declare a second version, which drivers before CUDA 12.8 lack.
using EventElapsedTime = CUresult(CUDAAPI*)(float*, CUevent, CUevent);

struct CudaDriver {
#define PAC_MEMBER(call) decltype(&::call) call = nullptr;
  PAC_DRIVER_CALLS(PAC_MEMBER)
  PAC_VIRTUAL_MEMORY_CALLS(PAC_MEMBER)
  PAC_SHARING_CALLS(PAC_MEMBER)
#undef PAC_MEMBER
  EventElapsedTime event_elapsed_time = nullptr;
  StreamCaptureInfo stream_capture_info = nullptr;  ///< null where the driver does not have it
  NodeDependencies node_dependencies = nullptr;     ///< likewise
  bool virtual_memory = false;                      ///< the driver has all functions of virtual memory
  bool sharing = false;                             ///< and those that share virtual memory between processes
};

/// The initialised driver. Throws DeviceError without a driver or a device, and in a process forked after the
/// initialisation.
const CudaDriver& cuda_driver();

/// Whether this process was forked after the driver was initialised, and so cannot use CUDA.
bool forked_after_cuda() noexcept;

/// The text of the error in such a process, with the remedy.
extern const char kForkedAfterCuda[];

}  // namespace pac::alloc
