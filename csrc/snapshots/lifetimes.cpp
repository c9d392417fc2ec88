#include "snapshots/lifetimes.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>

#include "allocator/history.hpp"
#include "common/salted_hash.hpp"
#include "snapshots/plain_data.hpp"

namespace pac::alloc {

namespace {

constexpr std::int64_t kBefore = -1;  // in place of the allocating event: the block existed before

struct Range {
  Address end;
  std::int64_t event;
  bool may_be_wrong;
};

/// Ranges that do not overlap.
class Ranges {
 public:
  using Iterator = std::map<Address, Range>::iterator;

  /// Adds a range; if another range overlaps, adds nothing and returns the other.
  Iterator add(Address begin, Range range) {
    const auto after = ranges_.lower_bound(begin);
    if (after != ranges_.end() && after->first < range.end) return after;
    if (after != ranges_.begin() && std::prev(after)->second.end > begin) return std::prev(after);
    ranges_.emplace_hint(after, begin, range);
    return ranges_.end();
  }
  Iterator none() { return ranges_.end(); }
  void remove(Iterator at) { ranges_.erase(at); }
  void remove(Address begin) { ranges_.erase(begin); }

 private:
  std::map<Address, Range> ranges_;
};

struct Place {
  std::size_t device;
  std::size_t index;

  friend std::ostream& operator<<(std::ostream& out, const Place& place) {
    return out << "device_traces[" << place.device << "], event " << place.index;
  }
};

struct Hex {
  Address value;

  friend std::ostream& operator<<(std::ostream& out, Hex hex) {
    return out << "0x" << std::hex << hex.value << std::dec;
  }
};

[[noreturn]] void refuse_overlap(const EventColumns& events, std::size_t row, const Range& other, std::size_t device) {
  std::ostringstream what;
  if (other.event == kBefore) {
    what << "a block that existed before the recording began";
  } else {
    const auto event = static_cast<std::size_t>(other.event);
    what << "the " << events.size[event] << " bytes at " << Hex{events.address[event]} << " of event " << event;
  }
  refuse(Place{device, row}, ": ", events.size[row], " bytes allocated at ", Hex{events.address[row]}, " overlap ",
         what.str(),
         ", which is not freed: events are missing or out of order (a replay needs alloc and free_completed events)");
}

struct AddressHash {
  std::size_t operator()(Address address) const { return static_cast<std::size_t>(salted_hash(0, address)); }
};

Address end_of(Address address, Bytes size) { return address + std::max<Bytes>(size, 1); }

}  // namespace

OpenLifetimes find_open_lifetimes(const EventColumns& events, std::size_t device) {
  struct State {
    std::int64_t event;
    bool lives;
    bool free_requested;
  };
  std::unordered_map<Address, State, AddressHash> blocks;
  OpenLifetimes open;
  for (std::size_t row = 0; row < events.count; ++row) {
    const auto action = events.action_at(row);
    if (action != Action::kAlloc && action != Action::kFreeRequested && action != Action::kFreeCompleted) continue;
    const Address address = events.address[row];
    const auto [at, is_new] = blocks.try_emplace(address, State{kBefore, false, false});
    State& block = at->second;
    if (action == Action::kAlloc) {
      if (block.lives) refuse_overlap(events, row, {0, block.event, false}, device);
      block = {static_cast<std::int64_t>(row), true, false};
      continue;
    }
    if (!block.lives) {
      expect(is_new, Place{device, row}, ": the block at ", Hex{address},
             " is freed and was freed before, with no alloc between: events are missing or out of order");
      open.freed.push_back({address, row});
      block.lives = true;
    }
    if (action == Action::kFreeCompleted) {
      block.lives = false;
    } else {
      expect(!block.free_requested, Place{device, row}, ": the block at ", Hex{address},
             " is freed twice: events are missing");
      block.free_requested = true;
    }
  }
  for (const auto& [address, block] : blocks) {
    if (block.lives) open.left.push_back({address, block.event});
  }
  return open;
}

std::vector<Address> check_overlaps(const EventColumns& events, const std::vector<ExistingBlock>& existing,
                                    std::size_t device) {
  std::vector<Address> contradicted;
  Ranges live;
  for (const ExistingBlock& block : existing) {
    const auto other = live.add(block.address, {end_of(block.address, block.size), kBefore, block.may_be_wrong});
    if (other == live.none()) continue;
    expect(block.may_be_wrong, "device ", device, ": two blocks that existed before the recording overlap, at ",
           Hex{other->first}, " and ", Hex{block.address}, ": events are missing or out of order");
    contradicted.push_back(block.address);
  }
  for (std::size_t row = 0; row < events.count; ++row) {
    const auto action = events.action_at(row);
    const Address address = events.address[row];
    if (action == Action::kFreeCompleted) live.remove(address);
    if (action != Action::kAlloc) continue;
    const Range range{end_of(address, events.size[row]), static_cast<std::int64_t>(row), false};
    for (auto other = live.add(address, range); other != live.none(); other = live.add(address, range)) {
      if (!other->second.may_be_wrong) refuse_overlap(events, row, other->second, device);
      contradicted.push_back(other->first);
      live.remove(other);
    }
  }
  return contradicted;
}

}  // namespace pac::alloc
