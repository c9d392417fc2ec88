// How a heap grows: choosing the free block for a request, getting memory from the device and giving memory back.
#pragma once

#include <memory>
#include <vector>

#include "allocator/heap.hpp"
#include "allocator/stream_order.hpp"
#include "device/device.hpp"

namespace pac::alloc {

enum class Effort {
  kNormal,
  kScavenge,  ///< memory is short: take free pieces of other pools too
};

/// Marks this thread as inside a call to a SegmentSource. The allocator makes such calls without the lock: the source
/// may free and allocate here.
class SegmentSourceCall {
 public:
  SegmentSourceCall();
  ~SegmentSourceCall();
  SegmentSourceCall(const SegmentSourceCall&) = delete;
  SegmentSourceCall& operator=(const SegmentSourceCall&) = delete;
};

/// Whether this thread is inside a call to a SegmentSource. A source made of this library's own functions must then
/// take memory from the device, not from an allocator: the pool above caches.
bool inside_segment_source();

/// A segment that goes back to its source once the lock is dropped.
struct ReturnedSegment {
  std::shared_ptr<SegmentSource> source;
  Address address = 0;
  Bytes size = 0;
};

class Supply {
 public:
  Supply(Heap& heap, Device& device, StreamOrder& order);
  Supply(const Supply&) = delete;
  Supply& operator=(const Supply&) = delete;
  virtual ~Supply() = default;

  /// The group's pool for requests of this size.
  virtual Pool& pool_of(PoolGroup& group, Bytes size) const { return size <= kSmallSize ? group.small : group.large; }
  /// The best free block for the request, or nullptr.
  Block* find_fit(const Request& request);
  /// Grows the request's pool. Returns a free block large enough there, or nullptr if the device or the limit refuses.
  /// `capturing`: a stream is being captured, so no event may be recorded.
  virtual Block* grow(const Request& request, Effort effort, bool capturing) = 0;
  /// Gives unsplit oversize blocks of the cache back to the device, to make room for the request. False: not enough.
  virtual bool release_oversize(const Request&) { return false; }
  /// Gives back a group's free memory; under vmm growth only memory whose stream has passed a fence.
  virtual void release_unused(PoolGroup& group) = 0;
  /// Waits until memory that moved is mapped nowhere else: a handle can then be destroyed.
  virtual void finish_moves() {}
  /// Segments of sources, given back by the functions above, for the caller to return without the lock.
  std::vector<ReturnedSegment> returned;
  /// Makes an acquired range of memory a segment of the request's pool; returns the block, free.
  Block* add_acquired(const Request& request, Address address, Bytes size);
  /// Gives all memory back, used or not, at the end of the allocator's life.
  virtual void release_everything() = 0;

  /// The most bytes the allocator may reserve.
  Bytes limit() const;
  bool within_limit(Bytes size) const;

 protected:
  /// Garbage collection gives back unused memory, oldest first, above this many reserved bytes; kUnlimited: never. Part
  /// of the limit, or of the device's memory without a limit.
  Bytes garbage_threshold() const;
  /// `size`, but at least initial_pool_size at the first growth of the default large pool.
  Bytes at_least_initial(const Request& request, Bytes size);
  /// Gives back all ranges of addresses and the memory mapped there, used or not.
  void release_ranges();

  Heap& heap_;
  Device& device_;
  StreamOrder& order_;
  const Bytes total_;

 private:
  /// Chooses among a stream's free blocks, from `smallest` (the smallest block large enough) on.
  virtual FreeSet::iterator best_fit(const Pool&, FreeSet::iterator smallest) const { return smallest; }

  bool grew_initially_ = false;
};

/// The native allocator's size of a segment for a request.
Bytes acquired_size(const Config& config, Bytes request);

std::unique_ptr<Supply> make_malloc_supply(Heap& heap, Device& device, StreamOrder& order);
std::unique_ptr<Supply> make_vmm_supply(Heap& heap, Device& device, StreamOrder& order);
std::unique_ptr<Supply> make_expandable_supply(Heap& heap, Device& device, StreamOrder& order);

}  // namespace pac::alloc
