// A private pool's own source may use the allocator: a source written in Python runs the garbage collector, which frees
// CUDA tensors on the same thread.
#include <functional>
#include <iostream>
#include <memory>
#include <optional>

#include "allocator/caching_allocator.hpp"
#include "device/simulated_device.hpp"

using namespace pac::alloc;

namespace {

void require(bool holds, const char* complaint) {
  if (!holds) throw std::logic_error(complaint);
}

class Reentrant final : public SegmentSource {
 public:
  explicit Reentrant(CachingAllocator& allocator) : allocator_(allocator) {}

  std::optional<Address> acquire(Bytes size, Stream) override {
    use();
    if (on_refusal) std::exchange(on_refusal, nullptr)();
    if (refuses) return std::nullopt;
    next_ += 1024_MiB;
    ++acquired;
    held += size;
    return next_;
  }
  void release(Address, Bytes size) override {
    use();
    --acquired;
    held -= size;
  }
  /// Drops a tensor, as the garbage collector may.
  void use() {
    if (garbage != 0) allocator_.free(std::exchange(garbage, 0));
    require(allocator_.stats().num_ooms >= 0, "the statistics are out of reach");
  }

  Address garbage = 0;
  std::function<void()> on_refusal;
  bool refuses = false;
  int acquired = 0;
  Bytes held = 0;

 private:
  CachingAllocator& allocator_;
  Address next_ = 0x7f0000000000;
};

void run(Growth growth) {
  Config config;
  config.growth = growth;
  std::unique_ptr<CachingAllocator> allocator =
      std::make_unique<CachingAllocator>(std::make_shared<SimulatedDevice>(8192_MiB), config);
  auto source = std::make_shared<Reentrant>(*allocator);
  const PoolId pool{0, 1};
  allocator->create_or_incref_pool(pool, source);
  source->garbage = allocator->allocate(1_MiB, 0);
  allocator->begin_allocate_to_pool(pool, [](Stream) { return true; });
  const Address first = allocator->allocate(30_MiB, 0);
  require(source->garbage == 0 && source->acquired == 1, "the source was not asked");
  allocator->check_invariants();
  source->refuses = true;
  bool refused = false;
  try {
    allocator->allocate(100_MiB, 0);
  } catch (const OutOfMemory&) {
    refused = true;
  }
  require(refused && source->acquired == 1, "a refusal is not out of memory");
  // The pool is left while its source answers, and the default pools serve.
  source->on_refusal = [&] { allocator->end_allocate_to_pool(pool); };
  const Address elsewhere = allocator->allocate(100_MiB, 0);
  require(source->acquired == 1, "a pool that was left took a segment");
  allocator->free(elsewhere);
  source->refuses = false;
  allocator->release_pool(pool);
  allocator->free(first);
  source->garbage = allocator->allocate(1_MiB, 0);
  allocator->release_pool(pool);
  allocator->empty_cache();
  require(source->garbage == 0 && source->acquired == 0 && source->held == 0, "the segment did not come back");
  allocator->check_invariants();
  allocator->create_or_incref_pool(pool, source);
  allocator->begin_allocate_to_pool(pool, [](Stream) { return true; });
  allocator->allocate(30_MiB, 0);
  allocator.reset();
  require(source->acquired == 0, "an allocator that ended kept a segment");
}

/// A pool ends, and is forgotten, while its source refuses a segment.
void end_while_refusing() {
  CachingAllocator allocator(std::make_shared<SimulatedDevice>(8192_MiB), Config{});
  auto source = std::make_shared<Reentrant>(allocator);
  const PoolId pool{0, 1};
  allocator.create_or_incref_pool(pool, source);
  allocator.begin_allocate_to_pool(pool, [](Stream) { return true; }, 0, false);
  source->refuses = true;
  source->on_refusal = [&] {
    allocator.end_allocate_to_pool(pool);
    allocator.release_pool(pool);
    allocator.release_pool(pool);
    allocator.empty_cache();
  };
  require(allocator.allocate(1_MiB, 0) != 0, "nothing was allocated");
  allocator.check_invariants();
}

}  // namespace

int main() {
  try {
    run(Growth::kVmm);
    run(Growth::kMalloc);
    end_while_refusing();
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
