// The codec's CUDA launchers: raw device pointers of any alignment and a stream; no torch, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "codec/format.hpp"
#include "codec/kernel_table.hpp"

namespace pac::cuda {

/// Packs numel elements in codes or bits on the current device.
[[nodiscard]] cudaError_t encode(const Format& format, const void* source, Rows rows, void* out, std::int64_t numel,
                                 Keys keys, cudaStream_t stream);

/// Restores numel elements on the current device; the inverse of encode.
[[nodiscard]] cudaError_t decode(const Format& format, const void* packed, void* out, std::int64_t numel,
                                 cudaStream_t stream);

/// As encode and decode, of every encoding but codes and booleans; the stored form is at an address of a whole element.
[[nodiscard]] cudaError_t encode_form(const Format& format, const void* source, void* packed, std::int64_t numel,
                                      cudaStream_t stream);
[[nodiscard]] cudaError_t decode_form(const Format& format, const void* packed, void* out, std::int64_t numel,
                                      cudaStream_t stream);

}  // namespace pac::cuda
