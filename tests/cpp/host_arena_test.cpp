// Host memory of offload: what is pinned never exceeds what was taken at its peak by more than a slab, in whatever
// order blocks of whatever sizes are taken and given.
#include "engine/host_arena.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/link.hpp"

namespace {

using pac::Link;
using pac::engine::HostArena;
using pac::engine::Moment;
using pac::engine::When;

constexpr std::size_t kKib = 1024;
constexpr std::size_t kMib = std::size_t{1} << 20;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

/// A link without memory: what is pinned is a range of addresses.
class Addresses final : public Link {
 public:
  Status send(Stream, const Copy*, std::size_t, Event*) noexcept override { return 0; }
  Status bring(Stream, const Copy*, std::size_t, Event*) noexcept override { return 0; }
  Status wait(Stream, Event) noexcept override { return 0; }
  void recycle(Event) noexcept override {}
  Status mark(Stream, Event*) noexcept override { return 0; }
  Status finish(Event) noexcept override { return 0; }
  double elapsed(Event, Event) noexcept override { return 0; }
  void recycle_mark(Event) noexcept override {}
  bool is_capturing(Stream) noexcept override { return false; }
  void* pin(std::size_t size) noexcept override {
    if (size > available()) return nullptr;
    next += size + 4096;
    ranges[next - size] = size;
    pinned += size;
    return reinterpret_cast<void*>(next - size);  // NOLINT(performance-no-int-to-ptr): nobody reads there
  }
  void unpin(void* memory, std::size_t size) noexcept override {
    ranges.erase(reinterpret_cast<std::uintptr_t>(memory));
    pinned -= size;
  }
  std::size_t available() noexcept override { return host - pinned; }
  void describe(Status, char*, std::size_t) noexcept override {}

  std::map<std::uintptr_t, std::size_t> ranges;
  std::uintptr_t next = std::uintptr_t{1} << 40;
  std::size_t pinned = 0, host = std::size_t{1} << 50;
};

/// An arena, the blocks in use, and what must hold after each call.
class Checked {
 public:
  explicit Checked(std::size_t limit = std::size_t{1} << 50) : arena(link, limit) {}

  bool take(std::size_t nbytes) {
    auto block = arena.take(nbytes);
    if (!block) return false;
    std::size_t size = 0;
    for (const HostArena::Part& part : *block) {
      const auto address = reinterpret_cast<std::uintptr_t>(part.address);
      const auto slab = std::prev(link.ranges.upper_bound(address));
      require(part.size > 0 && address + part.size <= slab->first + slab->second, "a part lies outside of its slab");
      const auto above = used.lower_bound(address);
      require(above == used.end() || address + part.size <= above->first, "a part lies on the one above it");
      require(above == used.begin() || std::prev(above)->first + std::prev(above)->second <= address,
              "a part lies on the one below it");
      used[address] = part.size;
      size += part.size;
    }
    require(size >= nbytes && size < nbytes + 4096, "a block is not of the size that was asked for");
    now += size;
    peak = std::max(peak, now);
    parts += block->size();
    blocks.push_back(std::move(*block));
    check();
    return true;
  }

  void give(std::size_t index, const When& after = nullptr) {
    for (const HostArena::Part& part : blocks[index]) {
      used.erase(reinterpret_cast<std::uintptr_t>(part.address));
      now -= part.size;
    }
    arena.give(blocks[index], after);
    blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(index));
    check();
  }

  /// The step of a model: blocks of these sizes, given back in the reverse order.
  void step(const std::vector<std::size_t>& sizes) {
    for (const std::size_t each : sizes) require(take(each), "a block found no room");
    while (!blocks.empty()) give(blocks.size() - 1);
  }

  void check() const {
    require(arena.pinned() == link.pinned && arena.taken() == now && arena.peak() == peak, "a count is wrong");
    // A slab is pinned where all free bytes together are too few: what is left of it, a 32nd of what was pinned before
    // or 32 MiB, rounded up to 2 MiB, is all that is not taken then.
    require(link.pinned <= peak + std::max(peak / 32, 32 * kMib) + 2 * kMib,
            std::to_string(link.pinned / kMib) + " MiB pinned, taken were " + std::to_string(peak / kMib) + " at most");
  }

  Addresses link;
  HostArena arena;
  std::vector<HostArena::Block> blocks;
  std::map<std::uintptr_t, std::size_t> used;
  std::size_t now = 0, peak = 0, parts = 0;
};

/// Inputs of checkpointed blocks: from 16 on each is more than a slab of the sizes before.
void equal_blocks() {
  for (const std::size_t size : {272 * kMib, 544 * kMib, 34 * kMib, 40 * kMib + 4 * kKib}) {
    Checked run;
    const std::vector<std::size_t> sizes(32, size);
    run.step(sizes);
    const std::size_t pins = run.arena.pins();
    run.parts = 0;
    run.step(sizes);
    require(run.arena.pins() == pins, "the second step pinned memory");
    require(run.parts <= 2 * sizes.size(), "blocks of one size are in more than two parts");
    require(run.link.pinned <= run.peak + run.peak / 32 + 2 * kMib, "the slabs hold more than the blocks");
  }
}

std::vector<std::size_t> sizes_of_a_model(std::mt19937_64& random) {
  const auto below = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  const std::size_t layers = 1 + below(48), unit = (128 + below(8192)) * kKib;
  std::vector<std::size_t> layer(1 + below(9)), sizes;
  for (std::size_t& each : layer) each = 128 * kKib + below(16) * unit + below(2) * below(5000);
  const std::size_t growth = below(3) == 0 ? below(unit) : 0;
  for (std::size_t i = 0; i < layers; ++i) {
    for (const std::size_t each : layer) sizes.push_back(each + i * growth);
  }
  return sizes;
}

/// Steps of models, one of some lengths after the other.
void models(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Checked run;
  std::vector<std::size_t> sizes = sizes_of_a_model(random);
  for (int lengths = 0; lengths < 6; ++lengths) {
    run.step(sizes);
    const std::size_t pins = run.arena.pins();
    run.step(sizes);
    require(run.arena.pins() == pins, "a second step of equal sizes pinned memory");
    const double factor = 0.3 + static_cast<double>(random() % 1000) / 500;
    for (std::size_t& each : sizes) each = static_cast<std::size_t>(static_cast<double>(each) * factor) + 1;
    if (random() % 3 == 0) sizes = sizes_of_a_model(random);
  }
  run.arena.trim();
  require(run.link.pinned == 0, "trim left memory pinned");
}

/// Blocks taken and given in any order.
void any_order(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Checked run(random() % 2 == 0 ? std::size_t{1} << 50 : 2048 * kMib);
  for (int operation = 0; operation < 3000; ++operation) {
    if (run.blocks.empty() || random() % 100 < 52) {
      const std::size_t size = random() % 8 == 0 ? random() % (300 * kMib) + 1 : random() % (4 * kMib) + 1;
      const std::size_t free = run.arena.limit() - run.now;
      if (!run.take(size)) require(size > free - std::min(free, 4 * kKib), "a block found no room though there was");
    } else {
      run.give(random() % run.blocks.size(), std::make_shared<const Moment>(run.link, 1));
    }
    if (random() % 500 == 0) run.arena.trim();
  }
  require(run.link.pinned <= run.arena.limit(), "more was pinned than the limit allows");
}

}  // namespace

int main() {
  try {
    equal_blocks();
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      models(seed);
      any_order(seed);
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
