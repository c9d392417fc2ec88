// The CUDA kernels of the forms between codes and the tensor as it is: one launch each, one pass over the tensor.
//
// A full tile with aligned pointers moves 16 bytes at a time; every other tile moves element by element. The arithmetic
// of an element is that of halves.hpp.
#include <cstring>

#include "codec/cuda.hpp"
#include "codec/cuda_tiles.cuh"
#include "codec/cuda_vector.cuh"
#include "codec/halves.hpp"

namespace pac::cuda {
namespace {

static_assert(kChunk == kPart, "a warp scales a part");

/// `wide` means that both pointers are aligned to 16 bytes.
struct Arguments {
  const unsigned char* from;
  unsigned char* to;
  std::int64_t numel;
  bool wide;
};

template <class T>
struct AnswerArguments {
  Arguments tensor;
  Interval<T> yes;
};

template <class Storage>
struct ValueArguments {
  Arguments tensor;
  Storage yes;
  Storage no;
};

template <class T>
__device__ __forceinline__ T loaded(const unsigned char* from, std::int64_t index) {
  return reinterpret_cast<const T*>(from)[index];
}

template <class T>
__device__ __forceinline__ void store(unsigned char* to, std::int64_t index, T value) {
  reinterpret_cast<T*>(to)[index] = value;
}

/// Consecutive elements in registers, moved 16 bytes at a time where there are as many.
template <class T, int kCount>
struct Elements {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * kCount;
  using Word = typename pac::cuda::Word<(kBytes < 16 ? kBytes : 16)>::Type;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  T values[kCount];

  __device__ __forceinline__ void load(const unsigned char* from, std::int64_t index) {
    Word words[kWords];
    const auto* const source = reinterpret_cast<const Word*>(from + index * static_cast<std::int64_t>(sizeof(T)));
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = source[i];
    std::memcpy(values, words, kBytes);
  }

  __device__ __forceinline__ void store(unsigned char* to, std::int64_t index) const {
    Word words[kWords];
    std::memcpy(words, values, kBytes);
    auto* const target = reinterpret_cast<Word*>(to + index * static_cast<std::int64_t>(sizeof(T)));
#pragma unroll
    for (int i = 0; i < kWords; ++i) target[i] = words[i];
  }

  /// Marked for early eviction: nothing reads a stored form before backward.
  __device__ __forceinline__ void store_streaming(unsigned char* to, std::int64_t index) const {
    Word words[kWords];
    std::memcpy(words, values, kBytes);
    auto* const target = reinterpret_cast<Word*>(to + index * static_cast<std::int64_t>(sizeof(T)));
#pragma unroll
    for (int i = 0; i < kWords; ++i) __stcs(target + i, words[i]);
  }
};

template <int kChunks>
__device__ __forceinline__ bool is_full(const Arguments& a, std::int64_t tile) {
  return a.wide && tile + kChunk * kChunks <= a.numel;
}

/// Calls `work` with the index of each element of this lane in a tile that is not full: consecutive lanes take
/// consecutive elements.
template <int kChunks, class Work>
__device__ __forceinline__ void for_each_element(const Arguments& a, std::int64_t tile, const Work& work) {
  const std::int64_t end = tile + kChunk * kChunks < a.numel ? tile + kChunk * kChunks : a.numel;
#pragma unroll 1
  for (std::int64_t i = tile + lane_index(); i < end; i += kWarp) work(i);
}

/// A lane restores 16 bytes at a time, so that a warp's store covers whole sectors.
template <class Storage, int kChunks>
struct Restoring {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(Storage));
  static constexpr int kPieces = kChunks * kPerLane / kElements;
  static constexpr int kPiece = kElements * static_cast<int>(kWarp);
};

template <class Map, int kChunks>
__global__ void __launch_bounds__(kThreads) encode_map_kernel(const __grid_constant__ Arguments a) {
  using Number = pac::Number<Map::kSource>;
  using Storage = typename Number::Storage;
  const std::int64_t tile = tile_begin<kChunks>();
  if (!is_full<kChunks>(a, tile)) {
    for_each_element<kChunks>(
        a, tile, [&](std::int64_t i) { store(a.to, i, Map::encode(Number::load(loaded<Storage>(a.from, i)))); });
    return;
  }
  const std::int64_t first = tile + lane_index() * kPerLane;
  Elements<Storage, kPerLane> x[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) x[c].load(a.from, first + c * kChunk);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    Elements<typename Map::Stored, kPerLane> packed;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) packed.values[i] = Map::encode(Number::load(x[c].values[i]));
    packed.store_streaming(a.to, first + c * kChunk);
  }
}

template <class Map, int kChunks>
__global__ void __launch_bounds__(kThreads) decode_map_kernel(const __grid_constant__ Arguments a) {
  using Number = pac::Number<Map::kSource>;
  using Stored = typename Map::Stored;
  using Steps = Restoring<typename Number::Storage, kChunks>;
  const std::int64_t tile = tile_begin<kChunks>();
  if (!is_full<kChunks>(a, tile)) {
    for_each_element<kChunks>(
        a, tile, [&](std::int64_t i) { store(a.to, i, Number::store(Map::decode(loaded<Stored>(a.from, i)))); });
    return;
  }
  const std::int64_t first = tile + lane_index() * Steps::kElements;
  Elements<Stored, Steps::kElements> packed[Steps::kPieces];
#pragma unroll
  for (int p = 0; p < Steps::kPieces; ++p) packed[p].load(a.from, first + p * Steps::kPiece);
#pragma unroll
  for (int p = 0; p < Steps::kPieces; ++p) {
    Elements<typename Number::Storage, Steps::kElements> x;
#pragma unroll
    for (int i = 0; i < Steps::kElements; ++i) x.values[i] = Number::store(Map::decode(packed[p].values[i]));
    x.store(a.to, first + p * Steps::kPiece);
  }
}

/// The exponents follow the elements.
template <class Byte>
__device__ __forceinline__ Byte* exponents_of(Byte* packed, std::int64_t numel) {
  return packed + 2 * numel;
}

template <DType kType, int kChunks>
__global__ void __launch_bounds__(kThreads) encode_scaled_kernel(const __grid_constant__ Arguments a) {
  using Number = pac::Number<kType>;
  using Storage = typename Number::Storage;
  using Form = Scaled<kType>;
  const std::int64_t tile = tile_begin<kChunks>();
  const int lane = lane_index();
  unsigned char* const exponents = exponents_of(a.to, a.numel);
  const auto exponent_for = [&](std::uint32_t largest, std::int64_t part) {
    const int exponent = Form::exponent(__reduce_max_sync(~0u, largest));
    if (lane == 0) store(exponents, part / kPart, static_cast<std::int16_t>(exponent));
    return Form::power(exponent);
  };
  if (!is_full<kChunks>(a, tile)) {
#pragma unroll 1
    for (std::int64_t part = tile; part < tile + kChunk * kChunks && part < a.numel; part += kPart) {
      std::uint32_t largest = 0;
      for_each_element<1>(a, part,
                          [&](std::int64_t i) { largest = max(largest, Form::key(loaded<Storage>(a.from, i))); });
      const auto scale = exponent_for(largest, part);
      for_each_element<1>(a, part,
                          [&](std::int64_t i) { store(a.to, i, Form::encode(loaded<Storage>(a.from, i), scale)); });
    }
    return;
  }
  const std::int64_t first = tile + lane * kPerLane;
  Elements<Storage, kPerLane> x[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) x[c].load(a.from, first + c * kChunk);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) largest = max(largest, Form::key(x[c].values[i]));
    const auto scale = exponent_for(largest, tile + c * kChunk);
    Elements<std::uint16_t, kPerLane> packed;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) packed.values[i] = Form::encode(x[c].values[i], scale);
    packed.store_streaming(a.to, first + c * kChunk);
  }
}

template <DType kType, int kChunks>
__global__ void __launch_bounds__(kThreads) decode_scaled_kernel(const __grid_constant__ Arguments a) {
  using Storage = typename Number<kType>::Storage;
  using Form = Scaled<kType>;
  using Steps = Restoring<Storage, kChunks>;
  const std::int64_t tile = tile_begin<kChunks>();
  const unsigned char* const exponents = exponents_of(a.from, a.numel);
  const auto inverse_of = [&](std::int64_t i) { return Form::power(-loaded<std::int16_t>(exponents, i / kPart)); };
  if (!is_full<kChunks>(a, tile)) {
    for_each_element<kChunks>(a, tile, [&](std::int64_t i) {
      store(a.to, i, Form::decode(loaded<std::uint16_t>(a.from, i), inverse_of(i)));
    });
    return;
  }
  const std::int64_t first = tile + lane_index() * Steps::kElements;
  Elements<std::uint16_t, Steps::kElements> packed[Steps::kPieces];
  typename Form::T inverse[Steps::kPieces];
#pragma unroll
  for (int p = 0; p < Steps::kPieces; ++p) {
    packed[p].load(a.from, first + p * Steps::kPiece);
    inverse[p] = inverse_of(first + p * Steps::kPiece);
  }
#pragma unroll
  for (int p = 0; p < Steps::kPieces; ++p) {
    Elements<Storage, Steps::kElements> x;
#pragma unroll
    for (int i = 0; i < Steps::kElements; ++i) x.values[i] = Form::decode(packed[p].values[i], inverse[p]);
    x.store(a.to, first + p * Steps::kPiece);
  }
}

template <DType kType, int kChunks>
__global__ void __launch_bounds__(kThreads)
    encode_answers_kernel(const __grid_constant__ AnswerArguments<typename Number<kType>::T> arguments) {
  using Number = pac::Number<kType>;
  using Storage = typename Number::Storage;
  const Arguments& a = arguments.tensor;
  const std::int64_t tile = tile_begin<kChunks>();
  const std::int64_t first = tile + lane_index() * kPerLane;
  if (!is_full<kChunks>(a, tile)) {
#pragma unroll 1
    for (std::int64_t byte = first; byte < tile + kChunk * kChunks && byte < a.numel; byte += kChunk) {
      unsigned answers = 0;
      for (int i = 0; i < kPerLane && byte + i < a.numel; ++i)
        answers |= (arguments.yes.holds(Number::load(loaded<Storage>(a.from, byte + i))) ? 1u : 0u) << i;
      a.to[byte / 8] = static_cast<unsigned char>(answers);
    }
    return;
  }
  Elements<Storage, kPerLane> x[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) x[c].load(a.from, first + c * kChunk);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    unsigned answers = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) answers |= (arguments.yes.holds(Number::load(x[c].values[i])) ? 1u : 0u) << i;
    __stcs(a.to + (first + c * kChunk) / 8, static_cast<unsigned char>(answers));
  }
}

template <class Storage, int kChunks>
__global__ void __launch_bounds__(kThreads)
    decode_answers_kernel(const __grid_constant__ ValueArguments<Storage> arguments) {
  using Steps = Restoring<Storage, kChunks>;
  const Arguments& a = arguments.tensor;
  const std::int64_t tile = tile_begin<kChunks>();
  const auto value_of = [&](unsigned answers, int i) {
    return (answers >> i & 1u) != 0 ? arguments.yes : arguments.no;
  };
  if (!is_full<kChunks>(a, tile)) {
    for_each_element<kChunks>(
        a, tile, [&](std::int64_t i) { store(a.to, i, value_of(a.from[i / 8], static_cast<int>(i % 8))); });
    return;
  }
  const std::int64_t first = tile + lane_index() * Steps::kElements;
  const int bit = static_cast<int>(first % 8);
  unsigned answers[Steps::kPieces];
#pragma unroll
  for (int p = 0; p < Steps::kPieces; ++p) answers[p] = a.from[(first + p * Steps::kPiece) / 8];
#pragma unroll
  for (int p = 0; p < Steps::kPieces; ++p) {
    Elements<Storage, Steps::kElements> x;
#pragma unroll
    for (int i = 0; i < Steps::kElements; ++i) x.values[i] = value_of(answers[p], bit + i);
    x.store(a.to, first + p * Steps::kPiece);
  }
}

/// Chunks of a warp: of float64 one holds as many bytes as several of the others.
template <DType kType>
constexpr int unrolled(int chunks) {
  return kType == DType::kFloat64 ? 1 : chunks;
}

/// Launches the kernel for tensors that fit the device in one wave, or the one for larger tensors.
template <class Of>
cudaError_t launch_for(std::int64_t numel, KernelOf<Of> small, KernelOf<Of> large, int chunks, const Of& arguments,
                       cudaStream_t stream) {
  if (numel <= kSmall) return launch(small, grid_for(numel, kPerLane), arguments, stream);
  return launch(large, grid_for(numel, kPerLane * chunks), arguments, stream);
}

Arguments arguments_of(const void* from, void* to, std::int64_t numel) {
  return {static_cast<const unsigned char*>(from), static_cast<unsigned char*>(to), numel,
          aligned(from) && aligned(to)};
}

}  // namespace

cudaError_t encode_form(const Format& format, const void* source, void* packed, std::int64_t numel,
                        cudaStream_t stream) {
  if (numel == 0) return cudaSuccess;
  const Arguments a = arguments_of(source, packed, numel);
  if (format.encoding == Encoding::kComparison) {
    return with_dtype(format.dtype, [&](auto number) {
      using Number = decltype(number);
      constexpr int kChunks = unrolled<Number::kType>(kEncodeUnroll);
      const AnswerArguments<typename Number::T> asked{a, interval_of<typename Number::T>(format.comparison)};
      return launch_for(numel, encode_answers_kernel<Number::kType, 1>, encode_answers_kernel<Number::kType, kChunks>,
                        kChunks, asked, stream);
    });
  }
  if (format.encoding == Encoding::kScaled) {
    return with_width<Scaled>(format.dtype, [&](auto form) {
      constexpr DType kType = decltype(form)::kSource;
      constexpr int kChunks = unrolled<kType>(kEncodeUnroll);
      return launch_for(numel, encode_scaled_kernel<kType, 1>, encode_scaled_kernel<kType, kChunks>, kChunks, a,
                        stream);
    });
  }
  return with_map(format, [&](auto map) {
    using Map = decltype(map);
    constexpr int kChunks = unrolled<Map::kSource>(kEncodeUnroll);
    return launch_for(numel, encode_map_kernel<Map, 1>, encode_map_kernel<Map, kChunks>, kChunks, a, stream);
  });
}

cudaError_t decode_form(const Format& format, const void* packed, void* out, std::int64_t numel, cudaStream_t stream) {
  if (numel == 0) return cudaSuccess;
  const Arguments a = arguments_of(packed, out, numel);
  if (format.encoding == Encoding::kComparison) {
    return with_dtype(format.dtype, [&](auto number) {
      using Number = decltype(number);
      using Storage = typename Number::Storage;
      constexpr int kChunks = unrolled<Number::kType>(kDecodeUnroll);
      const ValueArguments<Storage> values{a, Number::store(static_cast<typename Number::T>(format.comparison.yes)),
                                           Number::store(static_cast<typename Number::T>(format.comparison.no))};
      return launch_for(numel, decode_answers_kernel<Storage, 1>, decode_answers_kernel<Storage, kChunks>, kChunks,
                        values, stream);
    });
  }
  if (format.encoding == Encoding::kScaled) {
    return with_width<Scaled>(format.dtype, [&](auto form) {
      constexpr DType kType = decltype(form)::kSource;
      constexpr int kChunks = unrolled<kType>(kDecodeUnroll);
      return launch_for(numel, decode_scaled_kernel<kType, 1>, decode_scaled_kernel<kType, kChunks>, kChunks, a,
                        stream);
    });
  }
  return with_map(format, [&](auto map) {
    using Map = decltype(map);
    constexpr int kChunks = unrolled<Map::kSource>(kDecodeUnroll);
    return launch_for(numel, decode_map_kernel<Map, 1>, decode_map_kernel<Map, kChunks>, kChunks, a, stream);
  });
}

}  // namespace pac::cuda
