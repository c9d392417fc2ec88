#include "memory_model.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace stress {
namespace {

// Numbers of physical bytes: more handles than a run creates, each larger than a device.
constexpr unsigned kOffsetBits = 40;

std::string range_text(Address address, Bytes size) {
  std::ostringstream text;
  text << std::showbase << std::hex << address << std::dec << " (" << size << " bytes)";
  return text.str();
}

}  // namespace

void UseMap::cut(std::uint64_t at) {
  const auto after = ranges_.upper_bound(at);
  if (after == ranges_.begin()) return;
  const auto range = std::prev(after);
  if (range->first == at || range->second.end <= at) return;
  ranges_.emplace_hint(after, at, range->second);
  range->second.end = at;
}

void UseMap::erase(std::uint64_t begin, std::uint64_t end) {
  cut(begin);
  cut(end);
  ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
}

void UseMap::set(std::uint64_t begin, Range range) {
  erase(begin, range.end);
  ranges_.emplace(begin, std::move(range));
}

template <class Visit>
void MemoryModel::pieces(Address address, Bytes size, Visit visit) const {
  while (size > 0) {
    const SimulatedDevice::Piece piece = device_.physical(address);
    const Bytes here = std::min(size, piece.size);
    const std::uint64_t begin = (piece.handle << kOffsetBits) + piece.offset;
    visit(begin, begin + here);
    address += here;
    size -= here;
  }
}

PoolLife MemoryModel::allocated(Address address, Bytes size, Stream stream, PoolLife pool) {
  addresses_.visit(address, address + size, [&](const UseMap::Range& range) {
    require(!range.live, "the block at ", range_text(address, size), " overlaps a live one");
  });
  PoolLife owner = pool;
  pieces(address, size, [&](std::uint64_t begin, std::uint64_t end) {
    physical_.visit(begin, end, [&](const UseMap::Range& range) {
      require(!range.live, "the block at ", range_text(address, size), " has the memory of a live one elsewhere");
      for (const Use& use : range.uses) {
        require(use.stream == stream || device_.finished(use.stream, use.point), "the block at ",
                range_text(address, size), " was handed to stream ", stream, " while stream ", use.stream,
                " may still use its memory");
      }
      if (range.pool == pool || alive.count(range.pool) == 0) return;
      require(pool == 0 && lent.count(range.pool) > 0, "the block at ", range_text(address, size),
              " has memory of a private pool that is not its own");
      owner = range.pool;
    });
  });
  addresses_.set(address, {address + size, true, owner, {}});
  pieces(address, size, [&](std::uint64_t begin, std::uint64_t end) { physical_.set(begin, {end, true, owner, {}}); });
  return owner;
}

void MemoryModel::freed(Address address, Bytes size, PoolLife pool, const std::vector<Use>& uses,
                        const std::vector<std::pair<Address, Bytes>>& there) {
  addresses_.set(address, {address + size, false, pool, uses});
  for (const auto& [begin, bytes] : there) {
    pieces(begin, bytes,
           [&](std::uint64_t first, std::uint64_t end) { physical_.set(first, {end, false, pool, uses}); });
  }
}

void MemoryModel::resumed(Address address, Bytes size) {
  addresses_.visit_with_begin(address, address + size, [&](std::uint64_t begin, const UseMap::Range& range) {
    const std::uint64_t from = std::max(begin, address);
    pieces(from, std::min(range.end, address + size) - from, [&](std::uint64_t first, std::uint64_t end) {
      physical_.set(first, {end, range.live, range.pool, range.uses});
    });
  });
}

void MemoryModel::taking(Address address, Bytes size, bool waits) {
  const std::string what = "the memory at " + range_text(address, size) + " was taken away ";
  addresses_.visit(address, address + size, [&](const UseMap::Range& range) {
    expect(!range.live, what + "from a live block");
    expect(alive.count(range.pool) == 0, what + "from a private pool that lives");
    for (const Use& use : range.uses) {
      expect(waits || device_.finished(use.stream, use.point),
             what + "while stream " + std::to_string(use.stream) + " may still use it");
    }
  });
  addresses_.erase(address, address + size);
}

void MemoryModel::expect(bool holds, const std::string& complaint) {
  if (!holds && complaint_.empty()) complaint_ = complaint;
}

void MemoryModel::destroyed(Handle handle) { physical_.erase(handle << kOffsetBits, (handle + 1) << kOffsetBits); }

bool MemoryModel::is_used(Address address, Bytes size) const {
  bool used = false;
  addresses_.visit(address, address + size, [&](const UseMap::Range& range) { used |= range.live; });
  return used;
}

std::optional<Address> WatchedDevice::acquire(Bytes size) {
  const std::optional<Address> address = device_.acquire(size);
  if (address) mapped.emplace(*address, size);
  return address;
}

void WatchedDevice::release(Address address, Bytes size) {
  const Handle handle = device_.physical(address).handle;
  model_.expect(model_.captured.empty(), "memory was released during a capture");
  model_.taking(address, size, /*waits=*/true);
  device_.release(address, size);
  model_.destroyed(handle);
  mapped.erase(address);
}

void WatchedDevice::destroy(Handle handle, Bytes size) {
  device_.destroy(handle, size);
  model_.destroyed(handle);
}

void WatchedDevice::map(Address address, Bytes size, Handle handle) {
  device_.map(address, size, handle);
  mapped.emplace(address, size);
  if (pausing) model_.resumed(address, size);
}

void WatchedDevice::unmap(Address address, Bytes size) {
  if (!pausing) model_.taking(address, size, /*waits=*/false);
  device_.unmap(address, size);
  mapped.erase(address);
}

std::vector<std::pair<Address, Bytes>> WatchedDevice::with_memory(Address address, Bytes size) const {
  std::vector<std::pair<Address, Bytes>> parts;
  auto next = mapped.upper_bound(address);
  if (next != mapped.begin()) --next;
  for (; next != mapped.end() && next->first < address + size; ++next) {
    const Address begin = std::max(address, next->first);
    const Address end = std::min(address + size, next->first + next->second);
    if (begin < end) parts.emplace_back(begin, end - begin);
  }
  return parts;
}

Event WatchedDevice::record(Stream stream) {
  model_.expect(model_.captured.count(stream) == 0, "an event was recorded on a stream that is being captured");
  return device_.record(stream);
}

void WatchedDevice::synchronize() {
  model_.expect(model_.captured.empty(), "the device was synchronised during a capture");
  device_.synchronize();
}

}  // namespace stress
