// Segments are counted in the order of their allocation, which is the same in processes that allocate alike: NCCL
// registers them by it. Addresses are no such order.
#include <algorithm>
#include <iostream>
#include <memory>
#include <vector>

#include "allocator/caching_allocator.hpp"
#include "device/simulated_device.hpp"
#include "stress.hpp"

using namespace pac::alloc;
using stress::require;

namespace {

void run() {
  Config config;
  config.growth = Growth::kMalloc;
  CachingAllocator allocator(std::make_shared<SimulatedDevice>(8192_MiB), config);
  const Address first = allocator.allocate(30_MiB, 0);
  const Address second = allocator.allocate(40_MiB, 0);
  allocator.free(first);
  allocator.empty_cache();
  const Address third = allocator.allocate(30_MiB, 0);
  require(third == first && first < second, "the device did not use the address again, so this proves nothing");
  std::vector<SegmentInfo> segments = allocator.segments();
  require(segments.size() == 2 && segments[0].address == third, "segments are not told in the order of addresses");
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) { return a.order < b.order; });
  require(segments[0].address == second && segments[1].address == third, "a newer segment comes before an older one");
  require(segments[0].order == 0 && segments[1].order == 1, "segments are not counted from zero");
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
