// The CUDA kernels: one pass, a warp for each tile of whole chunks of 256 elements, eight elements a lane.
//
// A full tile with aligned pointers and without flagged groups takes the fast path. Every other tile takes the careful
// path, element by element with the arithmetic of format.hpp.
//
// Longer than 400 lines: packing and restoring share the tile order, and every kernel needs an instance for each dtype,
// width and rounding.
#include "codec/cuda.hpp"
#include "codec/cuda_tiles.cuh"
#include "codec/cuda_vector.cuh"

namespace pac::cuda {
namespace {

/// `group_shift` is the logarithm of the group size; `wide` means that every pointer is aligned to 16 bytes.
struct EncodeArguments {
  const unsigned char* source;
  unsigned char* codes;
  unsigned char* parameters;
  std::int64_t numel;
  int group_shift;
  bool wide;
  bool keep_positive;
  Keys keys;
  /// Lengths in vectors of kPerLane elements, of rows apart.
  std::uint32_t row;
  std::int64_t gap;
};

struct DecodeArguments {
  const unsigned char* codes;
  const unsigned char* parameters;
  unsigned char* out;
  std::int64_t numel;
  int group_shift;
  bool wide;
};

__device__ __forceinline__ int lanes_of_group(int group_shift) { return 1 << (group_shift - 3); }

/// The place of an element in the source. Rows apart have kernels of their own: with a branch on `a.row` instead, the
/// kernels of 16-bit tensors spilled a register, and encode of 256 MiB fell from 1.01 to 0.94 of the copy's rate.
template <bool kApart>
__device__ __forceinline__ std::int64_t place(const EncodeArguments& a, std::int64_t index) {
  if constexpr (!kApart) return index;
  return index + static_cast<std::uint32_t>(index / kPerLane) / a.row * a.gap * kPerLane;
}

__device__ __forceinline__ float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Packs a partial or misaligned chunk, or a chunk with a flagged group.
template <DType kType, int kBits, bool kStochastic, bool kApart>
__device__ __noinline__ void encode_carefully(const EncodeArguments& a, std::int64_t chunk) {
  using Storage = typename Element<kType>::Storage;
  const auto* source = reinterpret_cast<const Storage*>(a.source);
  const int lane = lane_index();
  const std::int64_t first = chunk + lane * kPerLane;
  float x[kPerLane];
  Extent extent;
  // Rows apart are of whole vectors: beyond the end, repeat the last one.
  const std::int64_t vector = kApart ? place<kApart>(a, first < a.numel ? first : a.numel - kPerLane) : 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    // Beyond the end, repeat the last element, to leave the extent of the last group unchanged.
    const std::int64_t index = first + i < a.numel ? first + i : a.numel - 1;
    x[i] = Element<kType>::load(source[kApart ? vector + i : index]);
    extent.add(x[i]);
  }
  const int group_lanes = lanes_of_group(a.group_shift);
  for (int distance = 1; distance < group_lanes; distance *= 2) {
    extent.lowest = fminf(extent.lowest, __shfl_xor_sync(~0u, extent.lowest, distance));
    extent.highest = fmaxf(extent.highest, __shfl_xor_sync(~0u, extent.highest, distance));
    extent.flagged |= __shfl_xor_sync(~0u, static_cast<int>(extent.flagged), distance) != 0;
  }
  const Parameters group = parameters_of(extent, kBits);

  const std::uint32_t upper = upper_key(chunk, a.keys);
  std::uint64_t codes = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (first + i >= a.numel) break;
    const float random = kStochastic ? uniform(static_cast<std::uint32_t>(first + i), a.keys.low, upper) : 0.0f;
    std::uint32_t code = group.flagged ? flagged_code<kBits, kStochastic>(x[i], group, random)
                                       : ordinary_code<kBits, kStochastic>(x[i], group, random);
    if (a.keep_positive && code == 0 && x[i] > 0.0f && lifts_positive(group, kBits)) code = 1;
    codes |= static_cast<std::uint64_t>(code) << (i * kBits);
  }
  // Lanes past the end write the zero bytes between codes and parameters.
  unsigned char* const out = a.codes + first / kPerLane * kBits;
  if (out < a.parameters) {
    for (int i = 0; i < kBits; ++i) out[i] = static_cast<unsigned char>(codes >> (8 * i));
  }
  if ((lane & (group_lanes - 1)) == 0 && first < a.numel) {
    const std::uint32_t word = group.word();
    unsigned char* const parameters = a.parameters + (first >> a.group_shift) * 4;
    for (int i = 0; i < 4; ++i) parameters[i] = static_cast<unsigned char>(word >> (8 * i));
  }
}

/// Packs a full tile. If a group is flagged, writes nothing and returns false for the whole warp.
template <DType kType, int kBits, bool kStochastic, int kChunks, bool kApart>
__device__ __forceinline__ bool encode_tile(const EncodeArguments& a, std::int64_t tile) {
  constexpr std::int64_t kBytes = sizeof(typename Element<kType>::Storage);
  const int lane = lane_index();
  const std::int64_t first = tile + lane * kPerLane;
  Vector<kType> vectors[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) vectors[c].load(a.source + place<kApart>(a, first + c * kChunk) * kBytes);

  Extremes<kType> extremes[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    extremes[c] = vectors[c].extremes();
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) extremes[c].combine_with_lane(distance);
  }
  const int group_lanes = lanes_of_group(a.group_shift);
  if (group_lanes >= 16) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) extremes[c].combine_with_lane(8);
  }
  if (group_lanes == 32) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) extremes[c].combine_with_lane(16);
  }
  bool ordinary = true;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    ordinary &= (extremes[c].lowest() >= -kMaxFinite) & (extremes[c].highest() <= kMaxFinite);
  if (!__all_sync(~0u, ordinary)) return false;

  const int rank = lane & (group_lanes - 1);
  std::uint32_t kept = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    constexpr auto kLevels = static_cast<float>(levels(kBits));
    float minimum = extremes[c].lowest() + 0.0f;
    if constexpr (kType != DType::kBFloat16) minimum = round_down_to_bfloat16(minimum);
    const float width = divided(extremes[c].highest() - minimum, kLevels, 1.0f / kLevels);
    const float step = fmaxf(round_up_positive_to_bfloat16(width), kMinStep);
    const float reciprocal = refined_reciprocal(step, approximate_reciprocal(step));
    // Lane c of a group keeps the parameters of chunk c, to write the parameters of the tile in one store.
    const std::uint32_t word = __byte_perm(__float_as_uint(minimum), __float_as_uint(step), 0x7632);
    kept = rank == c ? word : kept;

    float x[kPerLane];
    vectors[c].expand(x);
    std::uint32_t rounded[kPerLane];
    const std::uint32_t upper = upper_key(tile, a.keys);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if constexpr (kStochastic) {
        const auto index = static_cast<std::uint32_t>(first + c * kChunk + i);
        rounded[i] = ordinary_code<kBits, true>(x[i], {minimum, step, false}, uniform(index, a.keys.low, upper));
      } else {
        rounded[i] = __float_as_uint(divided(x[i] - minimum, step, reciprocal) + kRoundingMagic);
      }
    }
    if (a.keep_positive && minimum == 0.0f) {
      constexpr std::uint32_t kZero = kStochastic ? 0u : 0x4B400000u;  // the bits of kRoundingMagic
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) rounded[i] += rounded[i] == kZero && x[i] > 0.0f ? 1u : 0u;
    }
    store_codes<kBits>(a.codes + (first + c * kChunk) / kPerLane * kBits, rounded);
  }
  if (rank < kChunks) {
    const std::int64_t group = (first + rank * kChunk) >> a.group_shift;
    __stcs(reinterpret_cast<std::uint32_t*>(a.parameters) + group, kept);
  }
  return true;
}

template <DType kType, int kBits, bool kStochastic, int kChunks, bool kApart = false>
__global__ void __launch_bounds__(kThreads) encode_kernel(const __grid_constant__ EncodeArguments a) {
  const std::int64_t tile = tile_begin<kChunks>();
  if (a.wide && tile + kChunk * kChunks <= a.numel && encode_tile<kType, kBits, kStochastic, kChunks, kApart>(a, tile))
    return;
#pragma unroll 1
  for (int c = 0; c < kChunks && tile + c * kChunk < a.numel; ++c)
    encode_carefully<kType, kBits, kStochastic, kApart>(a, tile + c * kChunk);
}

/// Restores a partial or misaligned chunk, or a chunk with a flagged group.
template <DType kType, int kBits>
__device__ __noinline__ void decode_carefully(const DecodeArguments& a, std::int64_t chunk) {
  using Storage = typename Element<kType>::Storage;
  auto* out = reinterpret_cast<Storage*>(a.out);
  const std::int64_t first = chunk + lane_index() * kPerLane;
  if (first >= a.numel) return;
  const unsigned char* const parameters = a.parameters + (first >> a.group_shift) * 4;
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<std::uint32_t>(parameters[i]) << (8 * i);
  const Parameters group = Parameters::of_word(word);
  for (int i = 0; i < kPerLane && first + i < a.numel; ++i) {
    const std::uint32_t byte = a.codes[(first + i) * kBits / 8];
    const std::uint32_t code = (byte >> (i * kBits % 8)) & static_cast<std::uint32_t>(levels(kBits));
    out[first + i] =
        Element<kType>::store(group.flagged ? flagged_value(code, group, kBits) : ordinary_value(code, group));
  }
}

/// Restores a full tile as if no group were flagged, and returns whether no group of the warp is. With a
/// check before, the loads of the codes would wait for a branch on the parameters: twice the latency.
///
/// A lane writes 16 consecutive bytes at a time, so a warp's store covers whole sectors. With eight float32 a lane,
/// each store left half of every sector to the next store, and decode ran at 0.53 of the copy's rate.
template <DType kType, int kBits, int kChunks>
__device__ __forceinline__ bool decode_tile(const DecodeArguments& a, std::int64_t tile) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(typename Element<kType>::Storage));
  constexpr int kPieces = kChunks * kPerLane / kElements;
  constexpr int kPiece = kElements * static_cast<int>(kWarp);
  const std::int64_t first = tile + lane_index() * kElements;
  Codes<kBits, kElements> codes[kPieces];
  std::uint32_t words[kPieces];
  std::uint32_t flags = 0;
  const auto* const parameters = reinterpret_cast<const std::uint32_t*>(a.parameters);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    codes[p].load(a.codes + (first + p * kPiece) * kBits / 8);
    words[p] = parameters[(first + p * kPiece) >> a.group_shift];
  }

#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    flags |= words[p];
    const float minimum = __uint_as_float(words[p] << 16);
    const float step = __uint_as_float(words[p] & 0xFFFF0000u);
    float x[kElements];
    // The product of an 8-bit code and an 8-bit step is exact, so the fused operation equals the two operations.
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = fmaf(codes[p][i], step, minimum);
    store_finite<kType>(reinterpret_cast<uint4*>(a.out) + (first + p * kPiece) / kElements, x);
  }
  return __all_sync(~0u, (flags >> 31) == 0);
}

template <DType kType, int kBits, int kChunks>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ DecodeArguments a) {
  const std::int64_t tile = tile_begin<kChunks>();
  if (a.wide && tile + kChunk * kChunks <= a.numel && decode_tile<kType, kBits, kChunks>(a, tile)) return;
  __syncwarp();  // this warp now overwrites the values that other lanes wrote for a flagged tile
#pragma unroll 1
  for (int c = 0; c < kChunks && tile + c * kChunk < a.numel; ++c) decode_carefully<kType, kBits>(a, tile + c * kChunk);
}

/// Booleans of a thread: two loads of 16 bytes, and one store of 4.
constexpr int kBooleans = 32;

/// Packs eight booleans; any nonzero byte is true.
__device__ std::uint32_t pack_booleans(std::uint32_t first, std::uint32_t second) {
  // Keep bit i of byte i; the product adds the four bytes into its top byte.
  const std::uint32_t low = (__vcmpne4(first, 0) & 0x08040201u) * 0x01010101u >> 24;
  const std::uint32_t high = (__vcmpne4(second, 0) & 0x08040201u) * 0x01010101u >> 24;
  return low | high << 4;
}

__device__ uint2 unpack_booleans(std::uint32_t packed) {
  // Copies of the four bits, seven places apart, do not overlap; keep one bit of each byte.
  return make_uint2((packed & 0xFu) * 0x00204081u & 0x01010101u, (packed >> 4 & 0xFu) * 0x00204081u & 0x01010101u);
}

__global__ void __launch_bounds__(kThreads) encode_booleans_kernel(const __grid_constant__ EncodeArguments a) {
  const std::int64_t thread = (static_cast<std::int64_t>(gridDim.x) - 1 - blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t first = thread * kBooleans;
  if (a.wide && first + kBooleans <= a.numel) {
    const auto* const source = reinterpret_cast<const uint4*>(a.source + first);
    const uint4 left = source[0];
    const uint4 right = source[1];
    *reinterpret_cast<std::uint32_t*>(a.codes + first / 8) =
        pack_booleans(left.x, left.y) | pack_booleans(left.z, left.w) << 8 | pack_booleans(right.x, right.y) << 16 |
        pack_booleans(right.z, right.w) << 24;
    return;
  }
  for (std::int64_t at = first; at < first + kBooleans && at < a.numel; at += 8) {
    std::uint32_t packed = 0;
    for (int i = 0; i < 8 && at + i < a.numel; ++i) packed |= (a.source[at + i] != 0 ? 1u : 0u) << i;
    a.codes[at / 8] = static_cast<unsigned char>(packed);
  }
}

__global__ void __launch_bounds__(kThreads) decode_booleans_kernel(const __grid_constant__ DecodeArguments a) {
  const std::int64_t thread = (static_cast<std::int64_t>(gridDim.x) - 1 - blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t first = thread * kBooleans;
  if (a.wide && first + kBooleans <= a.numel) {
    const std::uint32_t packed = *reinterpret_cast<const std::uint32_t*>(a.codes + first / 8);
    auto* const out = reinterpret_cast<uint4*>(a.out + first);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 low = unpack_booleans(packed >> 16 * half);
      const uint2 high = unpack_booleans(packed >> (16 * half + 8));
      out[half] = make_uint4(low.x, low.y, high.x, high.y);
    }
    return;
  }
  for (std::int64_t at = first; at < first + kBooleans && at < a.numel; ++at) {
    a.out[at] = static_cast<unsigned char>(a.codes[at / 8] >> at % 8 & 1);
  }
}

template <DType kType, int kBits, bool kStochastic>
KernelOf<EncodeArguments> encode_kernel_for(bool small) {
  return small ? encode_kernel<kType, kBits, kStochastic, 1> : encode_kernel<kType, kBits, kStochastic, kEncodeUnroll>;
}

template <DType kType, int kBits>
KernelOf<DecodeArguments> decode_kernel_for(bool small) {
  return small ? decode_kernel<kType, kBits, 1> : decode_kernel<kType, kBits, kDecodeUnroll>;
}

template <DType kType>
KernelOf<EncodeArguments> encode_kernel_of_rows(bool small) {
  return small ? encode_kernel<kType, 8, false, 1, true> : encode_kernel<kType, 8, false, kEncodeUnroll, true>;
}

template <DType kType>
KernelOf<EncodeArguments> encode_kernel_for(const Format& format, bool small, bool apart) {
  if (apart) return encode_kernel_of_rows<kType>(small);
  if (format.bits == 8)
    return format.stochastic ? encode_kernel_for<kType, 8, true>(small) : encode_kernel_for<kType, 8, false>(small);
  if (format.bits == 4)
    return format.stochastic ? encode_kernel_for<kType, 4, true>(small) : encode_kernel_for<kType, 4, false>(small);
  return format.stochastic ? encode_kernel_for<kType, 2, true>(small) : encode_kernel_for<kType, 2, false>(small);
}

template <DType kType>
KernelOf<DecodeArguments> decode_kernel_for(const Format& format, bool small) {
  if (format.bits == 8) return decode_kernel_for<kType, 8>(small);
  return format.bits == 4 ? decode_kernel_for<kType, 4>(small) : decode_kernel_for<kType, 2>(small);
}

KernelOf<EncodeArguments> encode_kernel_of(const Format& format, bool small, bool apart) {
  switch (format.dtype) {
    case DType::kFloat32:
      return encode_kernel_for<DType::kFloat32>(format, small, apart);
    case DType::kBFloat16:
      return encode_kernel_for<DType::kBFloat16>(format, small, apart);
    case DType::kFloat16:
      return encode_kernel_for<DType::kFloat16>(format, small, apart);
    case DType::kBool:
    case DType::kFloat64:
      break;
  }
  return encode_booleans_kernel;
}

KernelOf<DecodeArguments> decode_kernel_of(const Format& format, bool small) {
  switch (format.dtype) {
    case DType::kFloat32:
      return decode_kernel_for<DType::kFloat32>(format, small);
    case DType::kBFloat16:
      return decode_kernel_for<DType::kBFloat16>(format, small);
    case DType::kFloat16:
      return decode_kernel_for<DType::kFloat16>(format, small);
    case DType::kBool:
    case DType::kFloat64:
      break;
  }
  return decode_booleans_kernel;
}

int shift_of(int group_size) { return group_size == 64 ? 6 : (group_size == 128 ? 7 : 8); }

int elements_per_thread(const Format& format, bool small, int unroll) {
  if (format.dtype == DType::kBool) return kBooleans;
  return small ? kPerLane : kPerLane * unroll;
}

}  // namespace

cudaError_t encode(const Format& format, const void* source, Rows rows, void* out, std::int64_t numel, Keys keys,
                   cudaStream_t stream) {
  if (numel == 0) return cudaSuccess;
  const bool apart = rows.length != 0;
  const bool whole = rows.length % kPerLane == 0 && rows.gap % kPerLane == 0 && numel / kPerLane <= UINT32_MAX;
  const bool served = format.bits == 8 && !format.stochastic && format.dtype != DType::kBool;
  if (apart && !(whole && served)) return cudaErrorInvalidValue;
  const bool small = numel <= kSmall;
  auto* const codes = static_cast<unsigned char*>(out);
  const EncodeArguments arguments{static_cast<const unsigned char*>(source),
                                  codes,
                                  codes + parameters_offset(numel, format.bits),
                                  numel,
                                  shift_of(format.group_size),
                                  aligned(source) && aligned(out),
                                  format.keep_positive,
                                  keys,
                                  static_cast<std::uint32_t>(rows.length / kPerLane),
                                  rows.gap / kPerLane};
  const dim3 grid = grid_for(numel, elements_per_thread(format, small, kEncodeUnroll));
  return launch(encode_kernel_of(format, small, apart), grid, arguments, stream);
}

cudaError_t decode(const Format& format, const void* packed, void* out, std::int64_t numel, cudaStream_t stream) {
  if (numel == 0) return cudaSuccess;
  const bool small = numel <= kSmall;
  const auto* const codes = static_cast<const unsigned char*>(packed);
  const DecodeArguments arguments{codes,
                                  codes + parameters_offset(numel, format.bits),
                                  static_cast<unsigned char*>(out),
                                  numel,
                                  shift_of(format.group_size),
                                  aligned(packed) && aligned(out)};
  const dim3 grid = grid_for(numel, elements_per_thread(format, small, kDecodeUnroll));
  return launch(decode_kernel_of(format, small), grid, arguments, stream);
}

}  // namespace pac::cuda
