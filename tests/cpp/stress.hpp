// Shared by the two stress programs; `require` also by other tests.
#pragma once

#include <cstdint>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "allocator/config.hpp"
#include "allocator/types.hpp"

namespace stress {

using namespace pac::alloc;

struct Options {
  std::uint64_t seed = 0;
  std::uint64_t operations = 100'000;  ///< of each thread
  std::uint64_t every = 1;             ///< operations between two checks of everything
  std::uint64_t threads = 0;           ///< 0: one thread, and the model
};

/// The allocator did what it must not.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream text;
  text << std::showbase;
  (text << ... << parts);
  throw Violation(text.str());
}

/// SplitMix64 (Steele, Lea and Flood 2014): the same numbers with every library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t operator()() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t bound) { return (*this)() % bound; }
  double unit() { return static_cast<double>((*this)() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

/// What a run is about, chosen by its seed: every setting comes up within a dozen seeds.
struct Setup {
  Bytes capacity;
  bool virtual_memory;
  bool asynchronous;
  Config config;
  std::size_t target;  ///< about so many blocks live at once
};

Setup setup_of(std::uint64_t seed);
/// The limit that a configuration puts on reserved bytes.
Bytes limit_of(const Config& config, Bytes capacity);
/// 1 byte to `most`, every power of two as likely as any other.
Bytes any_size(Random& random, Bytes most);

void run_modelled(const Options& options);
void run_threads(const Options& options);

}  // namespace stress
