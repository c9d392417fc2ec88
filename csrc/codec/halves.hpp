// The forms between codes and the tensor as it is: the arithmetic of one element, shared by host and device.
//
// pyactcomp/codec/kernels/plain.py is the definition, in plain torch. A map packs an element of type T to `Stored` and
// restores it. Maps without transcendental functions give the definition's bits everywhere; the others are within one
// code of it: host and device compute exponentials and logarithms to a few units in the last place.
//
// Longer than 400 lines: the maps share the logarithm, the exponential and the grid.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "codec/format.hpp"

/// As PAC_FORMAT, for what only the host calls.
#define PAC_HOST inline __attribute__((always_inline))

namespace pac {

/// A dtype in memory, and the type to compute in.
template <DType kDType>
struct Number {
  static constexpr DType kType = kDType;
  using Storage = typename Element<kType>::Storage;
  using T = float;
  PAC_FORMAT static T load(Storage x) { return Element<kType>::load(x); }
  PAC_FORMAT static Storage store(T x) { return Element<kType>::store(x); }
};

template <>
struct Number<DType::kFloat64> {
  static constexpr DType kType = DType::kFloat64;
  using Storage = double;
  using T = double;
  PAC_FORMAT static T load(Storage x) { return x; }
  PAC_FORMAT static Storage store(T x) { return x; }
};

template <class T>
PAC_FORMAT bool is_nan(T x) {
  return x != x;
}

template <class T>
PAC_FORMAT T magnitude_of(T x) {
  return x < 0 ? -x : x;
}

template <class T>
PAC_FORMAT T infinity() {
  return static_cast<T>(float_of(0x7F800000u));
}

template <class T>
PAC_FORMAT T not_a_number() {
  return static_cast<T>(float_of(0x7FC00000u));
}

/// Float16 in one instruction on the device, where the integer operations of Element take twenty.
PAC_FORMAT float from_half(std::uint16_t half) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
#else
  return Element<DType::kFloat16>::load(half);
#endif
}

/// Rounds to nearest; finite numbers beyond 65504 do not occur, infinities and NaN stay.
PAC_FORMAT std::uint16_t to_half(float x) {
#if defined(__CUDA_ARCH__)
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
#else
  return Element<DType::kFloat16>::store(x);
#endif
}

/// Rounds to nearest, and saturates at 65504, infinities too; NaN stays.
PAC_FORMAT std::uint16_t to_saturated_half(float x) {
#if defined(__CUDA_ARCH__)
  float clamped;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(65504.0f));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(clamped) : "f"(-65504.0f));
  return to_half(clamped);
#else
  return is_nan(x) ? std::uint16_t{0x7E00} : Element<DType::kFloat16>::store_finite(x);
#endif
}

/// The narrower dtype of which the tensor was cast; float64 is rounded to float32 first, as torch does.
template <DType kType, DType kNarrow>
struct CastMap {
  static constexpr DType kSource = kType;
  using T = typename Number<kType>::T;
  using Stored = typename Number<kNarrow>::Storage;
  PAC_FORMAT static Stored encode(T x) { return Number<kNarrow>::store(static_cast<float>(x)); }
  PAC_FORMAT static T decode(Stored stored) { return static_cast<T>(Number<kNarrow>::load(stored)); }
};

template <DType kNarrow>
struct CastMapOf {
  template <DType kType>
  using Map = CastMap<kType, kNarrow>;
};

template <DType kType>
struct BFloat16Map {
  static constexpr DType kSource = kType;
  using T = typename Number<kType>::T;
  using Stored = std::uint16_t;
  PAC_FORMAT static Stored encode(T x) {
    const Stored rounded = Element<DType::kBFloat16>::store(static_cast<float>(x));
    // Infinity's bits less one are the largest finite number, for either sign.
    const bool overflowed = (rounded & 0x7FFFu) == 0x7F80u && magnitude_of(x) != infinity<T>();
    return static_cast<Stored>(rounded - (overflowed ? 1 : 0));
  }
  PAC_FORMAT static T decode(Stored stored) { return static_cast<T>(Element<DType::kBFloat16>::load(stored)); }
};

template <DType kType>
struct Float16Map {
  static constexpr DType kSource = kType;
  using T = typename Number<kType>::T;
  using Stored = std::uint16_t;
  PAC_FORMAT static Stored encode(T x) { return to_saturated_half(static_cast<float>(x)); }
  PAC_FORMAT static T decode(Stored stored) { return static_cast<T>(from_half(stored)); }
};

/// Exponentials and logarithms: of double the library's. Those of float are right to 2^-21 of the result or better,
/// where the finest step of a logit is 2^-10.6: one or two instructions on the device, and on the host without branches
/// and calls, so that the compiler vectorises the loops.
namespace math {

PAC_FORMAT double natural_log(double x) { return ::log(x); }
PAC_FORMAT double ratio(double a, double b) { return a / b; }
PAC_FORMAT double exponential(double x) { return ::exp(x); }
PAC_FORMAT double log_of_one_plus(double x) { return ::log1p(x); }
PAC_FORMAT double one_less_exponential(double x) { return -::expm1(x); }
PAC_FORMAT double artanh(double x) { return ::atanh(x); }
PAC_FORMAT double tanh_of(double x) { return ::tanh(x); }

/// a * b + c, rounded once where the hardware has an instruction for it at no cost.
PAC_FORMAT float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

/// artanh(x) by its series, for x of less than 0.34: the next term is below 2^-18 of it, of 0.25 2^-23.
PAC_FORMAT float artanh_series(float x) {
  const float w = x * x;
  return x * fused(w, fused(w, fused(w, fused(w, 1.0f / 9, 1.0f / 7), 1.0f / 5), 1.0f / 3), 1.0f);
}

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float natural_log(float x) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result * 0x1.62E43p-1f;
}

/// a / b for b of zero, or from 2^-25 to 3.
__device__ __forceinline__ float ratio(float a, float b) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
  return a * reciprocal;
}

__device__ __forceinline__ float exponential(float x) {
  float result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(x * 0x1.715476p+0f));
  return result;
}

/// log(1 + x) for x from 0 to 1; 1 + x would round.
__device__ __forceinline__ float log_of_one_plus(float x) { return 2.0f * artanh_series(ratio(x, 2.0f + x)); }
#else
PAC_FORMAT float ratio(float a, float b) { return a / b; }

PAC_FORMAT float natural_log(float x) {
  // A subnormal number times 2^23 is normal, and the products of others are not read.
  const bool subnormal = x < 0x1p-126f;
  const std::uint32_t bits = bits_of(subnormal ? x * 0x1p23f : x);
  // x = 2^exponent m with m from the root of a half to that of two.
  const std::int32_t exponent = static_cast<std::int32_t>(bits - 0x3F3504F3u) >> 23;
  const float m = float_of(bits - (static_cast<std::uint32_t>(exponent) << 23));
  const auto binade = static_cast<float>(exponent - (subnormal ? 23 : 0));
  const float finite = binade * 0x1.62E43p-1f + 2.0f * artanh_series((m - 1.0f) / (m + 1.0f));
  const float positive = x == infinity<float>() ? x : finite;
  return x > 0 ? positive : (x == 0 ? -infinity<float>() : not_a_number<float>());
}

/// exp(x) for x of at most 0.
PAC_FORMAT float exponential(float x) {
  const float y = x < -104.0f ? -104.0f : x;
  const float shifted = y * 0x1.715476p+0f + kRoundingMagic;
  const float whole = shifted - kRoundingMagic;
  const float r = (y - whole * 0x1.63p-1f) + whole * 0x1.BD0106p-13f;
  const float series =
      1.0f + r * (1.0f + r * (1.0f / 2 + r * (1.0f / 6 + r * (1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720))))));
  // In two steps: the power of two may be subnormal.
  const std::int32_t n = static_cast<std::int32_t>(bits_of(shifted)) - 0x4B400000;
  const std::int32_t half = n >> 1;
  return series * float_of(static_cast<std::uint32_t>(half + 127) << 23) *
         float_of(static_cast<std::uint32_t>(n - half + 127) << 23);
}

/// log(1 + x) for x from 0 to 1: the quotient corrects for the rounding of 1 + x.
PAC_FORMAT float log_of_one_plus(float x) {
  const float u = 1.0f + x;
  const float corrected = natural_log(u) * (x / (u - 1.0f));
  return u == 1.0f ? x : corrected;
}
#endif

/// 1 - exp(x) for x of at most 0: by its series where the difference would cancel; the next term is below 2^-26 of it.
PAC_FORMAT float one_less_exponential(float x) {
  const float series = -x * fused(x, fused(x, fused(x, 1.0f / 24, 1.0f / 6), 0.5f), 1.0f);
  const float difference = 1.0f - exponential(x);
  return x > -0.03125f ? series : difference;
}

/// Half the logarithm of (1 + x) / (1 - x). CUDA's own takes 90 instructions, longer than the memory does.
PAC_FORMAT float artanh(float x) {
  const float y = magnitude_of(x);
  const float half = 0.5f * natural_log(ratio(1.0f + y, 1.0f - y));
  return y < 0.25f ? artanh_series(x) : (x < 0 ? -half : half);
}

PAC_FORMAT float tanh_of(float x) {
  const float t = one_less_exponential(-2.0f * magnitude_of(x));
  const float y = ratio(t, 2.0f - t);
  return x < 0 ? -y : y;
}

}  // namespace math

/// The grid of logits; codec/probability.py has its reasons.
namespace grid {

inline constexpr double kLowest = -88.0;
inline constexpr double kMiddle = -16.0;
inline constexpr double kCoarse = (kMiddle - kLowest) / 16384;
inline constexpr double kFine = -kMiddle / 23830;
inline constexpr int kZero = 0;
inline constexpr int kSplit = 16385;
inline constexpr int kOne = 65534;
inline constexpr int kNan = 65535;
inline constexpr int kBias = 32768;
inline constexpr double kNearestToOne = 0x1p-25;
inline constexpr double kLogOfZero = -128.0;

template <class T>
PAC_FORMAT std::int16_t code_of(T logit) {
  const T fine = (logit - T(kMiddle)) * T(1 / kFine) + T(kSplit + 0.5);
  const T coarse = (logit - T(kLowest)) * T(1 / kCoarse) + T(1.5);
  const T place = logit < T(kMiddle) ? coarse : fine;
  // In this order a NaN becomes the largest, and is replaced.
  const T clamped = place < T(kOne + 0.5) ? (place > T(kZero) ? place : T(kZero)) : T(kOne + 0.5);
  return static_cast<std::int16_t>((is_nan(logit) ? kNan : static_cast<int>(clamped)) - kBias);
}

template <class T>
PAC_FORMAT T logit_of(int code) {
  return code < kSplit ? T(code - 1) * T(kCoarse) + T(kLowest) : T(code - kSplit) * T(kFine) + T(kMiddle);
}

}  // namespace grid

template <DType kType>
struct ProbabilityMap {
  static constexpr DType kSource = kType;
  using T = typename Number<kType>::T;
  using Stored = std::int16_t;
  PAC_FORMAT static Stored encode(T p) {
    const T rest = 1 - p;
    // Take the logarithm of one quotient: a second logarithm would take longer than the reads and writes.
    return grid::code_of(
        math::natural_log(math::ratio(p, rest < T(grid::kNearestToOne) ? T(grid::kNearestToOne) : rest)));
  }
  PAC_FORMAT static T decode(Stored stored) {
    const int code = stored + grid::kBias;
    const T logit = grid::logit_of<T>(code);
    const T small = math::exponential(-magnitude_of(logit));
    const T p = math::ratio(logit < 0 ? small : T(1), 1 + small);
    const T end = code == grid::kZero ? T(0) : (code == grid::kOne ? T(1) : p);
    return code == grid::kNan ? not_a_number<T>() : end;
  }
};

template <DType kType>
struct LogProbabilityMap {
  static constexpr DType kSource = kType;
  using T = typename Number<kType>::T;
  using Stored = std::int16_t;
  PAC_FORMAT static Stored encode(T x) {
    const T log = x > 0 ? T(0) : x;
    const T rest = math::one_less_exponential(log);
    return grid::code_of(log - math::natural_log(rest < T(grid::kNearestToOne) ? T(grid::kNearestToOne) : rest));
  }
  PAC_FORMAT static T decode(Stored stored) {
    const int code = stored + grid::kBias;
    const T logit = grid::logit_of<T>(code);
    const T x = (logit < 0 ? logit : T(0)) - math::log_of_one_plus(math::exponential(-magnitude_of(logit)));
    const T end = code == grid::kZero ? T(grid::kLogOfZero) : (code == grid::kOne ? T(0) : x);
    return code == grid::kNan ? not_a_number<T>() : end;
  }
};

/// Relative precision for the distance from plus and minus one.
template <DType kType>
struct ArtanhMap {
  static constexpr DType kSource = kType;
  using T = typename Number<kType>::T;
  using Stored = std::uint16_t;
  PAC_FORMAT static Stored encode(T x) { return to_half(static_cast<float>(math::artanh(x))); }
  PAC_FORMAT static T decode(Stored stored) { return math::tanh_of(static_cast<T>(from_half(stored))); }
};

/// Float16 times a power of two for each part of 256 consecutive elements, chosen so that the largest magnitude of the
/// part lies in [2^14, 2^15); the exponents follow the elements, an int16 each. A NaN or an infinity makes the
/// power of its part one: the part's other elements come back, saturated at 65504.
///
/// A power for the whole tensor would take a second pass over it.
inline constexpr int kPart = 256;

template <DType kType>
struct Scaled {
  static constexpr DType kSource = kType;
  using T = typename Number<kType>::T;
  using Stored = std::uint16_t;

  /// The high word of a magnitude: the largest one tells the exponent, and whether some element is no number.
  PAC_FORMAT static std::uint32_t key(float x) { return bits_of(x) & 0x7FFFFFFFu; }
  PAC_FORMAT static std::uint32_t key(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<std::uint32_t>(bits >> 32) & 0x7FFFFFFFu;
  }

  /// The exponent of the power of two. Float32 has powers from 2^-126 to 2^127, and inverses of the first 126.
  PAC_FORMAT static int exponent(std::uint32_t largest_key) {
    constexpr bool kDouble = sizeof(T) == 8;
    constexpr int kLargest = 126;
    if (largest_key >= (kDouble ? 0x7FF00000u : 0x7F800000u)) return 0;
    const int binade = kDouble ? static_cast<int>(largest_key >> 20) - 1022 : static_cast<int>(largest_key >> 23) - 126;
    const int wanted = 15 - binade;
    return wanted > kLargest ? kLargest : (wanted < -kLargest ? -kLargest : wanted);
  }

  PAC_FORMAT static T power(int exponent) {
    return static_cast<T>(float_of(static_cast<std::uint32_t>(exponent + 127) << 23));
  }
  PAC_FORMAT static Stored encode(T x, T scale) {
    const Stored finite = to_saturated_half(static_cast<float>(x * scale));
    // The largest finite number's bits plus one are infinity, for either sign.
    return static_cast<Stored>(finite + (magnitude_of(x) == infinity<T>() ? 1 : 0));
  }
  PAC_FORMAT static T decode(Stored stored, T inverse) { return static_cast<T>(from_half(stored)) * inverse; }
};

/// Where the answer to a comparison is yes: from `low` to `high`, and where x is NaN if `nan`.
template <class T>
struct Interval {
  T low;
  T high;
  bool nan;

  PAC_FORMAT bool holds(T x) const { return ((x >= low) & (x <= high)) | (is_nan(x) & nan); }
};

/// The next number above, NaN (which no number reaches) above infinity.
template <class T>
PAC_HOST T after(T bound) {
  return bound == infinity<T>() ? not_a_number<T>() : std::nextafter(bound, infinity<T>());
}

template <class T>
PAC_HOST Interval<T> interval_of(const Comparison& comparison) {
  const T all = infinity<T>();
  const T low = static_cast<T>(comparison.low);
  const T high = static_cast<T>(comparison.high);
  const T above = after(low);
  const T below = -after(-high);
  switch (comparison.relation) {
    case Relation::kAbove:
      return {above, all, false};
    case Relation::kBelow:
      return {-all, below, false};
    case Relation::kNotBelow:
      return {is_nan(low) ? -all : above, all, true};
    case Relation::kBetween:
      return {above, below, false};
    case Relation::kWithin:
      return {low, high, false};
    case Relation::kNotOutside:
      break;
  }
  return {is_nan(low) ? -all : above, is_nan(high) ? all : below, true};
}

template <template <DType> class Map, class Visit>
PAC_HOST auto with_width(DType dtype, const Visit& visit) {
  return dtype == DType::kFloat64 ? visit(Map<DType::kFloat64>{}) : visit(Map<DType::kFloat32>{});
}

/// Calls `visit` with the map of a format: of each encoding from kCast to kArtanh.
template <class Visit>
PAC_HOST auto with_map(const Format& format, const Visit& visit) {
  switch (format.encoding) {
    case Encoding::kBFloat16:
      return with_width<BFloat16Map>(format.dtype, visit);
    case Encoding::kFloat16:
      return with_width<Float16Map>(format.dtype, visit);
    case Encoding::kProbability:
      return with_width<ProbabilityMap>(format.dtype, visit);
    case Encoding::kLogProbability:
      return with_width<LogProbabilityMap>(format.dtype, visit);
    case Encoding::kArtanh:
      return with_width<ArtanhMap>(format.dtype, visit);
    default:
      break;
  }
  switch (format.narrow) {
    case DType::kBFloat16:
      return with_width<CastMapOf<DType::kBFloat16>::Map>(format.dtype, visit);
    case DType::kFloat16:
      return with_width<CastMapOf<DType::kFloat16>::Map>(format.dtype, visit);
    default:
      return visit(CastMap<DType::kFloat64, DType::kFloat32>{});
  }
}

/// Calls `visit` with the dtype of a float, as a constant.
template <class Visit>
PAC_HOST auto with_dtype(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(Number<DType::kBFloat16>{});
    case DType::kFloat16:
      return visit(Number<DType::kFloat16>{});
    case DType::kFloat64:
      return visit(Number<DType::kFloat64>{});
    default:
      return visit(Number<DType::kFloat32>{});
  }
}

}  // namespace pac
