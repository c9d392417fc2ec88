// Compares the CUDA kernels' division (format.hpp, divided and refined_reciprocal) with true division: every
// mantissa of a step, and numerators at random, at every code's rounding boundary, and next to the midpoints of
// adjacent quotients. Prints the number of comparisons and of failures; a test builds and runs this program.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>

#include "codec/format.hpp"

namespace {

std::int64_t checked = 0;
std::int64_t failed = 0;

/// With `whole` compares the quotients, otherwise the rounded codes.
void check(float numerator, float divisor, float reciprocal, bool whole) {
  const float expected = numerator / divisor;
  const float actual = pac::divided(numerator, divisor, reciprocal);
  const bool same = whole ? actual == expected : pac::round_half_even(actual) == pac::round_half_even(expected);
  ++checked;
  if (same) return;
  if (++failed <= 10) std::fprintf(stderr, "%a / %a: got %a, expected %a\n", numerator, divisor, actual, expected);
}

void check_near(double target, float divisor, float reciprocal, float largest) {
  float numerator = static_cast<float>(target);
  for (int i = 0; i < 4; ++i) numerator = std::nextafterf(numerator, 0.0f);
  for (int i = 0; i < 9; ++i, numerator = std::nextafterf(numerator, HUGE_VALF))
    if (numerator >= 0.0f && numerator <= largest) check(numerator, divisor, reciprocal, numerator >= 0.5f * divisor);
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  // The smallest step, steps with subnormal remainders, common steps, and the largest.
  for (const int exponent : {-118, -117, -112, -100, -30, -8, -1, 0, 1, 20, 90, 118, 119}) {
    for (int mantissa = 128; mantissa < 256; ++mantissa) {
      const auto step = static_cast<float>(std::ldexp(mantissa, exponent - 7));
      // The hardware's approximation is off by one unit at most; four must not matter either.
      const float exact = 1.0f / step;
      float reciprocal = exact;
      for (int off = -4; off <= 4; ++off) {
        const float approximation = pac::float_of(pac::bits_of(exact) + static_cast<std::uint32_t>(off));
        reciprocal = pac::refined_reciprocal(step, approximation);
        ++checked;
        if (reciprocal != exact && ++failed <= 10)
          std::fprintf(stderr, "1 / %a from %a: got %a, expected %a\n", step, approximation, reciprocal, exact);
      }
      const float largest = 255.0f * step < pac::kMaxFinite * 2 ? 255.0f * step : pac::kMaxFinite * 2;
      for (int code = 0; code < 256; ++code) check_near((code + 0.5) * step, step, reciprocal, largest);
      for (int code = 0; code < 256; ++code) check_near(static_cast<double>(code) * step, step, reciprocal, largest);
      for (int i = 0; i < 1000; ++i) {
        const std::uint64_t bits = random();
        // A quotient halfway between two floats, the hardest case for rounding: 24 random bits and a half.
        const double middle =
            std::ldexp(static_cast<double>((bits >> 40) | 0x800000u) + 0.5, -24 + static_cast<int>(bits & 7) + 1);
        check_near(middle * step, step, reciprocal, largest);
        check(static_cast<float>(static_cast<double>(bits >> 11) * 0x1p-53 * largest), step, reciprocal, false);
      }
      // Subnormal numerators, far below the smallest step: the code is 0.
      for (std::uint32_t bits = 0; bits < 300; ++bits) check(pac::float_of(bits), step, reciprocal, false);
    }
  }
  for (const int bits : {8, 4, 2}) {
    const auto levels = static_cast<float>(pac::levels(bits));
    const auto stored = [](float width) {
      const float rounded = pac::round_up_positive_to_bfloat16(width);
      return rounded > pac::kMinStep ? rounded : pac::kMinStep;
    };
    const auto check_range = [&](float range) {
      const float actual = stored(pac::divided(range, levels, 1.0f / levels));
      ++checked;
      if (actual != stored(range / levels) && ++failed <= 10)
        std::fprintf(stderr, "%a / %g: got the step %a, expected %a\n", range, levels, actual, stored(range / levels));
    };
    // Any range from a subnormal number to the largest, 2^127.
    constexpr std::uint32_t kLargest = 0x7F000000u;
    for (int i = 0; i < 4000000; ++i) check_range(pac::float_of(static_cast<std::uint32_t>(random() % (kLargest + 1))));
    // Widths on both sides of every bfloat16, where the step jumps.
    for (std::uint32_t width = 0; width < 0x7F00u; ++width) {
      const std::uint32_t middle = pac::bits_of(pac::float_of(width << 16) * levels);
      for (std::uint32_t bits = middle < 4 ? 0 : middle - 4; bits <= middle + 4 && bits <= kLargest; ++bits)
        check_range(pac::float_of(bits));
    }
  }
  std::printf("%lld %lld\n", static_cast<long long>(checked), static_cast<long long>(failed));
}
