// Hashes of what a file may have chosen: with a multiplier that no file knows, none can make all of them collide.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace pac {

/// An odd number, another one in every process.
inline std::uint64_t hash_multiplier() {
  static const std::uint64_t multiplier = [] {
    std::random_device device;
    return (std::uint64_t{device()} << 32 | device()) | 1;
  }();
  return multiplier;
}

/// Mixes a number into a hash, so that its high bits reach the low ones.
inline std::uint64_t salted_hash(std::uint64_t hash, std::uint64_t number) {
  hash = (hash ^ number) * hash_multiplier();
  return hash ^ hash >> 32;
}

}  // namespace pac
