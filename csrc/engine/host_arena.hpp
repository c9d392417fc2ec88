// Pinned host memory for stored bytes that have left the device: slabs, pinned once, and blocks in them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "device/link.hpp"

namespace pac::engine {

/// An event of a link, given back when nobody can wait for it any more.
class Moment {
 public:
  Moment(Link& link, Link::Event event) : link_(link), event_(event), order_(++count()) {}
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;
  ~Moment() { link_.recycle(event_); }
  Link::Event event() const { return event_; }
  /// Of two events of one stream, the later has the higher number.
  std::uint64_t order() const { return order_; }

 private:
  static std::uint64_t& count() {
    static std::uint64_t made = 0;
    return made;
  }

  Link& link_;
  Link::Event event_;
  std::uint64_t order_;
};

using When = std::shared_ptr<const Moment>;

/// Host memory of one device, used with the GIL. Blocks are cut from slabs by best fit, and free neighbours join.
///
/// Pinning waits for the device, so slabs stay pinned until `trim`. The first slabs take all that a step needs, and
/// later steps pin nothing.
///
/// A block that fits no free range takes several, the largest first, and only then memory is pinned: the bytes that are
/// missing, or a 32nd of what is pinned. So, whatever sizes are taken and given in whatever order, at most
/// taken * 33 / 32 + kSmallest + kPage bytes are pinned, of `taken` at its peak. A step gives its blocks back in about
/// the reverse order of taking them, which joins the free ranges again: nearly all blocks are in one part.
class HostArena {
 public:
  struct Part {
    char* address;
    std::size_t size;
    When after;  ///< the last copy that reads the part, which is written after that copy
  };
  using Block = std::vector<Part>;

  HostArena(Link& link, std::size_t limit) : link_(link), limit_(limit) {}
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;
  ~HostArena() { trim(); }

  /// Return a block of at least so many bytes; nothing if the limit or the host's memory does not allow it.
  std::optional<Block> take(std::size_t nbytes) {
    const std::size_t size = round_up(nbytes, kGrain);
    const std::size_t free = pinned_ - taken_;
    if (free < size && !grow(size - free)) return std::nullopt;
    Block block;
    for (std::size_t left = size; left > 0; left -= block.back().size) {
      auto found = by_size_.lower_bound({left, nullptr});
      if (found == by_size_.end()) --found;
      block.push_back(cut(found->second, left));
    }
    taken_ += size;
    peak_ = std::max(peak_, taken_);
    return block;
  }

  /// Take a block back. `after` is the last copy that reads it, or none.
  void give(const Block& block, const When& after) {
    for (const Part& part : block) give(part, after);
  }

  /// Give slabs without a block in use back to the host; return how many bytes.
  std::size_t trim() {
    std::size_t given = 0;
    for (auto slab = slabs_.begin(); slab != slabs_.end();) {
      if (slab->second.taken != 0) {
        ++slab;
        continue;
      }
      remove(slab->first);
      link_.unpin(slab->first, slab->second.size);
      given += slab->second.size;
      slab = slabs_.erase(slab);
    }
    pinned_ -= given;
    return given;
  }

  Link& link() const { return link_; }
  std::size_t pinned() const { return pinned_; }
  std::size_t taken() const { return taken_; }
  std::size_t peak() const { return peak_; }
  std::size_t pins() const { return pins_; }
  std::size_t limit() const { return limit_; }
  /// Return how many bytes may be pinned now, in all. Past this share of the available memory the program around may
  /// run out of it.
  std::size_t most() const { return std::min(limit_, (link_.available() + pinned_) / 10 * 6); }
  /// Whether the host, and not the limit, had too little memory.
  bool is_short() const { return is_short_; }
  void set_limit(std::size_t limit) { limit_ = limit; }

 private:
  struct Free {
    std::size_t size;
    When after;
    char* slab;
  };
  struct Slab {
    std::size_t size = 0;
    std::size_t taken = 0;
  };
  static constexpr std::size_t kGrain = 4096;
  static constexpr std::size_t kPage = std::size_t{2} << 20;
  static constexpr std::size_t kSmallest = std::size_t{32} << 20;
  static constexpr std::size_t kLargest = std::size_t{1} << 30;
  // Blocks of a deep model's layers are a 32nd of all: then each is pinned as it is, and nothing beside it.
  static constexpr std::size_t kSlabs = 32;

  static std::size_t round_up(std::size_t size, std::size_t to) { return (size + to - 1) / to * to; }

  static When later(const When& a, const When& b) {
    if (!a || !b) return a ? a : b;
    return a->order() > b->order() ? a : b;
  }

  static void join(Free& whole, const Free& part) {
    whole.size += part.size;
    whole.after = later(whole.after, part.after);
  }

  void insert(char* address, Free block) {
    by_size_.insert({block.size, address});
    free_.emplace(address, std::move(block));
  }

  Free remove(char* address) {
    const auto entry = free_.find(address);
    Free block = std::move(entry->second);
    by_size_.erase({block.size, address});
    free_.erase(entry);
    return block;
  }

  /// Take at most so many bytes of a free range.
  Part cut(char* address, std::size_t most) {
    const Free whole = remove(address);
    const std::size_t size = std::min(whole.size, most);
    if (whole.size > size) insert(address + size, {whole.size - size, whole.after, whole.slab});
    slabs_[whole.slab].taken += size;
    return Part{address, size, whole.after};
  }

  void give(const Part& part, const When& after) {
    const auto slab = std::prev(slabs_.upper_bound(part.address));
    slab->second.taken -= part.size;
    taken_ -= part.size;
    char* address = part.address;
    Free whole{part.size, later(part.after, after), slab->first};
    const auto next = free_.find(address + part.size);
    if (next != free_.end() && next->second.slab == slab->first) join(whole, remove(next->first));
    const auto above = free_.lower_bound(address);
    if (above != free_.begin()) {
      const auto below = std::prev(above);
      if (below->second.slab == slab->first && below->first + below->second.size == address) {
        address = below->first;
        join(whole, remove(address));
      }
    }
    insert(address, whole);
  }

  /// Pin a slab of at least so many bytes.
  bool grow(std::size_t missing) {
    const std::size_t allowed = most(), room = allowed - std::min(allowed, pinned_);
    const std::size_t wanted = std::clamp(round_up(pinned_ / kSlabs, kPage), kSmallest, kLargest);
    for (const std::size_t each : {std::max(wanted, round_up(missing, kPage)), round_up(missing, kPage), missing}) {
      if (each > room) continue;
      char* const memory = static_cast<char*>(link_.pin(each));
      if (!memory) continue;
      slabs_[memory] = {each, 0};
      insert(memory, {each, nullptr, memory});
      pinned_ += each;
      ++pins_;
      return true;
    }
    is_short_ = is_short_ || pinned_ + missing <= limit_;
    return false;
  }

  Link& link_;
  std::size_t limit_;
  std::map<char*, Slab> slabs_;
  std::map<char*, Free> free_;
  std::set<std::pair<std::size_t, char*>> by_size_;
  std::size_t pinned_ = 0, taken_ = 0, peak_ = 0, pins_ = 0;
  bool is_short_ = false;
};

}  // namespace pac::engine
