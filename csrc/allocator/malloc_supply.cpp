// Supply by cudaMalloc, with the native allocator's decisions (c10/cuda/CUDACachingAllocator.cpp, torch 2.11):
// replaying a recorded trace reserves as much as the recorded program did.
#include <algorithm>

#include "allocator/supply.hpp"

namespace pac::alloc {

namespace {

class MallocSupply final : public Supply {
 public:
  using Supply::Supply;

  Block* grow(const Request& request, Effort effort, bool capturing) override;
  bool release_oversize(const Request& request) override;
  void release_unused(PoolGroup& group) override;
  void release_everything() override;

 private:
  void collect_garbage();
  void give_back(Segment& segment);
  void release(Block* block);
};

Block* MallocSupply::grow(const Request& request, Effort, bool capturing) {
  if (!capturing) collect_garbage();
  const Bytes size = at_least_initial(request, acquired_size(heap_.config, request.size));
  if (!within_limit(size)) return nullptr;
  const auto address = device_.acquire(size);
  return address ? add_acquired(request, *address, size) : nullptr;
}

void MallocSupply::give_back(Segment& segment) {
  const std::shared_ptr<SegmentSource>& source = segment.pool->group.source;
  if (source) {
    returned.push_back({source, segment.address, segment.size});
  } else {
    device_.release(segment.address, segment.size);
  }
}

void MallocSupply::release(Block* block) {
  Segment& segment = *block->segment;
  give_back(segment);
  heap_.count_released(segment, segment.size, 1);
  heap_.log(Action::kSegmentFree, segment.address, segment.size, segment, heap_.releasing);
  heap_.erase_segment(segment);
}

void MallocSupply::collect_garbage() {
  const Bytes threshold = garbage_threshold();
  const auto reserved = static_cast<Bytes>(heap_.stats.reserved_bytes.all().current);
  if (reserved <= threshold) return;

  const Pool& pool = heap_.default_group().large;
  std::vector<Block*> whole;
  std::uint64_t total_age = 0;
  for (Block* block : pool.free) {
    if (block->is_split()) continue;
    whole.push_back(block);
    total_age += pool.fit_calls - block->fit_calls;
  }
  // In rounds: each gives back the blocks of at least average age.
  Bytes released = 0;
  for (bool found = true; found && !whole.empty() && released < reserved - threshold;) {
    // PyTorch compares with the average in floating point: rounded down, blocks a little too young would go too.
    const double average = static_cast<double>(total_age) / static_cast<double>(whole.size());
    std::vector<Block*> younger;
    found = false;
    for (Block* block : whole) {
      const std::uint64_t age = pool.fit_calls - block->fit_calls;
      if (static_cast<double>(age) < average) {
        younger.push_back(block);
        continue;
      }
      found = true;
      released += block->size;
      total_age -= age;
      release(block);
    }
    whole.swap(younger);
  }
}

bool MallocSupply::release_oversize(const Request& request) {
  const Bytes max_split = heap_.config.max_split_size;
  if (max_split == kUnlimited) return false;
  FreeSet& free = request.pool->free;
  const Bytes wanted = std::max(request.size, max_split);
  auto at = free.lower_bound(FitKey{request.stream, wanted, 0});
  if (at != free.end() && (*at)->stream() == request.stream) {
    if ((*at)->is_split()) return false;
    release(*at);
    return true;
  }
  // No single block is large enough: give back several, the largest first.
  Bytes released = 0;
  while (released < wanted && at != free.begin()) {
    Block* block = *std::prev(at);
    if (block->size < max_split || block->stream() != request.stream || block->is_split()) break;
    released += block->size;
    release(block);
  }
  return released >= wanted;
}

void MallocSupply::release_unused(PoolGroup& group) {
  for (Pool* pool : {&group.large, &group.small}) {
    for (auto at = pool->free.begin(); at != pool->free.end();) {
      Block* block = *at++;
      if (!block->is_split()) release(block);
    }
  }
}

void MallocSupply::release_everything() {
  for (Segment& segment : heap_.segments()) {
    if (!segment.expandable) give_back(segment);
  }
}

}  // namespace

std::unique_ptr<Supply> make_malloc_supply(Heap& heap, Device& device, StreamOrder& order) {
  return std::make_unique<MallocSupply>(heap, device, order);
}

}  // namespace pac::alloc
