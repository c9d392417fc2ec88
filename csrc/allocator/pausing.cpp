#include "allocator/pausing.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "allocator/tags.hpp"
#include "common/check.hpp"

namespace pac::alloc {

namespace {

/// Copies between host and device, one for neighbours on both sides. No copy spans two chunks, which the host pinned
/// apart.
class Copies {
 public:
  void add(Address device, const HostStore::Chunk& chunk, Bytes at, Bytes size) {
    const Address host = chunk.address + at;
    if (at > 0 && !list_.empty()) {
      Device::Copy& last = list_.back();
      if (last.device + last.size == device && last.host + last.size == host) {
        last.size += size;
        return;
      }
    }
    list_.push_back({device, host, size});
  }
  const std::vector<Device::Copy>& list() const { return list_; }

 private:
  std::vector<Device::Copy> list_;
};

std::string listed(const std::vector<Tag>& tags) {
  std::string text;
  for (const Tag tag : tags) text += (text.empty() ? "" : ", ") + describe(tag);
  return text;
}

/// Why a group cannot be paused; nullptr if it can.
const char* stays(const PoolGroup& group) {
  if (group.held) return "is held";
  if (group.source) return "has an allocator of its own";
  return group.by_malloc ? "is never split, so its memory comes from cudaMalloc" : nullptr;
}

constexpr char kShared[] = "is open in other processes";

/// Return the bytes of the handles that exist; paused ones have none.
Bytes mapped_bytes(const Segment& segment) {
  Bytes bytes = 0;
  for (const auto& [address, mapping] : segment.mappings) bytes += mapping.handle == kNoHandle ? 0 : mapping.size;
  return bytes;
}

Bytes mapped_bytes(const PoolGroup& group) {
  Bytes bytes = 0;
  for (const auto& [address, segment] : group.segments) bytes += mapped_bytes(*segment);
  return bytes;
}

Bytes absent_bytes(const Segment& segment) {
  Bytes bytes = 0;
  for (const auto& [address, mapping] : segment.mappings) bytes += mapping.handle == kNoHandle ? mapping.size : 0;
  return bytes;
}

}  // namespace

bool Pausing::is_paused(const PoolGroup& group) const { return has(group.tag) && !stays(group); }

void Pausing::check_running(const PoolGroup& group) const {
  if (!is_paused(group)) return;
  throw PauseError("cannot allocate on " + device_->name() + ": " + describe(group.tag) +
                   " is paused; call resume() first, or pause with on_allocation=\"resume\"");
}

bool Pausing::resumes_on_allocation(const PoolGroup& group) const {
  return is_paused(group) && paused_.at(group.tag).resume_on_allocation;
}

void Pausing::check_can_pause(const PauseOptions& options, bool capturing) const {
  if (heap_.config.growth != Growth::kVmm) {
    throw PauseError("memory of " + device_->name() +
                     " cannot be paused: it comes from cudaMalloc, whose addresses go with the memory; enable the "
                     "allocator with growth=\"vmm\"");
  }
  if (capturing) {
    throw PauseError("memory of " + device_->name() +
                     " cannot be paused while a CUDA graph is captured: end the capture first");
  }
  std::vector<Tag> twice;
  for (const auto& [tag, keep] : options.keep) {
    if (has(tag)) twice.push_back(tag);
  }
  if (!twice.empty()) throw PauseError("paused already: " + listed(twice) + "; call resume() first");
}

std::vector<PoolGroup*> Pausing::save(const PauseOptions& options, Serial now, PauseReport& report) {
  std::vector<PoolGroup*> groups;
  heap_.for_each_group([&](PoolGroup& group) {
    if (options.keep.count(group.tag) == 0) return;
    const char* const reason = stays(group);
    if (!reason) {
      if (group.is_releasable() && group.released <= now) supply_->release_unused(group);
      groups.push_back(&group);
      return;
    }
    report.skipped.push_back({group.id, 0, reason});
    for (const auto& [address, segment] : group.segments) {
      report.skipped.back().bytes += segment->expandable ? mapped_bytes(*segment) : segment->size;
    }
  });

  std::map<Tag, Paused> paused = copy_to_host(options, groups, report);
  for (auto& [tag, each] : paused) paused_[tag] = std::move(each);
  return groups;
}

void Pausing::release(const std::vector<PoolGroup*>& groups, PauseReport& report) {
  for (PoolGroup* group : groups) {
    group->paused = true;
    report.released += take_memory(*group);
    if (const Bytes stayed = mapped_bytes(*group)) report.skipped.push_back({group->id, stayed, kShared});
  }
}

std::map<Tag, Pausing::Paused> Pausing::copy_to_host(const PauseOptions& options, const std::vector<PoolGroup*>& groups,
                                                     PauseReport& report) {
  std::map<Tag, Paused> paused;
  for (const auto& [tag, keep] : options.keep) paused[tag].resume_on_allocation = options.resume_on_allocation;
  std::vector<const Block*> kept;
  for (const PoolGroup* group : groups) {
    if (!options.keep.at(group->tag)) continue;
    for (const auto& [address, segment] : group->segments) {
      for (const Block* block = segment->first; block; block = block->next) {
        if (block->state != Block::State::kAllocated || block->shared) continue;
        kept.push_back(block);
        report.saved += block->size;
      }
    }
  }
  if (kept.empty()) return paused;

  const Bytes before = store_.pinned();
  const HostStore::Chunks chunks = store_.take(report.saved);
  report.pinned = store_.pinned() - before;
  Copies copies;
  auto chunk = chunks.begin();
  Bytes used = 0;
  for (const Block* block : kept) {
    std::vector<Saved>& saved = paused[block->pool().group.tag].saved[block->address];
    for (Bytes done = 0; done < block->size;) {
      if (used == (*chunk)->size) {
        ++chunk;
        used = 0;
      }
      const Bytes size = std::min(block->size - done, (*chunk)->size - used);
      saved.push_back({done, size, *chunk, used});
      copies.add(block->address + done, **chunk, used, size);
      used += size;
      done += size;
    }
  }
  device_->copy_to_host(copies.list());
  return paused;
}

Bytes Pausing::take_memory(PoolGroup& group) {
  Bytes released = 0;
  for (const auto& [begin, segment] : group.segments) {
    for (auto& [address, mapping] : segment->mappings) {
      if (mapping.handle == kNoHandle || mapping.shared_blocks > 0) continue;
      device_->unmap(address, mapping.size);
      const Handle handle = std::exchange(mapping.handle, kNoHandle);
      heap_.count_released(*segment, mapping.size, 1);
      heap_.log(Action::kSegmentUnmap, address, mapping.size, *segment, heap_.releasing);
      device_->destroy(handle, mapping.size);
      released += mapping.size;
    }
  }
  return released;
}

void Pausing::check_paused(const std::vector<Tag>& tags) const {
  std::vector<Tag> running;
  std::copy_if(tags.begin(), tags.end(), std::back_inserter(running), [&](Tag tag) { return !has(tag); });
  if (!running.empty()) throw PauseError("not paused: " + listed(running));
}

std::vector<PoolGroup*> Pausing::paused_groups(const std::vector<Tag>& tags) {
  std::vector<PoolGroup*> groups;
  heap_.for_each_group([&](PoolGroup& group) {
    if (!group.paused || std::find(tags.begin(), tags.end(), group.tag) == tags.end()) return;
    groups.push_back(&group);
    if (group.is_releasable()) supply_->release_unused(group);
  });
  return groups;
}

void Pausing::fail(const std::vector<Tag>& tags) {
  Bytes needed = 0;
  for (const PoolGroup* group : paused_groups(tags)) {
    for (const auto& [address, segment] : group->segments) needed += absent_bytes(*segment);
  }
  const Device::Memory memory = device_->memory();
  const Bytes limit = supply_->limit();
  const std::string text = "CUDA out of memory. Tried to resume " + format_bytes(needed) + " of " + listed(tags) +
                           ". " + device_->name() + " has a total capacity of " + format_bytes(memory.total) +
                           " of which " + format_bytes(memory.free) + " is free." +
                           (limit == kUnlimited ? "" : " memory_fraction allows " + format_bytes(limit) + '.') +
                           (refused_.empty() ? "" : " The driver refused: " + refused_ + '.') +
                           " Everything is still paused: free memory in this process or in others, and resume again.";
  if (refused_.empty()) throw OutOfMemory(text);
  throw DriverRefusal(text);
}

std::optional<ResumeReport> Pausing::resume(const std::vector<Tag>& tags) {
  const std::vector<PoolGroup*> groups = paused_groups(tags);
  ResumeReport report;
  if (!give_memory(groups, report)) return std::nullopt;
  Copies copies;
  for (const Tag tag : tags) {
    for (const auto& [block, pieces] : paused_.at(tag).saved) {
      for (const Saved& piece : pieces) {
        copies.add(block + piece.offset, *piece.chunk, piece.at, piece.size);
        report.restored += piece.size;
      }
    }
  }
  try {
    if (!copies.list().empty()) device_->copy_from_host(copies.list());
  } catch (...) {
    for (PoolGroup* group : groups) take_memory(*group);
    throw;
  }
  for (PoolGroup* group : groups) group->paused = false;
  for (const Tag tag : tags) paused_.erase(tag);
  return report;
}

bool Pausing::give_memory(const std::vector<PoolGroup*>& groups, ResumeReport& report) {
  struct Given {
    Segment* segment;
    Address address;
    Mapping* mapping;
  };
  std::vector<Given> given;
  const auto take_back = [&] {
    for (const Given& each : given) {
      device_->unmap(each.address, each.mapping->size);
      device_->destroy(std::exchange(each.mapping->handle, kNoHandle), each.mapping->size);
      heap_.count_released(*each.segment, each.mapping->size, 1);
      heap_.log(Action::kSegmentUnmap, each.address, each.mapping->size, *each.segment, heap_.releasing);
    }
  };
  // The memory at the address; false if the device or the limit refuses.
  const auto give = [&](Address address, Mapping& mapping) {
    const auto handle = supply_->within_limit(mapping.size) ? device_->create(mapping.size) : std::nullopt;
    if (!handle) return false;
    try {
      device_->map(address, mapping.size, *handle);
    } catch (...) {
      device_->destroy(*handle, mapping.size);
      throw;
    }
    mapping.handle = *handle;
    return true;
  };
  refused_.clear();
  try {
    for (const PoolGroup* group : groups) {
      for (const auto& [begin, segment] : group->segments) {
        for (auto& [address, mapping] : segment->mappings) {
          if (mapping.handle != kNoHandle) continue;
          if (!give(address, mapping)) {
            take_back();
            return false;
          }
          heap_.count_reserved(*segment, mapping.size, 1);
          heap_.log(Action::kSegmentMap, address, mapping.size, *segment, segment->context);
          given.push_back({segment, address, &mapping});
          report.mapped += mapping.size;
        }
      }
    }
  } catch (const DeviceError& error) {
    // Page tables and addresses run out too, as in attempt().
    refused_ = error.what();
    take_back();
    return false;
  }
  return true;
}

std::vector<PausedInfo> Pausing::paused() const {
  std::map<Tag, PausedInfo> all;
  for (const auto& [tag, each] : paused_) {
    PausedInfo& info = all[tag];
    info.tag = tag;
    for (const auto& [block, pieces] : each.saved) {
      for (const Saved& piece : pieces) info.saved += piece.size;
    }
  }
  for (const Segment& segment : heap_.segments()) {
    if (segment.pool->group.paused) all[segment.pool->group.tag].released += absent_bytes(segment);
  }
  std::vector<PausedInfo> result;
  for (const auto& [tag, info] : all) result.push_back(info);
  return result;
}

std::vector<HostRange> Pausing::saved(Address address, Bytes size) const {
  std::vector<HostRange> found;
  const Address end = address + size;
  for (const auto& [tag, paused] : paused_) {
    for (const auto& [block, pieces] : paused.saved) {
      for (const Saved& piece : pieces) {
        const Address begin = block + piece.offset;
        if (begin >= end || begin + piece.size <= address) continue;
        const Address from = std::max(begin, address);
        found.push_back({piece.chunk->address + piece.at + (from - begin), std::min(begin + piece.size, end) - from});
      }
    }
  }
  return found;
}

}  // namespace pac::alloc
