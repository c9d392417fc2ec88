// The codec's CUDA launchers: raw device pointers of any alignment and a stream; no torch, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "codec/format.hpp"

namespace pac::cuda {

/// Rows apart in memory: their length, and elements between the end of one and the next. Multiples of 8, of less than
/// 2^35 elements in all, packed in 8 bits to nearest; the length 0 stands for no gaps.
struct Rows {
  std::int64_t length = 0;
  std::int64_t gap = 0;
};

/// Packs numel elements on the current device.
[[nodiscard]] cudaError_t encode(const Spec& spec, const void* source, Rows rows, void* out, std::int64_t numel,
                                 Keys keys, cudaStream_t stream);

/// Restores numel elements on the current device; the inverse of encode.
[[nodiscard]] cudaError_t decode(const Spec& spec, const void* packed, void* out, std::int64_t numel,
                                 cudaStream_t stream);

}  // namespace pac::cuda
