// Hashes for keys read from files: the multiplier is random in each process, so a file cannot force collisions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace pac {

/// An odd number, random in each process.
inline std::uint64_t hash_multiplier() {
  static const std::uint64_t multiplier = [] {
    std::random_device device;
    return (std::uint64_t{device()} << 32 | device()) | 1;
  }();
  return multiplier;
}

/// Mixes a number into a hash; the high bits of the number also change the low bits of the hash.
inline std::uint64_t salted_hash(std::uint64_t hash, std::uint64_t number) {
  hash = (hash ^ number) * hash_multiplier();
  return hash ^ hash >> 32;
}

}  // namespace pac
