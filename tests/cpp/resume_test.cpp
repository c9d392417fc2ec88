// A resume that gives cached memory back drops its lock: meanwhile others resume, end pools, make new ones, and pause.
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "allocator/caching_allocator.hpp"
#include "allocator/tags.hpp"
#include "device/simulated_device.hpp"

using namespace pac::alloc;

namespace {

void require(bool holds, const char* complaint) {
  if (!holds) throw std::logic_error(complaint);
}

/// Runs `meanwhile` as a segment comes back, when the allocator holds no lock.
class Interrupting final : public SegmentSource {
 public:
  std::optional<Address> acquire(Bytes, Stream) override { return 0x7f0000000000; }
  void release(Address, Bytes) override {
    if (meanwhile) std::exchange(meanwhile, nullptr)();
  }

  std::function<void()> meanwhile;
};

const Tag kTag = tag_named("weights");

PauseOptions options(bool resume_on_allocation) {
  PauseOptions result;
  result.keep[kTag] = true;
  result.resume_on_allocation = resume_on_allocation;
  return result;
}

/// A full device: 800 MiB of the tag paused, of which 100 lie in a pool that ended, and 600 in use elsewhere.
struct Scene {
  explicit Scene(bool resume_on_allocation) {
    allocator.create_or_incref_pool({0, 1}, source);
    leave(allocate_to({0, 1}, 1_MiB, 0));
    ended = allocate_to({0, 2}, 100_MiB, kTag);
    allocator.release_pool({0, 2});
    allocator.release_pool({0, 1});
    allocator.release_pool({0, 1});
    allocator.allocate(700_MiB, 0, {}, kTag);
    allocator.pause(options(resume_on_allocation));
    in_the_way = allocator.allocate(600_MiB, 0);
  }
  Address allocate_to(PoolId pool, Bytes size, Tag tag) {
    allocator.begin_allocate_to_pool(pool, [](Stream) { return true; }, tag, false);
    const Address address = allocator.allocate(size, 0, {}, tag);
    allocator.end_allocate_to_pool(pool);
    return address;
  }
  void leave(Address address) { allocator.free(address, {}); }

  CachingAllocator allocator{std::make_shared<SimulatedDevice>(1024_MiB)};
  std::shared_ptr<Interrupting> source = std::make_shared<Interrupting>();
  Address ended = 0;
  Address in_the_way = 0;
};

void resumed_and_paused_again() {
  Scene scene(false);
  CachingAllocator& allocator = scene.allocator;
  Address late = 0;
  scene.source->meanwhile = [&] {
    scene.leave(scene.in_the_way);
    scene.leave(scene.ended);
    allocator.resume({kTag});
    allocator.empty_cache();  // the ended pool is forgotten
    late = scene.allocate_to({0, 3}, 50_MiB, kTag);
    allocator.pause(options(false));
  };
  allocator.resume({kTag});
  require(late != 0, "the lock was not dropped");
  allocator.check_invariants();
  require(allocator.paused().empty(), "a tag stays paused");
  allocator.free(late, {});
  allocator.pause(options(false));
  allocator.resume({kTag});
}

void resumed_by_two_allocations() {
  Scene scene(true);
  CachingAllocator& allocator = scene.allocator;
  Address other = 0;
  scene.source->meanwhile = [&] {
    scene.leave(scene.in_the_way);
    other = allocator.allocate(1_MiB, 0, {}, kTag);
  };
  const Address own = allocator.allocate(1_MiB, 0, {}, kTag);
  require(other != 0 && own != other, "the lock was not dropped");
  require(allocator.paused().empty(), "the tag stays paused");
  allocator.check_invariants();
}

}  // namespace

int main() {
  try {
    resumed_and_paused_again();
    resumed_by_two_allocations();
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
