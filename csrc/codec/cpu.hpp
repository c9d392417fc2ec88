// The codec on the CPU: raw pointers of any alignment, no torch, no global state.
#pragma once

#include <cstdint>

#include "codec/format.hpp"

namespace pac::cpu {

enum class Isa : int { kBaseline = 0, kAvx2 = 1 };

/// The best instruction set of this build on this machine.
[[nodiscard]] Isa best_isa();

/// Packs numel elements. `out` holds the codes, zero bytes up to a multiple of 16, and the parameters.
void encode(const Format& format, Isa isa, const void* source, void* out, std::int64_t numel, Keys keys, int threads);

/// Restores numel elements; the inverse of encode.
void decode(const Format& format, Isa isa, const void* packed, void* out, std::int64_t numel, int threads);

/// A range of groups for the loops of one instruction set. A "group" of what has none is 256 elements.
struct Range {
  std::int64_t numel;
  std::int64_t first_group;
  std::int64_t last_group;
  int group_size;
};

struct Loops {
  using Encode = void (*)(const Format& format, const unsigned char* source, unsigned char* out, const Range& range,
                          Keys keys);
  using Decode = void (*)(const Format& format, const unsigned char* packed, unsigned char* out, const Range& range);
  Encode encode;
  Decode decode;
};

namespace baseline {
[[nodiscard]] Loops loops_of(const Format& format);
}
namespace avx2 {
[[nodiscard]] Loops loops_of(const Format& format);
}

}  // namespace pac::cpu
