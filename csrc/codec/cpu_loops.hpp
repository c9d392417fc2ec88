// The CPU loops over groups, written for the compiler's vectoriser: expand a group to float32 on the stack, reduce, and
// map, each in a loop without branches. One file for each instruction set includes this header and defines PAC_ISA as
// the namespace; no function here may have linkage shared by the instruction sets.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec/cpu.hpp"
#include "codec/format.hpp"
#include "codec/halves.hpp"

namespace pac::cpu::PAC_ISA {
namespace {

constexpr int kMaxGroup = 256;

/// Maps float32 to int32 in the same order, with -0.0 below 0.0 and every NaN beyond an infinity. The compiler may
/// reassociate integer minima, and so vectorises the reduction; floating-point minima may not be reassociated.
PAC_FORMAT std::int32_t ordered(std::uint32_t bits) {
  const auto value = static_cast<std::int32_t>(bits);
  return value ^ ((value >> 31) & 0x7FFFFFFF);
}

PAC_FORMAT float from_ordered(std::int32_t key) {
  return float_of(static_cast<std::uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}

template <DType kType>
PAC_FORMAT void expand(const unsigned char* source, int count, typename Number<kType>::T* x) {
  typename Number<kType>::Storage element;
  for (int i = 0; i < count; ++i) {
    std::memcpy(&element, source + static_cast<std::size_t>(i) * sizeof element, sizeof element);
    x[i] = Number<kType>::load(element);
  }
}

PAC_FORMAT Parameters reduce(const float* x, int count, int bits) {
  std::int32_t lowest = ordered(bits_of(x[0]));
  std::int32_t highest = lowest;
  for (int i = 0; i < count; ++i) {
    const std::int32_t key = ordered(bits_of(x[i]));
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
  }
  Extent extent;
  if (lowest >= ordered(bits_of(-kMaxFinite)) && highest <= ordered(bits_of(kMaxFinite))) {
    extent.lowest = from_ordered(lowest);
    extent.highest = from_ordered(highest);
  } else {
    for (int i = 0; i < count; ++i) extent.add(x[i]);
  }
  return parameters_of(extent, bits);
}

template <int kBits>
PAC_FORMAT void pack_codes(const std::uint8_t* codes, int count, unsigned char* out) {
  constexpr int kPerByte = 8 / kBits;
  const int bytes = (count + kPerByte - 1) / kPerByte;
  for (int i = 0; i < bytes; ++i) {
    unsigned byte = 0;
    for (int j = 0; j < kPerByte; ++j) byte |= static_cast<unsigned>(codes[i * kPerByte + j]) << (j * kBits);
    out[i] = static_cast<unsigned char>(byte);
  }
}

template <int kBits>
PAC_FORMAT void unpack_codes(const unsigned char* packed, int count, std::uint8_t* codes) {
  constexpr int kPerByte = 8 / kBits;
  const int bytes = (count + kPerByte - 1) / kPerByte;
  for (int i = 0; i < bytes; ++i)
    for (int j = 0; j < kPerByte; ++j)
      codes[i * kPerByte + j] = static_cast<std::uint8_t>((packed[i] >> (j * kBits)) & ((1 << kBits) - 1));
}

template <DType kType, int kBits, bool kStochastic>
void encode_groups(const Format& format, const unsigned char* source, unsigned char* out, const Range& range,
                   Keys keys) {
  constexpr std::int64_t kElementBytes = sizeof(typename Element<kType>::Storage);
  unsigned char* const parameters = out + parameters_offset(range.numel, kBits);
  float x[kMaxGroup];
  // Zero beyond a partial last group: the last byte of codes is written whole.
  alignas(32) std::uint8_t codes[kMaxGroup] = {};
  for (std::int64_t group = range.first_group; group < range.last_group; ++group) {
    const std::int64_t first = group * range.group_size;
    const std::int64_t left = range.numel - first;
    const int count = left < range.group_size ? static_cast<int>(left) : range.group_size;
    expand<kType>(source + first * kElementBytes, count, x);
    const Parameters stored = reduce(x, count, kBits);
    const std::uint32_t word = stored.word();
    std::memcpy(parameters + group * 4, &word, sizeof word);

    const auto index = static_cast<std::uint32_t>(first);
    const std::uint32_t upper = upper_key(first, keys);
    const auto random = [&](int i) {
      return kStochastic ? uniform(index + static_cast<std::uint32_t>(i), keys.low, upper) : 0.0f;
    };
    if (count < kMaxGroup) std::memset(codes + count, 0, 4);
    if (stored.flagged) {
      for (int i = 0; i < count; ++i)
        codes[i] = static_cast<std::uint8_t>(flagged_code<kBits, kStochastic>(x[i], stored, random(i)));
    } else {
      for (int i = 0; i < count; ++i)
        codes[i] = static_cast<std::uint8_t>(ordinary_code<kBits, kStochastic>(x[i], stored, random(i)));
    }
    if (format.keep_positive && lifts_positive(stored, kBits)) {
      for (int i = 0; i < count; ++i) codes[i] = static_cast<std::uint8_t>(codes[i] | (codes[i] == 0 && x[i] > 0.0f));
    }
    pack_codes<kBits>(codes, count, out + first * kBits / 8);
  }
}

template <DType kType, int kBits>
void decode_groups(const Format&, const unsigned char* packed, unsigned char* out, const Range& range) {
  using Storage = typename Element<kType>::Storage;
  const unsigned char* const parameters = packed + parameters_offset(range.numel, kBits);
  alignas(32) std::uint8_t codes[kMaxGroup];
  Storage restored[kMaxGroup];
  for (std::int64_t group = range.first_group; group < range.last_group; ++group) {
    const std::int64_t first = group * range.group_size;
    const std::int64_t left = range.numel - first;
    const int count = left < range.group_size ? static_cast<int>(left) : range.group_size;
    std::uint32_t word;
    std::memcpy(&word, parameters + group * 4, sizeof word);
    const Parameters stored = Parameters::of_word(word);
    unpack_codes<kBits>(packed + first * kBits / 8, count, codes);
    if (stored.flagged) {
      for (int i = 0; i < count; ++i) restored[i] = Element<kType>::store(flagged_value(codes[i], stored, kBits));
    } else {
      for (int i = 0; i < count; ++i) restored[i] = Element<kType>::store_finite(ordinary_value(codes[i], stored));
    }
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(Storage);
    std::memcpy(out + first * static_cast<std::int64_t>(sizeof(Storage)), restored, bytes);
  }
}

/// The element past the last one of a range.
PAC_FORMAT std::int64_t end_of(const Range& range) {
  const std::int64_t end = range.last_group * range.group_size;
  return end < range.numel ? end : range.numel;
}

void encode_booleans(const Format&, const unsigned char* source, unsigned char* out, const Range& range, Keys) {
  const std::int64_t end = end_of(range);
  std::uint8_t codes[8];
  for (std::int64_t i = range.first_group * range.group_size; i < end; i += 8) {
    for (int j = 0; j < 8; ++j) codes[j] = i + j < end && source[i + j] != 0 ? 1 : 0;
    pack_codes<1>(codes, 8, out + i / 8);
  }
}

void decode_booleans(const Format&, const unsigned char* packed, unsigned char* out, const Range& range) {
  const std::int64_t end = end_of(range);
  std::uint8_t codes[8];
  for (std::int64_t i = range.first_group * range.group_size; i < end; i += 8) {
    unpack_codes<1>(packed + i / 8, 8, codes);
    std::memcpy(out + i, codes, static_cast<std::size_t>(end - i < 8 ? end - i : 8));
  }
}

/// Calls `work` with the first element and the count of each part of a range.
template <class Work>
PAC_FORMAT void for_each_part(const Range& range, const Work& work) {
  for (std::int64_t group = range.first_group; group < range.last_group; ++group) {
    const std::int64_t first = group * kPart;
    const std::int64_t left = range.numel - first;
    work(first, left < kPart ? static_cast<int>(left) : kPart);
  }
}

template <class T>
PAC_FORMAT void copy_out(const T* values, int count, unsigned char* out, std::int64_t first) {
  std::memcpy(out + first * static_cast<std::int64_t>(sizeof(T)), values, static_cast<std::size_t>(count) * sizeof(T));
}

template <class T>
PAC_FORMAT void copy_in(const unsigned char* source, std::int64_t first, int count, T* values) {
  std::memcpy(values, source + first * static_cast<std::int64_t>(sizeof(T)),
              static_cast<std::size_t>(count) * sizeof(T));
}

template <class Map>
void encode_map(const Format&, const unsigned char* source, unsigned char* out, const Range& range, Keys) {
  using Number = pac::Number<Map::kSource>;
  for_each_part(range, [&](std::int64_t first, int count) {
    typename Number::T x[kPart];
    typename Map::Stored stored[kPart];
    expand<Map::kSource>(source + first * static_cast<std::int64_t>(sizeof(typename Number::Storage)), count, x);
    for (int i = 0; i < count; ++i) stored[i] = Map::encode(x[i]);
    copy_out(stored, count, out, first);
  });
}

template <class Map>
void decode_map(const Format&, const unsigned char* packed, unsigned char* out, const Range& range) {
  using Number = pac::Number<Map::kSource>;
  for_each_part(range, [&](std::int64_t first, int count) {
    typename Map::Stored stored[kPart];
    typename Number::Storage x[kPart];
    copy_in(packed, first, count, stored);
    for (int i = 0; i < count; ++i) x[i] = Number::store(Map::decode(stored[i]));
    copy_out(x, count, out, first);
  });
}

template <DType kType>
void encode_scaled(const Format&, const unsigned char* source, unsigned char* out, const Range& range, Keys) {
  using Number = pac::Number<kType>;
  unsigned char* const exponents = out + 2 * range.numel;
  for_each_part(range, [&](std::int64_t first, int count) {
    typename Number::T x[kPart];
    std::uint16_t stored[kPart];
    expand<kType>(source + first * static_cast<std::int64_t>(sizeof(typename Number::Storage)), count, x);
    std::uint32_t largest = 0;
    for (int i = 0; i < count; ++i) largest = Scaled<kType>::key(x[i]) > largest ? Scaled<kType>::key(x[i]) : largest;
    const int exponent = Scaled<kType>::exponent(largest);
    const auto scale = Scaled<kType>::power(exponent);
    for (int i = 0; i < count; ++i) stored[i] = Scaled<kType>::encode(x[i], scale);
    copy_out(stored, count, out, first);
    const auto short_exponent = static_cast<std::int16_t>(exponent);
    copy_out(&short_exponent, 1, exponents, first / kPart);
  });
}

template <DType kType>
void decode_scaled(const Format&, const unsigned char* packed, unsigned char* out, const Range& range) {
  const unsigned char* const exponents = packed + 2 * range.numel;
  for_each_part(range, [&](std::int64_t first, int count) {
    std::uint16_t stored[kPart];
    typename Number<kType>::Storage x[kPart];
    copy_in(packed, first, count, stored);
    std::int16_t exponent;
    copy_in(exponents, first / kPart, 1, &exponent);
    const auto inverse = Scaled<kType>::power(-exponent);
    for (int i = 0; i < count; ++i) x[i] = Scaled<kType>::decode(stored[i], inverse);
    copy_out(x, count, out, first);
  });
}

template <DType kType>
void encode_answers(const Format& format, const unsigned char* source, unsigned char* out, const Range& range, Keys) {
  using Number = pac::Number<kType>;
  const auto yes = interval_of<typename Number::T>(format.comparison);
  for_each_part(range, [&](std::int64_t first, int count) {
    typename Number::T x[kPart];
    // Zero beyond a partial last part: the last byte is written whole.
    std::uint8_t answers[kPart] = {};
    expand<kType>(source + first * static_cast<std::int64_t>(sizeof(typename Number::Storage)), count, x);
    for (int i = 0; i < count; ++i) answers[i] = yes.holds(x[i]) ? 1 : 0;
    pack_codes<1>(answers, count, out + first / 8);
  });
}

/// The bits of a value, and a value of bits.
template <class To, class From>
PAC_FORMAT To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <DType kType, class Word>
void decode_answers(const Format& format, const unsigned char* packed, unsigned char* out, const Range& range) {
  using Number = pac::Number<kType>;
  const auto yes = same_bits<Word>(Number::store(static_cast<typename Number::T>(format.comparison.yes)));
  const auto no = same_bits<Word>(Number::store(static_cast<typename Number::T>(format.comparison.no)));
  const auto flipped = static_cast<Word>(yes ^ no);
  for_each_part(range, [&](std::int64_t first, int count) {
    std::uint8_t answers[kPart];
    Word x[kPart];
    unpack_codes<1>(packed + first / 8, count, answers);
    // The compiler does not vectorise a choice between two values.
    for (int i = 0; i < count; ++i) x[i] = static_cast<Word>(no ^ (flipped & static_cast<Word>(-answers[i])));
    copy_out(x, count, out, first);
  });
}

template <DType kType, int kBits>
Loops loops_for(bool stochastic) {
  return {stochastic ? encode_groups<kType, kBits, true> : encode_groups<kType, kBits, false>,
          decode_groups<kType, kBits>};
}

template <DType kType>
Loops loops_for(int bits, bool stochastic) {
  return bits == 8 ? loops_for<kType, 8>(stochastic)
                   : (bits == 4 ? loops_for<kType, 4>(stochastic) : loops_for<kType, 2>(stochastic));
}

Loops loops_of_codes(const Format& format) {
  switch (format.dtype) {
    case DType::kBFloat16:
      return loops_for<DType::kBFloat16>(format.bits, format.stochastic);
    case DType::kFloat16:
      return loops_for<DType::kFloat16>(format.bits, format.stochastic);
    default:
      return loops_for<DType::kFloat32>(format.bits, format.stochastic);
  }
}

}  // namespace

Loops loops_of(const Format& format) {
  switch (format.encoding) {
    case Encoding::kCodes:
      return loops_of_codes(format);
    case Encoding::kBooleans:
      return {encode_booleans, decode_booleans};
    case Encoding::kComparison:
      return with_dtype(format.dtype, [](auto dtype) {
        constexpr DType kType = decltype(dtype)::kType;
        using Word = std::conditional_t<kType == DType::kFloat64, std::uint64_t,
                                        std::conditional_t<kType == DType::kFloat32, std::uint32_t, std::uint16_t>>;
        return Loops{encode_answers<kType>, decode_answers<kType, Word>};
      });
    case Encoding::kScaled:
      return with_width<Scaled>(format.dtype, [](auto map) {
        return Loops{encode_scaled<decltype(map)::kSource>, decode_scaled<decltype(map)::kSource>};
      });
    default:
      break;
  }
  return with_map(format, [](auto map) { return Loops{encode_map<decltype(map)>, decode_map<decltype(map)>}; });
}

}  // namespace pac::cpu::PAC_ISA
