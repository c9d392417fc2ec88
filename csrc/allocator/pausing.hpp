// Pausing: the physical memory of tags goes back to the device while addresses, blocks and, in host memory, the
// contents of live blocks stay.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/heap.hpp"
#include "allocator/host_store.hpp"
#include "allocator/supply.hpp"
#include "device/device.hpp"

namespace pac::alloc {

struct PauseOptions {
  std::map<Tag, bool> keep;           ///< the tags to pause, and whether to keep the contents of live blocks
  bool resume_on_allocation = false;  ///< an allocation in a paused tag resumes the tag; otherwise PauseError
};

/// A private pool that stayed as it was.
struct NotPaused {
  PoolId pool;
  Bytes bytes = 0;          ///< reserved
  const char* reason = "";  ///< "is held", say
};

struct PauseReport {
  Bytes released = 0;  ///< physical memory given back to the device
  Bytes saved = 0;     ///< contents kept in host memory
  Bytes pinned = 0;    ///< host memory pinned anew
  std::vector<NotPaused> skipped;
};

struct ResumeReport {
  Bytes mapped = 0;    ///< physical memory taken from the device
  Bytes restored = 0;  ///< contents copied back
};

struct PausedInfo {
  Tag tag = 0;
  Bytes released = 0;  ///< physical memory that resume() takes again
  Bytes saved = 0;
};

/// A piece of pinned host memory.
struct HostRange {
  Address address = 0;
  Bytes size = 0;
};

/// The paused tags of one device. Takes no lock; the caller waits for the device.
class Pausing {
 public:
  /// `supply` maps memory; nullptr where nothing can be paused.
  Pausing(std::shared_ptr<Device> device, Heap& heap, Supply* supply)
      : device_(std::move(device)), heap_(heap), supply_(supply), store_(device_) {}

  bool any() const { return !paused_.empty(); }
  bool has(Tag tag) const { return paused_.count(tag) > 0; }
  bool is_paused(const PoolGroup& group) const;
  /// Throws PauseError if the group is paused.
  void check_running(const PoolGroup& group) const;
  /// Whether an allocation in the group, which is paused, resumes the group's tag.
  bool resumes_on_allocation(const PoolGroup& group) const;
  /// Throws PauseError unless the tags can be paused now.
  void check_can_pause(const PauseOptions& options, bool capturing) const;
  /// Throws PauseError unless all the tags are paused.
  void check_paused(const std::vector<Tag>& tags) const;

  /// Copies the contents of live blocks to the host, for the tags that keep them; the tags are paused from here on.
  /// Returns the pools that can be paused. `now`: the moment up to which the device has finished all work.
  std::vector<PoolGroup*> save(const PauseOptions& options, Serial now, PauseReport& report);
  /// Gives the memory of saved pools back to the device.
  void release(const std::vector<PoolGroup*>& groups, PauseReport& report);
  /// Takes the memory again, with the contents. nullopt, without a change, if the device, the driver or the limit
  /// refuses.
  std::optional<ResumeReport> resume(const std::vector<Tag>& tags);
  /// Throws OutOfMemory, in the words of the last refusal.
  [[noreturn]] void fail(const std::vector<Tag>& tags);
  /// Drops the contents of a paused block that is freed.
  void forget(const Block& block) { paused_.at(block.pool().group.tag).saved.erase(block.address); }

  std::vector<PausedInfo> paused() const;
  /// The saved contents of a range of paused memory, in order; nothing where no contents were kept.
  std::vector<HostRange> saved(Address address, Bytes size) const;
  /// Gives host memory that no paused tag uses back to the host. Needs no lock.
  void trim_host() { store_.trim(); }

 private:
  /// A piece of a block's contents.
  struct Saved {
    Bytes offset;  ///< in the block
    Bytes size;
    std::shared_ptr<const HostStore::Chunk> chunk;
    Bytes at;  ///< in the chunk
  };
  struct Paused {
    bool resume_on_allocation = false;
    std::map<Address, std::vector<Saved>> saved;  ///< by block
  };

  std::map<Tag, Paused> copy_to_host(const PauseOptions& options, const std::vector<PoolGroup*>& groups,
                                     PauseReport& report);
  /// Unmaps and destroys every handle of the group; returns the bytes.
  Bytes take_memory(PoolGroup& group);
  /// Creates and maps every handle of the groups. False, without a change, if the device, the driver or the limit
  /// refuses; refused_ then has the driver's words.
  bool give_memory(const std::vector<PoolGroup*>& groups, ResumeReport& report);
  /// The paused groups of the tags, without the handles whose blocks were all freed.
  std::vector<PoolGroup*> paused_groups(const std::vector<Tag>& tags);

  std::shared_ptr<Device> device_;
  Heap& heap_;
  Supply* supply_;
  HostStore store_;
  std::map<Tag, Paused> paused_;
  std::string refused_;  ///< the driver's words, if it refused virtual memory during the last resume
};

}  // namespace pac::alloc
