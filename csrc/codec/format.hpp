// The packed format: its layout, and the arithmetic of one group and one element.
//
// pyactcomp/codec/reference.py is the definition. Host and device share these functions, so C++ can differ from the
// definition only here. All arithmetic is IEEE float32, one rounding for each operation: compile without contraction
// and without flushing of subnormal numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Always inlined on the host: this header is compiled with and without AVX2, and for a shared out-of-line copy the
// linker could pick AVX2 instructions on a machine without AVX2.
#if defined(__CUDACC__)
#define PAC_FORMAT __host__ __device__ __forceinline__
#else
#define PAC_FORMAT inline __attribute__((always_inline))
#endif

namespace pac {

enum class DType : std::int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kBool = 3, kFloat64 = 4 };

/// How the elements of a stored tensor lie in memory, and the dtypes of the tensors that it serves.
enum class Encoding : std::int32_t {
  kCodes,           ///< codes of 8, 4 or 2 bits and the parameters of groups: kFloat32, kBFloat16, kFloat16
  kBooleans,        ///< one bit an element: kBool
  kComparison,      ///< one bit an element, the answer to a comparison: every dtype of floats
  kCast,            ///< the dtype `narrow`, which holds every value of the tensor: kFloat32, kFloat64
  kBFloat16,        ///< bfloat16; a finite value stays finite: kFloat32, kFloat64
  kFloat16,         ///< float16, saturating: kFloat32, kFloat64
  kProbability,     ///< 16-bit logit of a probability: kFloat32, kFloat64
  kLogProbability,  ///< 16-bit logit of the exponential: kFloat32, kFloat64
  kArtanh,          ///< float16 of the inverse hyperbolic tangent: kFloat32, kFloat64
  kScaled,          ///< float16 times a power of two: kFloat32, kFloat64
};

/// What a comparison asks of x. The relations differ where x is NaN.
enum class Relation : std::int32_t {
  kAbove,       ///< x > low
  kBelow,       ///< x < high
  kNotBelow,    ///< not x <= low
  kBetween,     ///< low < x < high
  kWithin,      ///< low <= x <= high
  kNotOutside,  ///< not (x <= low or x >= high)
};

/// A relation, and the values to restore where the answer is yes and where it is no. The bounds are rounded to float32
/// for tensors of 32 bits and fewer.
struct Comparison {
  Relation relation = Relation::kAbove;
  double low = 0;
  double high = 0;
  double yes = 0;
  double no = 0;
};

/// One stored form of tensors of one dtype. Fields that the encoding does not name are ignored.
struct Format {
  Encoding encoding = Encoding::kCodes;
  DType dtype = DType::kFloat32;   ///< of the tensor that is packed and restored
  std::int32_t bits = 8;           ///< kCodes: 8, 4 or 2
  std::int32_t group_size = 64;    ///< kCodes: 64, 128 or 256
  bool stochastic = false;         ///< kCodes, packing alone
  bool keep_positive = false;      ///< kCodes, packing alone
  DType narrow = DType::kFloat32;  ///< kCast: kBFloat16, kFloat16; of kFloat64 also kFloat32
  Comparison comparison = {};      ///< kComparison
};

/// The two halves of the generator's 64-bit key.
struct Keys {
  std::uint32_t low;
  std::uint32_t high;
};

inline constexpr float kMinStep = 0x1p-118f;
inline constexpr float kMaxFinite = 0x1p126f;
inline constexpr int kAlignment = 16;

PAC_FORMAT constexpr int levels(int bits) { return (1 << bits) - 1; }
PAC_FORMAT constexpr int flagged_levels(int bits) { return (1 << bits) - 4; }

PAC_FORMAT constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

PAC_FORMAT constexpr std::int64_t parameters_offset(std::int64_t numel, int bits) {
  return ceil_div(ceil_div(numel * bits, 8), kAlignment) * kAlignment;
}

PAC_FORMAT std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

PAC_FORMAT float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

PAC_FORMAT float round_down_to_bfloat16(float x) {
  const std::uint32_t bits = bits_of(x);
  return float_of((bits + ((bits >> 31) * 0xFFFFu)) & 0xFFFF0000u);
}

PAC_FORMAT float round_up_positive_to_bfloat16(float x) { return float_of((bits_of(x) + 0xFFFFu) & 0xFFFF0000u); }

/// Chris Wellons' hash lowbias32 with TheIronBorn's constants (hash-prospector, #19).
PAC_FORMAT std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x21F0AAADu;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 15);
}

/// The part of the generator's input shared by 2^32 consecutive elements.
PAC_FORMAT std::uint32_t upper_key(std::int64_t index, Keys keys) {
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(index) >> 32) * 0x9E3779B9u + keys.high;
}

/// A multiple of 2^-24 in [0, 1), given the low half of the element's index.
PAC_FORMAT float uniform(std::uint32_t index, std::uint32_t key, std::uint32_t upper) {
  // Through int32: the conversion from unsigned is slow on machines with a native signed conversion only.
  return static_cast<float>(static_cast<std::int32_t>(mix(mix(index ^ key) ^ upper) >> 8)) * 0x1p-24f;
}

PAC_FORMAT float saturate(float x) { return x < -kMaxFinite ? -kMaxFinite : (x > kMaxFinite ? kMaxFinite : x); }

/// The range of a group's finite values, saturated, and whether the group needs the flag.
struct Extent {
  float lowest = float_of(0x7F800000u);
  float highest = float_of(0xFF800000u);
  bool flagged = false;

  PAC_FORMAT void add(float x) {
    const float magnitude = float_of(bits_of(x) & 0x7FFFFFFFu);
    if (!(magnitude <= kMaxFinite)) flagged = true;
    if (!(magnitude < float_of(0x7F800000u))) return;
    const float clamped = saturate(x);
    if (clamped < lowest) lowest = clamped;
    if (clamped > highest) highest = clamped;
  }
};

/// A group's minimum and step, as stored.
struct Parameters {
  float minimum;
  float step;
  bool flagged;

  /// bfloat16 each: the minimum in the low half, the step in the high half with the flag as the sign bit.
  PAC_FORMAT std::uint32_t word() const {
    return (bits_of(minimum) >> 16) | bits_of(step) | (flagged ? 0x80000000u : 0u);
  }

  PAC_FORMAT static Parameters of_word(std::uint32_t word) {
    return {float_of(word << 16), float_of(word & 0x7FFF0000u), (word >> 31) != 0};
  }
};

PAC_FORMAT Parameters parameters_of(const Extent& extent, int bits) {
  if (extent.lowest > extent.highest) return {0.0f, 0.0f, extent.flagged};
  const int largest = extent.flagged ? (bits == 2 ? 1 : flagged_levels(bits)) : levels(bits);
  const float minimum = round_down_to_bfloat16(extent.lowest + 0.0f);
  const float step = round_up_positive_to_bfloat16((extent.highest - minimum) / static_cast<float>(largest));
  return {minimum, step > kMinStep ? step : kMinStep, extent.flagged};
}

/// The correctly rounded reciprocal of a step, from an approximation off by a few units in the last place.
///
/// One step of Newton's method leaves a relative error below 2^-40 before the rounding. The reciprocal of a divisor
/// with 8 significant bits stays at least 2^-33 away from any midpoint of two floats (the distance times the divisor is
/// a nonzero integer in units of the last places), so the result rounds as 1 / step does.
PAC_FORMAT float refined_reciprocal(float step, float approximation) {
  return fmaf(approximation, fmaf(-step, approximation, 1.0f), approximation);
}

/// numerator / divisor, correctly rounded for quotients of 0.5 or more, given the correctly rounded reciprocal of a
/// divisor of 8 significant bits, at least 2^-118: two fused operations instead of a division of a dozen instructions.
///
/// The first quotient is off by less than 2^-22. The remainder is exact: for a quotient of 0.5 or more no bit is below
/// 2^-149 (hence the smallest step). The correction is off by less than 2^-46, while the true quotient stays 2^-33 away
/// from any midpoint, as above. For a quotient below 0.5 the remainder may be rounded, by 2^-32 of the quotient's unit
/// at most: the quotient stays at or below 0.5, and the code is 0. For the division of a range by the levels, the same
/// holds for every quotient not replaced by the smallest step. csrc/codec/division_check.cpp compares both with true
/// division.
PAC_FORMAT float divided(float numerator, float divisor, float reciprocal) {
  const float quotient = numerator * reciprocal;
  return fmaf(fmaf(-quotient, divisor, numerator), reciprocal, quotient);
}

/// Adding this constant rounds a number in [0, 2^22) half to even and leaves the integer in the low bits.
inline constexpr float kRoundingMagic = 12582912.0f;

PAC_FORMAT std::uint32_t round_half_even(float quotient) { return bits_of(quotient + kRoundingMagic) & 0x3FFFFFu; }

PAC_FORMAT std::uint32_t round_stochastically(float quotient, float uniform_number) {
  const auto whole = static_cast<std::int32_t>(quotient);
  return static_cast<std::uint32_t>(whole + (uniform_number < quotient - static_cast<float>(whole) ? 1 : 0));
}

/// The code of an element of an ordinary group; only stochastic rounding uses `uniform_number`.
template <int kBits, bool kStochastic>
PAC_FORMAT std::uint32_t ordinary_code(float x, const Parameters& group, float uniform_number) {
  const float quotient = (x - group.minimum) / group.step;
  // Half to even cannot exceed the largest code: step >= rounded(range / levels), so the quotient is at most
  // levels * (1 + 2^-22). Stochastic rounding can: any fraction above `levels` is enough.
  if constexpr (kStochastic) {
    constexpr auto kLargest = static_cast<std::uint32_t>(levels(kBits));
    const std::uint32_t code = round_stochastically(quotient, uniform_number);
    return code < kLargest ? code : kLargest;
  } else {
    return round_half_even(quotient);
  }
}

/// The code of an element of a flagged group.
template <int kBits, bool kStochastic>
PAC_FORMAT std::uint32_t flagged_code(float x, const Parameters& group, float uniform_number) {
  constexpr auto kLargest = static_cast<std::uint32_t>(flagged_levels(kBits));
  if (x != x) return kLargest + 3;
  if (bits_of(x) == 0x7F800000u) return kLargest + 2;
  if (bits_of(x) == 0xFF800000u) return kLargest + 1;
  if constexpr (kLargest == 0) {
    return 0;
  } else {
    const float quotient = (saturate(x) - group.minimum) / group.step;
    const std::uint32_t code = kStochastic ? round_stochastically(quotient, uniform_number) : round_half_even(quotient);
    return code < kLargest ? code : kLargest;
  }
}

/// Whether keep_positive applies to a group: the minimum is zero, and finite values have a code above 0.
PAC_FORMAT bool lifts_positive(const Parameters& group, int bits) {
  return group.minimum == 0.0f && !(group.flagged && flagged_levels(bits) == 0);
}

PAC_FORMAT float ordinary_value(std::uint32_t code, const Parameters& group) {
  return static_cast<float>(static_cast<std::int32_t>(code)) * group.step + group.minimum;
}

/// A NaN is restored as the canonical quiet NaN.
PAC_FORMAT float flagged_value(std::uint32_t code, const Parameters& group, int bits) {
  const auto largest = static_cast<std::uint32_t>(flagged_levels(bits));
  if (code == largest + 1) return float_of(0xFF800000u);
  if (code == largest + 2) return float_of(0x7F800000u);
  if (code == largest + 3) return float_of(0x7FC00000u);
  return ordinary_value(code, group);
}

/// The type of an element in memory and the conversions, on integer bits for the same result on every machine.
template <DType>
struct Element;

template <>
struct Element<DType::kFloat32> {
  using Storage = float;
  PAC_FORMAT static float load(Storage x) { return x; }
  PAC_FORMAT static Storage store_finite(float x) { return x; }
  PAC_FORMAT static Storage store(float x) { return x; }
};

template <>
struct Element<DType::kBFloat16> {
  using Storage = std::uint16_t;
  PAC_FORMAT static float load(Storage x) { return float_of(static_cast<std::uint32_t>(x) << 16); }
  /// Half to even; also correct for infinities.
  PAC_FORMAT static Storage store_finite(float x) {
    const std::uint32_t bits = bits_of(x);
    return static_cast<Storage>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
  PAC_FORMAT static Storage store(float x) { return x != x ? Storage{0x7FC0} : store_finite(x); }
};

template <>
struct Element<DType::kFloat16> {
  using Storage = std::uint16_t;
  PAC_FORMAT static float load(Storage x) {
    const auto sign = static_cast<std::uint32_t>(x & 0x8000u) << 16;
    const auto magnitude = static_cast<std::uint32_t>(x & 0x7FFFu) << 13;
    // An exact product rebases the exponent and normalises subnormal numbers.
    const std::uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    return float_of(sign | (magnitude < (0x7C00u << 13) ? finite : magnitude | 0x7F800000u));
  }
  /// Half to even, saturating at the largest finite number.
  PAC_FORMAT static Storage store_finite(float x) {
    const std::uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
    const float magnitude = float_of(bits_of(x) & 0x7FFFFFFFu);
    const float clamped = magnitude < 65504.0f ? magnitude : 65504.0f;
    const std::uint32_t bits = bits_of(clamped);
    const std::uint32_t normal = (bits + 0xFFFu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;
    // The units of 0.5f's last place are float16's subnormal numbers.
    const std::uint32_t subnormal = bits_of(clamped + 0.5f) - bits_of(0.5f);
    return static_cast<Storage>(sign | (clamped < 0x1p-14f ? subnormal : normal));
  }
  PAC_FORMAT static Storage store(float x) {
    if (x != x) return Storage{0x7E00};
    if ((bits_of(x) & 0x7FFFFFFFu) == 0x7F800000u) return static_cast<Storage>((bits_of(x) >> 16 & 0x8000u) | 0x7C00u);
    return store_finite(x);
  }
};

}  // namespace pac
