// Live memory blocks by address. Open addressing: the node of std::unordered_map would cost a free more than all other
// work (an allocation and two cache misses).
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "allocator/types.hpp"

namespace pac::alloc {

template <class Value>
class AddressTable {
 public:
  AddressTable() : slots_(kInitial) {}

  std::size_t size() const { return count_; }

  /// nullptr if the address is unknown.
  Value* find(Address address) const {
    for (std::size_t at = home(address); slots_[at].value; at = next(at)) {
      if (slots_[at].address == address) return slots_[at].value;
    }
    return nullptr;
  }

  void insert(Address address, Value* value) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    place(address, value);
    ++count_;
  }

  void erase(Address address) {
    std::size_t hole = home(address);
    while (slots_[hole].address != address) hole = next(hole);
    // Entries whose probe sequence crosses the hole move back: no search ends early, and no marker is left.
    for (std::size_t at = next(hole); slots_[at].value; at = next(at)) {
      const std::size_t probes = (at - home(slots_[at].address)) & (slots_.size() - 1);
      if (probes >= ((at - hole) & (slots_.size() - 1))) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole] = {};
    --count_;
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.value) visit(slot.address, *slot.value);
    }
  }

 private:
  struct Slot {
    Address address = 0;
    Value* value = nullptr;
  };
  static constexpr std::size_t kInitial = 1024;  // 16 KiB; a training step holds a few thousand blocks

  // Fibonacci hashing of the 512-byte unit: neighbouring blocks land far apart.
  std::size_t home(Address address) const {
    return static_cast<std::size_t>(((address >> 9) * 0x9E3779B97F4A7C15ULL) >> 20) & (slots_.size() - 1);
  }
  std::size_t next(std::size_t at) const { return (at + 1) & (slots_.size() - 1); }

  void place(Address address, Value* value) {
    std::size_t at = home(address);
    while (slots_[at].value) at = next(at);
    slots_[at] = {address, value};
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.value) place(slot.address, slot.value);
    }
  }

  std::vector<Slot> slots_;
  std::size_t count_ = 0;
};

}  // namespace pac::alloc
