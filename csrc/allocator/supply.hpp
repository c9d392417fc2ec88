// How a heap gets memory from the device and gives it back: the strategies behind one interface.
#pragma once

#include <memory>

#include "allocator/device.hpp"
#include "allocator/heap.hpp"
#include "allocator/stream_order.hpp"

namespace pac::alloc {

enum class Effort {
  kNormal,
  kScavenge,  ///< memory is short: take free pieces from wherever they are
};

class Supply {
 public:
  Supply(Heap& heap, Device& device, StreamOrder& order);
  Supply(const Supply&) = delete;
  Supply& operator=(const Supply&) = delete;
  virtual ~Supply() = default;

  /// A free block in the request's pool that find_fit would give it; nullptr where the device or the limit refuses.
  /// `capturing`: a stream is being captured, so no event may be recorded.
  virtual Block* grow(const Request& request, Effort effort, bool capturing) = 0;
  /// Gives back cached blocks that are kept whole, so that `request` may have their memory. False: none would do.
  virtual bool release_oversize(const Request& request) = 0;
  /// Gives back all free memory of a group; under vmm growth the part that its streams have passed.
  virtual void release_unused(PoolGroup& group) = 0;
  /// Gives everything back, used or not, for the end of the allocator's life.
  virtual void release_everything() = 0;

  /// The most that may be reserved.
  Bytes limit() const;

 protected:
  bool within_limit(Bytes size) const;
  /// What may be reserved before unused memory is given back by age; kUnlimited where that is not asked for.
  Bytes garbage_threshold() const;
  /// The configured initial size at least, where the default large pool grows for the first time.
  Bytes at_least_initial(const Request& request, Bytes size);
  /// Gives back all ranges of addresses and what is mapped there, used or not.
  void release_ranges();

  Heap& heap_;
  Device& device_;
  StreamOrder& order_;
  const Bytes total_;

 private:
  bool grew_initially_ = false;
};

std::unique_ptr<Supply> make_malloc_supply(Heap& heap, Device& device, StreamOrder& order);
std::unique_ptr<Supply> make_vmm_supply(Heap& heap, Device& device, StreamOrder& order);
std::unique_ptr<Supply> make_expandable_supply(Heap& heap, Device& device, StreamOrder& order);

}  // namespace pac::alloc
