// Longer than 400 lines: one way to grow, whose parts change together.
//
// Growth by virtual memory. Each pool has a range of addresses per stream, filled from the bottom. Physical memory
// comes in handles. When a request fits nowhere, whole free handles are mapped anew after another free block. The only
// unusable memory is then the free part of partly used handles. A handle that moves away leaves a gap between two such
// parts; a later request that misses few bytes there fills the gap and uses both.
//
// A piece that moves is mapped at the new address at once and unmapped from the old one later, when the stream has
// passed an event: kernels already launched may still touch the old address, and waiting for them would stall the host.
#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/supply.hpp"
#include "common/check.hpp"

namespace pac::alloc {

namespace {

// The driver's cost is per handle (25 us to create and map 20 MiB, 35 us for 64 MiB, H200), the waste is the free part
// of a partly used handle. Over fifty variants of five recorded training runs (`python -m bench alloc --parts traces`),
// peak reserved over peak allocated was 1.022 on average with handles of 20 to 64 MiB, and 1.020 with 20 to 32 MiB at
// 1.5 times the driver's time. With handles as large as requests it was 1.09 in the recorded runs.
// With handles of 2 MiB sixteen published training steps reserved 1.003 (median) times what was live, with these 1.009,
// at a twenty-fourth of the driver's time. The small pool has handles of 2 MiB: where it took free ones of
// 20 MiB, the driver's time fell by 6 %, but a few small blocks kept these from large requests when memory was short.
constexpr Bytes kLargestHandle = 64_MiB;

// A free block gives its handles away only if at most a quarter of it stays in partly used ones: the next
// request of the block's size needs it whole. The bound is lifted when memory is short.
constexpr Bytes kMostLeft = 4;  ///< of a block's size, as a divisor

// Addresses cost nothing: twice the device's memory leaves room to move pieces up before the old addresses are free.
constexpr Bytes kAddressesPerMemory = 2;

// The first range of a private pool: a driver hands out 128 TiB, and thousands of graphs may have two each.
constexpr Bytes kPrivateAddresses = 4096_MiB;

/// A whole handle inside a free block.
struct Piece {
  Block* block;
  Address address;
  Mapping mapping;
};

/// Where a pool grows.
struct Place {
  Block* room = nullptr;  ///< unmapped
  Bytes need = 0;         ///< bytes to map from the room's beginning on; a free block before the room serves the rest
  Bytes most = 0;         ///< bytes that may be mapped there; `need` where the block beyond the room serves a part too
};

Block* if_free(Block* block) { return block && block->state == Block::State::kFree ? block : nullptr; }

/// From the highest address down: cutting off the last piece keeps the `block` of the other pieces valid.
void sort_from_end(std::vector<Piece>& pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.address > b.address; });
}

class VmmSupply final : public Supply {
 public:
  using Supply::Supply;

  /// Oversize blocks have a pool apart: no smaller request splits them.
  Pool& pool_of(PoolGroup& group, Bytes size) const override {
    return size >= heap_.config.max_split_size ? group.oversize : Supply::pool_of(group, size);
  }
  Block* grow(const Request& request, Effort effort, bool capturing) override;
  void release_unused(PoolGroup& group) override;
  void finish_moves() override;
  void release_everything() override;

 private:
  /// Pieces moved away from a stream's addresses; the old mappings stay until the event.
  struct Retired {
    Event event = 0;
    std::vector<std::pair<Block*, Mapping>> pieces;
  };

  Bytes granularity() const { return device_.granularity(); }
  Block* add_range(const Request& request, Bytes least);
  Place find_place(const Request& request, Bytes wanted);
  /// Unmapped addresses, at least `most` bytes, after the largest free block with enough of them.
  Block* find_room(const Request& request, Bytes most);
  template <class Visit>
  void for_each_piece(Pool& pool, Visit visit);
  void find_pieces(Pool& pool, const Request& request, const Place& place, std::vector<Piece>& found);
  std::vector<Piece> choose_pieces(const Request& request, const Place& place, Effort effort);
  bool create_handles(const Request& request, Bytes need, Bytes most, std::vector<Mapping>& made);
  Block* put(Block* room, Mapping mapping, Serial freed);
  Block* move(Block* room, std::vector<Piece>& pieces);
  void count_move(const Segment& from, Segment& to, Mapping mapping);
  void settle();
  void release_pieces(std::vector<Piece>& pieces);
  void collect_garbage(const Block* keep);
  void erase_if_empty(Segment& segment);

  std::map<std::pair<Pool*, Stream>, std::vector<Segment*>> ranges_;
  std::vector<Retired> retired_;
  std::unordered_map<Handle, int> old_mappings_;  ///< number of old addresses at which a handle is still mapped
};

Block* VmmSupply::grow(const Request& request, Effort effort, bool capturing) {
  if (!capturing) settle();
  if (request.size > total_) return nullptr;  // more than the device's memory: reserve no addresses
  Pool& pool = *request.pool;
  const Bytes wanted = at_least_initial(request, request.size);
  if (wanted > total_) return nullptr;  // the next attempt asks for less
  Place place = find_place(request, wanted);
  Block* const room = place.room;
  Block* const base = if_free(room->previous);

  // A private pool's free memory belongs to a graph, and no event may be recorded while a stream is captured.
  std::vector<Piece> pieces;
  if (!capturing && !pool.group.is_private()) pieces = choose_pieces(request, place, effort);
  for (const Piece& piece : pieces) {
    place.need -= std::min(place.need, piece.mapping.size);
    place.most -= piece.mapping.size;
  }

  std::vector<Mapping> made;
  if (!create_handles(request, place.need, place.most, made)) {
    for (const Mapping& mapping : made) device_.destroy(mapping.handle, mapping.size);
    if (pool.oversize) erase_if_empty(*room->segment);
    return nullptr;
  }
  Segment& segment = *room->segment;
  segment.context = *request.context;
  Block* grown = base;
  std::size_t mapped = 0;
  try {
    if (!pieces.empty()) grown = move(room, pieces);
    for (; mapped < made.size(); ++mapped) {
      grown = put(grown ? grown->next : room, made[mapped], 0);
      heap_.count_reserved(segment, made[mapped].size, 1);
    }
  } catch (...) {
    for (; mapped < made.size(); ++mapped) device_.destroy(made[mapped].handle, made[mapped].size);
    if (pool.oversize) erase_if_empty(segment);
    throw;
  }
  if (!capturing) collect_garbage(grown);
  return grown;
}

Block* VmmSupply::add_range(const Request& request, Bytes least) {
  Pool& pool = *request.pool;
  Bytes most = kAddressesPerMemory * total_;
  // A private pool begins small, and each further range is twice as large.
  const std::size_t ranges = std::min<std::size_t>(ranges_[{&pool, request.stream}].size(), 8);
  if (pool.group.is_private()) most = std::min(most, kPrivateAddresses << ranges);
  Bytes size = round_up(pool.oversize ? least : std::max(least, most), granularity());
  Address address = 0;
  try {
    address = device_.reserve(size);
  } catch (const DeviceError&) {
    // Even addresses run out if very many pools and streams have a range each.
    size = round_up(least, granularity());
    address = device_.reserve(size);
  }
  Segment& segment = heap_.add_segment(address, size, request.stream, pool, true, *request.context);
  ranges_[{&pool, request.stream}].push_back(&segment);
  return segment.first;
}

Place VmmSupply::find_place(const Request& request, Bytes wanted) {
  Pool& pool = *request.pool;
  // The fewest missing bytes: beside the free block that serves most of the request, or between two that do.
  Place best;
  const auto consider = [&](Block* room) {
    if (!room || room->state != Block::State::kUnmapped) return;
    const Block* before = if_free(room->previous);
    const Block* beyond = if_free(room->next);
    const Bytes lacking = wanted - std::min(wanted, before ? before->size : 0);
    const Bytes need = round_up(lacking, granularity());
    Place place{room, need, room->size};
    if (need > room->size) {
      if (!beyond || room->size + beyond->size < lacking) return;
      place.need = place.most = room->size;
    }
    const auto rank = [](const Place& each) { return std::make_pair(each.need, each.room->address); };
    if (!best.room || rank(place) < rank(best)) best = place;
  };
  if (!pool.oversize) {
    for (auto at = pool.free.lower_bound(FitKey{request.stream, granularity(), 0});
         at != pool.free.end() && (*at)->stream() == request.stream; ++at) {
      consider((*at)->previous);
      consider((*at)->next);
    }
  }
  if (best.room) return best;
  // The last handle may be larger than the bytes left to cover; one granule more keeps the next mapping apart. No
  // handle is larger than the device's memory, whatever large_segment_size says.
  const Bytes least = std::min(heap_.config.large_segment_size, round_up(total_, granularity()));
  const Bytes most = pool.oversize ? round_up(wanted, granularity()) : wanted + kLargestHandle + least;
  Block* room = find_room(request, most);
  const Block* before = if_free(room->previous);
  return {room, round_up(wanted - std::min(wanted, before ? before->size : 0), granularity()), room->size};
}

Block* VmmSupply::find_room(const Request& request, Bytes most) {
  Pool& pool = *request.pool;
  if (pool.oversize) return add_range(request, most);
  for (auto at = pool.free.lower_bound(FitKey{request.stream, kUnlimited, 0}); at != pool.free.begin();) {
    const Block* block = *--at;
    if (block->stream() != request.stream) break;
    Block* room = block->next;
    if (room && room->state == Block::State::kUnmapped && room->size >= most) return room;
  }
  for (Segment* segment : ranges_[{&pool, request.stream}]) {
    for (Block* block = segment->first; block; block = block->next) {
      if (block->state == Block::State::kUnmapped && block->size >= most) return block;
    }
  }
  return add_range(request, most);
}

template <class Visit>
void VmmSupply::for_each_piece(Pool& pool, Visit visit) {
  for (auto next = pool.free.begin(); next != pool.free.end();) {
    Block* const block = *next;
    if (block->size < granularity()) {  // smaller than any handle: on to the stream's first block that may hold one
      next = pool.free.lower_bound(FitKey{block->stream(), granularity(), 0});
      continue;
    }
    const auto& mappings = block->segment->mappings;
    for (auto at = mappings.lower_bound(block->address); at != mappings.end(); ++at) {
      if (at->first + at->second.size > block->end()) break;
      visit(Piece{block, at->first, at->second});
    }
    ++next;
  }
}

void VmmSupply::find_pieces(Pool& pool, const Request& request, const Place& place, std::vector<Piece>& found) {
  for_each_piece(pool, [&](const Piece& piece) {
    const Stream stream = piece.block->stream();
    // What lies beside the room serves the request where it is.
    if (piece.block == place.room->previous || piece.block == place.room->next) return;
    if (stream != request.stream && !order_.passed(stream, piece.block->freed)) {
      order_.fence(stream, heap_.clock());  // so that passed() can tell the next time
      return;
    }
    found.push_back(piece);
  });
}

std::vector<Piece> VmmSupply::choose_pieces(const Request& request, const Place& place, Effort effort) {
  std::vector<Piece> found;
  find_pieces(*request.pool, request, place, found);
  if (effort == Effort::kScavenge) {
    PoolGroup& group = request.pool->group;
    for (Pool* pool : {&group.large, &group.oversize, &group.small}) {
      if (pool != request.pool) find_pieces(*pool, request, place, found);
    }
  }
  if (effort == Effort::kNormal) {
    std::unordered_map<const Block*, Bytes> whole;
    for (const Piece& piece : found) whole[piece.block] += piece.mapping.size;
    const auto leaves_much = [&](const Piece& piece) {
      return piece.block->size - whole[piece.block] > piece.block->size / kMostLeft;
    };
    found.erase(std::remove_if(found.begin(), found.end(), leaves_much), found.end());
  }
  Bytes need = place.need;
  Bytes room = place.most;
  // The fewest moves: take the largest pieces first, then the smallest piece that covers the rest.
  std::sort(found.begin(), found.end(), [](const Piece& a, const Piece& b) {
    return a.mapping.size != b.mapping.size ? a.mapping.size > b.mapping.size : a.address < b.address;
  });
  std::vector<Piece> chosen;
  const Piece* cover = nullptr;
  for (const Piece& piece : found) {
    if (need == 0) break;
    if (piece.mapping.size <= need) {
      chosen.push_back(piece);
      need -= piece.mapping.size;
      room -= piece.mapping.size;
    } else {
      cover = &piece;
    }
  }
  // An oversize segment is kept whole: nothing may be left over. A larger handle may reach beyond the room, where other
  // memory is mapped.
  const bool covers = cover && cover->mapping.size <= room && !request.pool->oversize;
  if (need > 0 && covers) chosen.push_back(*cover);
  sort_from_end(chosen);
  return chosen;
}

bool VmmSupply::create_handles(const Request& request, Bytes need, Bytes most, std::vector<Mapping>& made) {
  const bool small = request.pool->kind == PoolKind::kSmall;
  const Bytes least = small ? kSmallBuffer : request.pool->oversize ? 0 : heap_.config.large_segment_size;
  if (!within_limit(need)) return false;
  Bytes held = 0;
  const auto create = [&](Bytes size) {
    if (!within_limit(held + size)) return false;
    const auto handle = device_.create(size);
    if (!handle) return false;
    made.push_back({*handle, size});
    held += size;
    return true;
  };
  while (need > 0) {
    const Bytes exact = std::min(need, kLargestHandle);
    const Bytes size = std::min(std::max(exact, round_up(least, granularity())), most - held);
    if (!create(size) && (size == exact || !create(exact))) return false;
    need -= std::min(need, made.back().size);
  }
  return true;
}

Block* VmmSupply::put(Block* room, Mapping mapping, Serial freed) {
  Segment& segment = *room->segment;
  const Address address = room->address;
  device_.map(address, mapping.size, mapping.handle);
  segment.mappings[address] = mapping;
  heap_.log(Action::kSegmentMap, address, mapping.size, segment, segment.context);
  Block* block = heap_.isolate(room, address, mapping.size, Block::State::kFree);
  block->freed = freed;
  return heap_.join_free(block);
}

Block* VmmSupply::move(Block* room, std::vector<Piece>& pieces) {
  // Record the events before any piece moves: if a stream cannot record, nothing has changed.
  std::map<Stream, Retired> retired;
  const auto retire = [&] {
    for (auto& [stream, each] : retired) {
      if (each.pieces.empty()) {
        order_.recycle(each.event);
      } else {
        retired_.push_back(std::move(each));
      }
    }
  };
  Block* grown = nullptr;
  try {
    for (const Piece& piece : pieces) {
      const Stream stream = piece.block->stream();
      if (retired.count(stream) == 0) retired[stream] = Retired{device_.record(stream), {}};
    }
    for (const Piece& piece : pieces) {
      Segment& from = *piece.block->segment;
      grown = put(grown ? grown->next : room, piece.mapping, piece.block->freed);
      heap_.remove_free(piece.block);
      Block* old = heap_.isolate(piece.block, piece.address, piece.mapping.size, Block::State::kRetired);
      from.mappings.erase(piece.address);
      heap_.log(Action::kSegmentUnmap, piece.address, piece.mapping.size, from, heap_.releasing);
      ++old_mappings_[piece.mapping.handle];
      retired[from.stream].pieces.emplace_back(old, piece.mapping);
      count_move(from, *grown->segment, piece.mapping);
    }
  } catch (...) {
    retire();
    throw;
  }
  retire();
  return grown;
}

void VmmSupply::count_move(const Segment& from, Segment& to, Mapping mapping) {
  ++heap_.stats.num_pieces_moved;
  if (from.stream != to.stream) ++heap_.stats.num_stream_steals;
  if (from.pool == to.pool) {
    ++heap_.stats.num_device_alloc;
  } else {
    heap_.count_released(from, mapping.size, 1);
    heap_.count_reserved(to, mapping.size, 1);
    --heap_.stats.num_device_free;  // the unmapping follows in settle()
  }
}

void VmmSupply::settle() {
  for (std::size_t i = 0; i < retired_.size();) {
    Retired& batch = retired_[i];
    if (!device_.completed(batch.event)) {
      ++i;
      continue;
    }
    while (!batch.pieces.empty()) {
      const auto [block, mapping] = batch.pieces.back();
      device_.unmap(block->address, mapping.size);
      batch.pieces.pop_back();
      ++heap_.stats.num_device_free;
      if (--old_mappings_[mapping.handle] == 0) old_mappings_.erase(mapping.handle);
      block->state = Block::State::kUnmapped;
      Segment& segment = *heap_.join_unmapped(block)->segment;
      if (segment.pool->oversize) erase_if_empty(segment);
    }
    order_.recycle(batch.event);
    std::swap(batch, retired_.back());
    retired_.pop_back();
  }
}

void VmmSupply::release_pieces(std::vector<Piece>& pieces) {
  sort_from_end(pieces);
  for (const Piece& piece : pieces) {
    Segment& segment = *piece.block->segment;
    const bool has_memory = piece.mapping.handle != kNoHandle;
    if (has_memory) device_.unmap(piece.address, piece.mapping.size);
    heap_.remove_free(piece.block);
    heap_.join_unmapped(heap_.isolate(piece.block, piece.address, piece.mapping.size, Block::State::kUnmapped));
    segment.mappings.erase(piece.address);
    if (!has_memory) continue;
    heap_.count_released(segment, piece.mapping.size, 1);
    heap_.log(Action::kSegmentUnmap, piece.address, piece.mapping.size, segment, heap_.releasing);
    device_.destroy(piece.mapping.handle, piece.mapping.size);
  }
}

void VmmSupply::release_unused(PoolGroup& group) {
  settle();
  std::vector<Piece> unused;
  for (Pool* pool : {&group.large, &group.oversize, &group.small}) {
    for_each_piece(*pool, [&](const Piece& piece) {
      const bool passed = piece.mapping.handle == kNoHandle || order_.passed(piece.block->stream(), piece.block->freed);
      if (passed && old_mappings_.count(piece.mapping.handle) == 0) unused.push_back(piece);
    });
  }
  release_pieces(unused);
  for (auto at = group.segments.begin(); at != group.segments.end();) {
    Segment& segment = *(at++)->second;
    erase_if_empty(segment);
  }
}

void VmmSupply::finish_moves() {
  for (const Retired& batch : retired_) device_.wait(batch.event);
  settle();
}

void VmmSupply::collect_garbage(const Block* keep) {
  const Bytes threshold = garbage_threshold();
  auto reserved = static_cast<Bytes>(heap_.stats.reserved_bytes.all().current);
  if (reserved <= threshold) return;
  std::vector<Piece> unused;
  heap_.for_each_pool([&](Pool& pool) {
    if (pool.group.is_private() || pool.group.paused || pool.kind == PoolKind::kSmall) return;
    for_each_piece(pool, [&](const Piece& piece) {
      if (piece.block == keep || old_mappings_.count(piece.mapping.handle) != 0) return;
      const Stream stream = piece.block->stream();
      if (order_.passed(stream, piece.block->freed)) {
        unused.push_back(piece);
      } else {
        order_.fence(stream, heap_.clock());
      }
    });
  });
  std::stable_sort(unused.begin(), unused.end(),
                   [](const Piece& a, const Piece& b) { return a.block->freed < b.block->freed; });
  std::size_t oldest = 0;
  while (oldest < unused.size() && reserved > threshold) reserved -= unused[oldest++].mapping.size;
  unused.resize(oldest, Piece{});
  release_pieces(unused);
}

void VmmSupply::erase_if_empty(Segment& segment) {
  if (segment.first->state != Block::State::kUnmapped || segment.first->next) return;
  device_.unreserve(segment.address, segment.size);
  const auto found = ranges_.find({segment.pool, segment.stream});
  std::vector<Segment*>& ranges = found->second;
  ranges.erase(std::find(ranges.begin(), ranges.end(), &segment));
  if (ranges.empty()) ranges_.erase(found);  // the pool may be erased next
  heap_.erase_segment(segment);
}

void VmmSupply::release_everything() {
  for (const Retired& batch : retired_) {
    for (const auto& [block, mapping] : batch.pieces) device_.unmap(block->address, mapping.size);
    device_.recycle(batch.event);
  }
  release_ranges();
}

}  // namespace

std::unique_ptr<Supply> make_vmm_supply(Heap& heap, Device& device, StreamOrder& order) {
  return std::make_unique<VmmSupply>(heap, device, order);
}

}  // namespace pac::alloc
