#define PAC_ISA baseline
#include "codec/cpu.hpp"

#include <algorithm>
#include <thread>
#include <vector>

#include "codec/cpu_loops.hpp"
#include "codec/halves.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pac::cpu {
namespace {

/// Elements of the smallest share of a thread. On a 2.6 GHz EPYC, starting and joining a thread took 19 us, restoring
/// this many elements 25 us and packing them 61 us: a second thread pays from two shares on.
constexpr std::int64_t kElementsPerThread = 1 << 17;

/// Sets IEEE arithmetic for the object's lifetime: torch.set_flush_denormal(True) in the caller must not change the
/// bytes, and new threads inherit the caller's mode.
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  /// Half to even, nothing flushed, every exception masked.
  static constexpr unsigned kDefault = 0x1F80;
  unsigned saved_;

 public:
#else
  IeeeMode() = default;
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

/// Joins all threads on destruction, also after an exception.
class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    for (std::thread& member : members_) member.join();
  }

  template <class Work>
  void add(Work&& work) {
    members_.emplace_back(std::forward<Work>(work));
  }

 private:
  std::vector<std::thread> members_;
};

/// Runs `work` over the groups in contiguous shares. Each call starts new threads: a pool would not survive a fork, and
/// for large tensors the start costs little.
template <class Work>
void for_each_share(std::int64_t numel, int group_size, int threads, const Work& work) {
  const std::int64_t groups = ceil_div(numel, group_size);
  const std::int64_t shares = std::clamp<std::int64_t>(numel / kElementsPerThread, 1, std::max(threads, 1));
  const auto run = [&](std::int64_t share) {
    const IeeeMode mode;
    work(Range{numel, groups * share / shares, groups * (share + 1) / shares, group_size});
  };
  Team team;
  for (std::int64_t share = 1; share < shares; ++share) team.add([&run, share] { run(share); });
  run(0);
}

Loops loops_of(const Format& format, Isa isa) {
#if PAC_AVX2
  if (isa == Isa::kAvx2) return avx2::loops_of(format);
#else
  static_cast<void>(isa);
#endif
  return baseline::loops_of(format);
}

/// For splitting among threads: whole bytes of bits, and whole parts of what is scaled.
int group_size_of(const Format& format) { return format.encoding == Encoding::kCodes ? format.group_size : kPart; }

}  // namespace

Isa best_isa() {
#if PAC_AVX2
  if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

void encode(const Format& format, Isa isa, const void* source, void* out, std::int64_t numel, Keys keys, int threads) {
  const Loops loops = loops_of(format, isa);
  const auto* from = static_cast<const unsigned char*>(source);
  auto* to = static_cast<unsigned char*>(out);
  if (format.encoding == Encoding::kCodes) {
    const std::int64_t codes_end = ceil_div(numel * format.bits, 8);
    std::fill(to + codes_end, to + parameters_offset(numel, format.bits), static_cast<unsigned char>(0));
  }
  for_each_share(numel, group_size_of(format), threads,
                 [&](const Range& range) { loops.encode(format, from, to, range, keys); });
}

void decode(const Format& format, Isa isa, const void* packed, void* out, std::int64_t numel, int threads) {
  const Loops loops = loops_of(format, isa);
  const auto* from = static_cast<const unsigned char*>(packed);
  auto* to = static_cast<unsigned char*>(out);
  for_each_share(numel, group_size_of(format), threads,
                 [&](const Range& range) { loops.decode(format, from, to, range); });
}

}  // namespace pac::cpu
