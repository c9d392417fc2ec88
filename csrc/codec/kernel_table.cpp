#include "codec/kernel_table.hpp"

#include <cstdio>
#include <cstring>
#include <exception>

#include "codec/cpu.hpp"
#include "codec/halves.hpp"

#if PAC_CUDA_CODEC
#include "codec/cuda.hpp"
#endif

namespace pac {
namespace {

std::int64_t packed_nbytes(const Format& format, std::int64_t numel) noexcept {
  switch (format.encoding) {
    case Encoding::kCodes:
      return parameters_offset(numel, format.bits) + 4 * ceil_div(numel, format.group_size);
    case Encoding::kBooleans:
    case Encoding::kComparison:
      return ceil_div(numel, 8);
    case Encoding::kScaled:
      return 2 * (numel + ceil_div(numel, kPart));
    case Encoding::kCast:
      return (format.narrow == DType::kFloat32 ? 4 : 2) * numel;
    default:
      return 2 * numel;
  }
}

/// No exception may pass the table: threads and memory can run out.
template <class Work>
Status guarded(const Work& work) noexcept {
  try {
    work();
    return 0;
  } catch (const std::exception&) {
    return kHostFailed;
  }
}

template <cpu::Isa kIsa>
Status encode_on_cpu(const Format& format, const void* source, void* packed, std::int64_t numel, Keys keys,
                     const Place& place) noexcept {
  return guarded([&] { cpu::encode(format, kIsa, source, packed, numel, keys, place.threads); });
}

template <cpu::Isa kIsa>
Status decode_on_cpu(const Format& format, const void* packed, void* out, std::int64_t numel,
                     const Place& place) noexcept {
  return guarded([&] { cpu::decode(format, kIsa, packed, out, numel, place.threads); });
}

template <cpu::Isa kIsa>
constexpr Kernel kCpuKernel = {packed_nbytes, encode_on_cpu<kIsa>, nullptr, decode_on_cpu<kIsa>};

#if PAC_CUDA_CODEC
/// Launches on a device, and makes the caller's current again.
template <class Launch>
Status on_device(std::int32_t device, const Launch& launch) noexcept {
  int previous = 0;
  cudaError_t status = cudaGetDevice(&previous);
  if (status == cudaSuccess && previous != device) status = cudaSetDevice(device);
  if (status == cudaSuccess) {
    status = launch();
    // The device was current a moment ago; the status of the launch says more.
    if (previous != device) static_cast<void>(cudaSetDevice(previous));
  }
  // The status is returned: cleared from the runtime, the error does not surface in another caller's check.
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status;
}

Status encode_on_cuda(const Format& format, const void* source, void* packed, std::int64_t numel, Keys keys,
                      const Place& place) noexcept {
  return on_device(place.device, [&] {
    return cuda::encode(format, source, {}, packed, numel, keys, static_cast<cudaStream_t>(place.stream));
  });
}

Status encode_rows_on_cuda(const Format& format, const void* source, Rows rows, void* packed, std::int64_t numel,
                           const Place& place) noexcept {
  return on_device(place.device, [&] {
    return cuda::encode(format, source, rows, packed, numel, {}, static_cast<cudaStream_t>(place.stream));
  });
}

Status decode_on_cuda(const Format& format, const void* packed, void* out, std::int64_t numel,
                      const Place& place) noexcept {
  return on_device(place.device,
                   [&] { return cuda::decode(format, packed, out, numel, static_cast<cudaStream_t>(place.stream)); });
}

Status encode_form_on_cuda(const Format& format, const void* source, void* packed, std::int64_t numel, Keys,
                           const Place& place) noexcept {
  return on_device(place.device, [&] {
    return cuda::encode_form(format, source, packed, numel, static_cast<cudaStream_t>(place.stream));
  });
}

Status decode_form_on_cuda(const Format& format, const void* packed, void* out, std::int64_t numel,
                           const Place& place) noexcept {
  return on_device(place.device, [&] {
    return cuda::decode_form(format, packed, out, numel, static_cast<cudaStream_t>(place.stream));
  });
}

constexpr Kernel kCudaFormKernel = {packed_nbytes, encode_form_on_cuda, nullptr, decode_form_on_cuda};
constexpr Kernel kCudaKernel = {packed_nbytes, encode_on_cuda, encode_rows_on_cuda, decode_on_cuda};
#endif

bool is_served(const Format& format) {
  const bool wide = format.dtype == DType::kFloat32 || format.dtype == DType::kFloat64;
  const bool narrow = format.narrow == DType::kBFloat16 || format.narrow == DType::kFloat16;
  const bool whole = format.bits == 8 || format.bits == 4 || format.bits == 2;
  const bool grouped = format.group_size == 64 || format.group_size == 128 || format.group_size == 256;
  switch (format.encoding) {
    case Encoding::kCodes:
      return whole && grouped && format.dtype != DType::kBool && format.dtype != DType::kFloat64;
    case Encoding::kBooleans:
      return format.dtype == DType::kBool;
    case Encoding::kComparison:
      return format.dtype != DType::kBool;
    case Encoding::kCast:
      return wide && (narrow || (format.dtype == DType::kFloat64 && format.narrow == DType::kFloat32));
    case Encoding::kBFloat16:
    case Encoding::kFloat16:
    case Encoding::kProbability:
    case Encoding::kLogProbability:
    case Encoding::kArtanh:
    case Encoding::kScaled:
      return wide;
  }
  return false;
}

const Kernel* find(const Format& format, Target target) noexcept {
  if (!is_served(format)) return nullptr;
  switch (target) {
    case Target::kCpu:
      return cpu::best_isa() == cpu::Isa::kAvx2 ? &kCpuKernel<cpu::Isa::kAvx2> : &kCpuKernel<cpu::Isa::kBaseline>;
    case Target::kCpuBaseline:
      return &kCpuKernel<cpu::Isa::kBaseline>;
    case Target::kCuda:
#if PAC_CUDA_CODEC
      return format.encoding == Encoding::kCodes || format.encoding == Encoding::kBooleans ? &kCudaKernel
                                                                                           : &kCudaFormKernel;
#endif
      break;
  }
  return nullptr;
}

Keys random_keys(std::uint64_t seed) noexcept {
  // SplitMix64's finaliser.
  std::uint64_t z = seed + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return {static_cast<std::uint32_t>(z), static_cast<std::uint32_t>(z >> 32)};
}

void describe(Status status, char* text, std::int64_t capacity) noexcept {
  const auto size = static_cast<std::size_t>(capacity);
#if PAC_CUDA_CODEC
  if (status != kHostFailed) {
    const auto error = static_cast<cudaError_t>(status);
    std::snprintf(text, size, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
    return;
  }
#else
  static_cast<void>(status);
#endif
  std::snprintf(text, size, "the host has no memory or no thread left");
}

constexpr KernelTable kTable = {kKernelVersion, find, random_keys, describe};

}  // namespace

const KernelTable& kernel_table() noexcept { return kTable; }

}  // namespace pac
