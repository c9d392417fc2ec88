// How a heap grows: which free block serves a request, and how memory comes from the device and goes back.
#pragma once

#include <memory>

#include "allocator/heap.hpp"
#include "allocator/stream_order.hpp"
#include "device/device.hpp"

namespace pac::alloc {

enum class Effort {
  kNormal,
  kScavenge,  ///< memory is short: take free pieces from wherever they are
};

/// A call of a SegmentSource, which an allocator makes under its lock.
class SegmentSourceCall {
 public:
  SegmentSourceCall();
  ~SegmentSourceCall();
  SegmentSourceCall(const SegmentSourceCall&) = delete;
  SegmentSourceCall& operator=(const SegmentSourceCall&) = delete;
};

/// Whether this thread is in a call of a SegmentSource. A source that is made of this library's own functions must take
/// memory from the device then, not from an allocator.
bool inside_segment_source();

class Supply {
 public:
  Supply(Heap& heap, Device& device, StreamOrder& order);
  Supply(const Supply&) = delete;
  Supply& operator=(const Supply&) = delete;
  virtual ~Supply() = default;

  /// The pool of a group that serves requests of this size.
  virtual Pool& pool_of(PoolGroup& group, Bytes size) const { return size <= kSmallSize ? group.small : group.large; }
  /// The best free block that a request may have, or nullptr.
  Block* find_fit(const Request& request);
  /// A free block in the request's pool that find_fit would give it; nullptr where the device or the limit refuses.
  /// `capturing`: a stream is being captured, so no event may be recorded.
  virtual Block* grow(const Request& request, Effort effort, bool capturing) = 0;
  /// Gives back cached blocks that are kept whole, so that the request may have their memory. False: none would do.
  virtual bool release_oversize(const Request&) { return false; }
  /// Gives back all free memory of a group; under vmm growth the part that its streams have passed.
  virtual void release_unused(PoolGroup& group) = 0;
  /// Gives everything back, used or not, for the end of the allocator's life.
  virtual void release_everything() = 0;

  /// The most that may be reserved.
  Bytes limit() const;

 protected:
  bool within_limit(Bytes size) const;
  /// The bytes reserved from which unused memory is given back by age; kUnlimited where no setting asks for that.
  Bytes garbage_threshold() const;
  /// The configured initial size at least, where the default large pool grows for the first time.
  Bytes at_least_initial(const Request& request, Bytes size);
  /// Gives back all ranges of addresses and the memory mapped there, used or not.
  void release_ranges();

  Heap& heap_;
  Device& device_;
  StreamOrder& order_;
  const Bytes total_;

 private:
  /// Chooses among the free blocks of a stream from `smallest` on, the smallest that fits.
  virtual FreeSet::iterator best_fit(const Pool&, FreeSet::iterator smallest) const { return smallest; }

  bool grew_initially_ = false;
};

std::unique_ptr<Supply> make_malloc_supply(Heap& heap, Device& device, StreamOrder& order);
std::unique_ptr<Supply> make_vmm_supply(Heap& heap, Device& device, StreamOrder& order);
std::unique_ptr<Supply> make_expandable_supply(Heap& heap, Device& device, StreamOrder& order);

}  // namespace pac::alloc
