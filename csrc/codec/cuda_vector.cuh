// Operations of one lane of a warp on eight consecutive elements: load, reduce, convert, pack.
#pragma once

#include <cstdint>

#include "codec/format.hpp"

namespace pac::cuda {

/// Elements of a lane: 16 bytes of bfloat16, and kBits bytes of codes.
inline constexpr int kPerLane = 8;

/// Minimum and maximum: NaN if either operand is NaN, exact otherwise, subnormal numbers included.
template <DType kType>
__device__ __forceinline__ std::uint32_t min_nan(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  if constexpr (kType == DType::kFloat32) asm("min.NaN.f32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  if constexpr (kType == DType::kBFloat16) asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  if constexpr (kType == DType::kFloat16) asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <DType kType>
__device__ __forceinline__ std::uint32_t max_nan(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  if constexpr (kType == DType::kFloat32) asm("max.NaN.f32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  if constexpr (kType == DType::kBFloat16) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  if constexpr (kType == DType::kFloat16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <DType kType>
__device__ __forceinline__ float low_half(std::uint32_t pair) {
  if constexpr (kType == DType::kBFloat16) return __uint_as_float(pair << 16);
  float x;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(x) : "r"(pair));
  return x;
}

template <DType kType>
__device__ __forceinline__ float high_half(std::uint32_t pair) {
  if constexpr (kType == DType::kBFloat16) return __uint_as_float(pair & 0xFFFF0000u);
  float x;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(x) : "r"(pair));
  return x;
}

/// The minimum and the negated maximum of some elements; with the negation, one instruction combines both.
template <DType kType>
struct Extremes;

/// Eight elements in registers, as loaded.
template <DType kType>
struct Vector;

template <>
struct Extremes<DType::kFloat32> {
  std::uint32_t minimum;
  std::uint32_t negated_maximum;

  __device__ __forceinline__ void combine_with_lane(int distance) {
    minimum = min_nan<DType::kFloat32>(minimum, __shfl_xor_sync(~0u, minimum, distance));
    negated_maximum = min_nan<DType::kFloat32>(negated_maximum, __shfl_xor_sync(~0u, negated_maximum, distance));
  }
  __device__ __forceinline__ float lowest() const { return __uint_as_float(minimum); }
  __device__ __forceinline__ float highest() const { return -__uint_as_float(negated_maximum); }
};

template <DType kType>
struct Extremes {
  std::uint32_t pair;

  __device__ __forceinline__ void combine_with_lane(int distance) {
    pair = min_nan<kType>(pair, __shfl_xor_sync(~0u, pair, distance));
  }
  __device__ __forceinline__ float lowest() const { return low_half<kType>(pair); }
  __device__ __forceinline__ float highest() const { return -high_half<kType>(pair); }
};

template <>
struct Vector<DType::kFloat32> {
  uint4 low;
  uint4 high;

  __device__ __forceinline__ void load(const void* source) {
    low = static_cast<const uint4*>(source)[0];
    high = static_cast<const uint4*>(source)[1];
  }
  __device__ __forceinline__ Extremes<DType::kFloat32> extremes() const {
    constexpr DType kType = DType::kFloat32;
    const auto smallest = [](const uint4& v) {
      return min_nan<kType>(min_nan<kType>(v.x, v.y), min_nan<kType>(v.z, v.w));
    };
    const auto largest = [](const uint4& v) {
      return max_nan<kType>(max_nan<kType>(v.x, v.y), max_nan<kType>(v.z, v.w));
    };
    return {min_nan<kType>(smallest(low), smallest(high)), max_nan<kType>(largest(low), largest(high)) ^ 0x80000000u};
  }
  __device__ __forceinline__ void expand(float (&x)[kPerLane]) const {
    const std::uint32_t words[kPerLane] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = __uint_as_float(words[i]);
  }
};

template <DType kType>
struct Vector {
  uint4 pairs;

  __device__ __forceinline__ void load(const void* source) { pairs = *static_cast<const uint4*>(source); }
  __device__ __forceinline__ Extremes<kType> extremes() const {
    const std::uint32_t smallest = min_nan<kType>(min_nan<kType>(pairs.x, pairs.y), min_nan<kType>(pairs.z, pairs.w));
    const std::uint32_t largest =
        max_nan<kType>(max_nan<kType>(pairs.x, pairs.y), max_nan<kType>(pairs.z, pairs.w)) ^ 0x80008000u;
    return {min_nan<kType>(__byte_perm(smallest, largest, 0x5410), __byte_perm(smallest, largest, 0x7632))};
  }
  __device__ __forceinline__ void expand(float (&x)[kPerLane]) const {
    const std::uint32_t words[kPerLane / 2] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < kPerLane / 2; ++i) {
      x[2 * i] = low_half<kType>(words[i]);
      x[2 * i + 1] = high_half<kType>(words[i]);
    }
  }
};

/// Writes 16 bytes of finite values: the hardware's conversion rounds half to even, as the format does.
template <DType kType>
__device__ __forceinline__ void store_finite(uint4* out, const float (&x)[4]) {
  *out = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

template <DType kType>
__device__ __forceinline__ void store_finite(uint4* out, const float (&x)[8]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kType == DType::kBFloat16) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
      // Saturating after rounding equals saturating before it, two elements at a time.
      asm("min.f16x2 %0, %0, %1;" : "+r"(words[i]) : "r"(0x7BFF7BFFu));
      asm("max.f16x2 %0, %0, %1;" : "+r"(words[i]) : "r"(0xFBFFFBFFu));
    }
  }
  *out = make_uint4(words[0], words[1], words[2], words[3]);
}

/// Writes the codes in the low bytes of `rounded`: kBits bytes, marked for early eviction. Codes are not read before
/// backward, and the tail of the source should stay in the cache.
template <int kBits>
__device__ __forceinline__ void store_codes(void* out, const std::uint32_t (&rounded)[kPerLane]) {
  const auto bytes = [&](int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(rounded[a], rounded[b], 0x0040), __byte_perm(rounded[c], rounded[d], 0x0040),
                       0x5410);
  };
  if constexpr (kBits == 8) {
    __stcs(static_cast<uint2*>(out), make_uint2(bytes(0, 1, 2, 3), bytes(4, 5, 6, 7)));
  } else if constexpr (kBits == 4) {
    __stcs(static_cast<std::uint32_t*>(out), bytes(0, 2, 4, 6) + bytes(1, 3, 5, 7) * 16u);
  } else {
    const auto pair = [&](int a, int b) { return __byte_perm(rounded[a], rounded[b], 0x0040) & 0xFFFFu; };
    const std::uint32_t word = pair(0, 4) + pair(1, 5) * 4u + pair(2, 6) * 16u + pair(3, 7) * 64u;
    __stcs(static_cast<unsigned short*>(out), static_cast<unsigned short>(word));
  }
}

/// The unsigned integer type with kBytes bytes.
template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using Type = unsigned char;
};
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = std::uint32_t;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};

/// kCount consecutive codes, as loaded.
template <int kBits, int kCount>
struct Codes {
  static constexpr int kBytes = kBits * kCount / 8;
  std::uint32_t words[kBytes == 8 ? 2 : 1];

  __device__ __forceinline__ void load(const void* packed) {
    const auto loaded = *static_cast<const typename Word<kBytes>::Type*>(packed);
    if constexpr (kBytes == 8) {
      words[0] = loaded.x;
      words[1] = loaded.y;
    } else {
      words[0] = loaded;
    }
  }

  /// Code i as a float: the code becomes the low byte of 2^23 + code, and the subtraction of 2^23 is exact.
  __device__ __forceinline__ float operator[](int i) const {
    constexpr int kPerByte = 8 / kBits;
    const int byte = i / kPerByte;
    std::uint32_t plane = words[byte / 4];
    if constexpr (kBits != 8) plane = (plane >> (i % kPerByte * kBits)) & (0x01010101u * levels(kBits));
    return __uint_as_float(__byte_perm(plane, 0x4B000000u, 0x7440u + static_cast<unsigned>(byte % 4))) - 0x1p23f;
  }
};

}  // namespace pac::cuda
