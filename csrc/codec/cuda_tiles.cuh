// How the CUDA kernels walk a tensor: a warp for each tile of whole chunks of 256 elements, eight elements a lane.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "codec/cuda_vector.cuh"
#include "codec/format.hpp"

namespace pac::cuda {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kThreads = 128;
inline constexpr int kChunk = kPerLane * static_cast<int>(kWarp);

/// Chunks of a warp if the tensor fills the device. Measured on an H200 with 1, 2, 4 and 8, bfloat16 of 256 MiB packed
/// in codes, as a share of the copy's rate: encode 0.76, 0.91, 1.01, 1.00; decode 0.94, 0.96, 0.94, 0.93.
inline constexpr int kEncodeUnroll = 4;
inline constexpr int kDecodeUnroll = 2;

/// Up to this many elements, one chunk for each warp fits the device in one wave (132 SMs of 64 warps on an H100 or
/// H200), and spreading the work counts more than loads in flight.
inline constexpr std::int64_t kSmall = std::int64_t{132} * 64 * kChunk;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }

/// The first element of this warp's tile. Tiles run in descending order: the producer has just written the tensor in
/// ascending order, so the tail is still in the L2 cache; and decode writes the start last, for the next reader.
template <int kChunks>
__device__ __forceinline__ std::int64_t tile_begin() {
  const std::int64_t block = gridDim.x - 1 - blockIdx.x;
  return (block * (kThreads / kWarp) + threadIdx.x / kWarp) * (kChunk * kChunks);
}

template <class Arguments>
using KernelOf = void (*)(Arguments);

inline bool aligned(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

/// The grid for `per_thread` elements a thread.
inline dim3 grid_for(std::int64_t numel, int per_thread) {
  return dim3(static_cast<unsigned>(ceil_div(numel, std::int64_t{kThreads} * per_thread)));
}

template <class Arguments>
cudaError_t launch(KernelOf<Arguments> kernel, dim3 grid, Arguments arguments, cudaStream_t stream) {
  void* parameters[] = {&arguments};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(kThreads), parameters, 0, stream);
}

}  // namespace pac::cuda
