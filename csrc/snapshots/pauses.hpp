// Memory that a recorded program paused: pages unmapped under live blocks. Nothing else does that: an allocator unmaps
// free memory, and a block is allocated in mapped memory.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "snapshots/event_columns.hpp"

namespace pac::alloc {

/// A block alive before the first event.
struct BlockBefore {
  Address address = 0;
  Bytes size = 0;
  Bytes absent = 0;  ///< bytes in pages without memory
};

/// Follows the live blocks through a recording's events. Throws std::invalid_argument for events that no allocator has.
class PauseTracker {
 public:
  struct Change {
    Address address;
    std::int64_t source;  ///< the row of the allocation, or ~i for block i of those before the first event
  };

  PauseTracker(const EventColumns& events, const std::vector<BlockBefore>& before);

  /// Takes the next event.
  void advance();
  std::size_t row() const { return row_; }
  /// The blocks that lost the first of their pages in the last event; resumed(): those whose last page it mapped again.
  const std::vector<Change>& paused() const { return paused_; }
  const std::vector<Change>& resumed() const { return resumed_; }
  /// Bytes of live blocks without memory, in all.
  Bytes absent() const { return absent_; }
  /// Calls visit(address, absent bytes) for each paused block.
  template <class Visit>
  void for_each_paused(Visit visit) const {
    for (const auto& [address, block] : live_) {
      if (block.absent > 0) visit(address, block.absent);
    }
  }

 private:
  struct Live {
    Address end;
    Bytes absent;
    std::int64_t source;
  };

  void add(Address address, Bytes size, Bytes absent, std::int64_t source);
  void remove(Address address);
  void change_pages(Address begin, Address end, bool mapped);

  EventColumns events_;
  std::size_t row_ = 0;
  bool has_completions_;
  std::map<Address, Live> live_;
  Bytes absent_ = 0;
  std::uint64_t visits_ = 0;
  std::vector<Change> paused_, resumed_;
};

struct Pauses {
  std::vector<Address> before;      ///< blocks paused before the first event, since pages are mapped under them
  std::vector<BlockBefore> after;   ///< blocks paused after the last event, with their bytes without memory
  std::vector<std::uint64_t> rows;  ///< the events that paused blocks
  Bytes most = 0;                   ///< the peak of the paused bytes
};

/// `before`: the blocks before the first event. `absent` counts if an event maps pages under one of these blocks: else
/// the file's segments do not tell.
/// Follows the first `count` events.
Pauses find_pauses(const EventColumns& events, std::vector<BlockBefore> before, std::size_t count);

}  // namespace pac::alloc
