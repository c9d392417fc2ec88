// Blocks shared with other processes.
#include <atomic>

#include "allocator/caching_allocator.hpp"
#include "allocator/sharing.hpp"

namespace pac::alloc {

namespace {

/// Returns a number that no other handle of this process has had.
std::uint64_t next_shared_id() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

/// Calls visit(address, mapping) for each handle under the block.
template <class Visit>
void for_each_mapping(Block& block, Visit visit) {
  auto& mappings = block.segment->mappings;
  for (auto at = --mappings.upper_bound(block.address); at != mappings.end() && at->first < block.end(); ++at) {
    visit(at->first, at->second);
  }
}

}  // namespace

std::optional<SharedMemory> CachingAllocator::share(Address address) {
  const Lock lock(mutex_);
  Block& block = live(address);
  const Segment& segment = *block.segment;
  if (!segment.expandable) return std::nullopt;
  for_each_mapping(block, [&](Address, const Mapping& mapping) {
    if (mapping.handle == kNoHandle) throw PauseError("memory that is paused cannot be shared; call resume() first");
  });
  const auto close_unused = [&](Address, Mapping& mapping) {
    if (mapping.shared_blocks > 0 || mapping.descriptor < 0) return;
    device_->close_export(mapping.descriptor);
    mapping.descriptor = -1;
  };
  SharedMemory memory;
  SharedBlock described;
  described.owner = this_process();
  described.segment = segment.address;
  described.segment_size = segment.size;
  described.size = block.size;
  try {
    for_each_mapping(block, [&](Address begin, Mapping& mapping) {
      if (mapping.descriptor < 0) mapping.descriptor = device_->export_handle(mapping.handle);
      if (mapping.shared_id == 0) mapping.shared_id = next_shared_id();
      if (described.pieces.empty()) {
        described.begin = begin;
        described.offset = address - begin;
        memory.piece_size = mapping.size;
      }
      if (mapping.size != memory.piece_size) memory.piece_size = 0;
      described.pieces.push_back({mapping.shared_id, mapping.size, mapping.descriptor});
      memory.descriptors.push_back(mapping.descriptor);
    });
  } catch (...) {
    for_each_mapping(block, close_unused);
    throw;
  }
  if (!block.shared) {
    block.shared = true;
    for_each_mapping(block, [](Address, Mapping& mapping) { ++mapping.shared_blocks; });
  }
  memory.offset = described.offset;
  memory.text = to_text(described);
  return memory;
}

/// A shared block is freed. The owner has waited for the receivers before.
void CachingAllocator::end_sharing(Block& block) {
  block.shared = false;
  for_each_mapping(block, [&](Address, Mapping& mapping) {
    if (--mapping.shared_blocks > 0) return;
    device_->close_export(mapping.descriptor);
    mapping.descriptor = -1;
  });
}

}  // namespace pac::alloc
