// Random operations on the allocator over the simulated device, checked against an independent model.
//
//   allocator_stress [--seed N] [--operations N] [--every N] [--threads N]
//
// Exits 1 with the seed and the number of the operation where something is wrong; the same seed repeats it.
#include <cmath>
#include <exception>
#include <string>

#include "stress.hpp"

namespace stress {

Setup setup_of(std::uint64_t seed) {
  constexpr Bytes kCapacities[] = {256_MiB, 1024_MiB, 6144_MiB, 24576_MiB};
  constexpr std::size_t kTargets[] = {24, 60, 150};
  Random random(seed);
  Setup setup{kCapacities[random.below(4)], true, random.below(8) != 0, {}, kTargets[random.below(3)]};
  Config& config = setup.config;
  config.growth = seed % 2 == 0 ? Growth::kVmm : Growth::kMalloc;
  setup.virtual_memory = config.growth == Growth::kVmm || random.below(2) == 0;
  switch (seed / 2 % 6) {
    case 0:
      break;
    case 1:
      config.max_split_size = 64_MiB;
      break;
    case 2:
      config.roundup_power2_divisions.fill(4);
      config.initial_pool_size = 64_MiB;
      break;
    case 3:
      config.garbage_collection_threshold = 0.5;
      config.memory_fraction = 0.75;
      break;
    case 4:
      config.max_split_size = 32_MiB;
      config.max_non_split_rounding = 40_MiB;
      config.memory_fraction = 0.6;
      config.garbage_collection_threshold = 0.8;
      break;
    default:
      config.large_segment_size = 64_MiB;
      config.roundup_power2_divisions.fill(8);
      break;
  }
  return setup;
}

Bytes limit_of(const Config& config, Bytes capacity) {
  return static_cast<Bytes>(config.memory_fraction * static_cast<double>(capacity));
}

Bytes any_size(Random& random, Bytes most) {
  return static_cast<Bytes>(std::exp2(random.unit() * std::log2(static_cast<double>(most))));
}

}  // namespace stress

namespace {

stress::Options parse(int count, char** words) {
  stress::Options options;
  for (int i = 1; i < count; i += 2) {
    const std::string name = words[i];
    std::uint64_t* value = name == "--seed"         ? &options.seed
                           : name == "--operations" ? &options.operations
                           : name == "--every"      ? &options.every
                           : name == "--threads"    ? &options.threads
                                                    : nullptr;
    if (value == nullptr || i + 1 == count) {
      throw std::invalid_argument("expected --seed, --operations, --every or --threads and a number, got " + name);
    }
    *value = std::stoull(words[i + 1]);
  }
  return options;
}

}  // namespace

int main(int count, char** words) {
  try {
    const stress::Options options = parse(count, words);
    options.threads == 0 ? stress::run_modelled(options) : stress::run_threads(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
