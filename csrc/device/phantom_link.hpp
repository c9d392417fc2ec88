// A link of phantom tensors: nothing is copied, as neither end has memory. The tape that uses it allocates and frees on
// the device as it would over a real link, which an estimate counts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>

#include "device/link.hpp"

namespace pac {

class PhantomLink final : public Link {
 public:
  Status send(Stream, const Copy*, std::size_t, Event* done) noexcept override {
    *done = kOver;
    return 0;
  }
  Status bring(Stream, const Copy*, std::size_t count, Event* done) noexcept override {
    for (std::size_t i = 0; i < count; ++i) done[i] = kOver;
    return 0;
  }
  Status wait(Stream, Event) noexcept override { return 0; }
  void recycle(Event) noexcept override {}
  Status mark(Stream, Event* made) noexcept override {
    *made = kOver;
    return 0;
  }
  Status finish(Event) noexcept override { return 0; }
  double elapsed(Event, Event) noexcept override { return 0; }
  void recycle_mark(Event) noexcept override {}
  bool is_capturing(Stream) noexcept override { return false; }

  void* pin(std::size_t size) noexcept override {
    next_ += size;
    return reinterpret_cast<void*>(next_ - size);  // NOLINT(performance-no-int-to-ptr): an address that nobody reads
  }
  void unpin(void*, std::size_t) noexcept override {}
  std::size_t available() noexcept override { return std::numeric_limits<std::size_t>::max() / 2; }

  void describe(Status, char* text, std::size_t capacity) noexcept override {
    std::snprintf(text, capacity, "a link of phantom tensors does not fail");
  }

 private:
  static constexpr Event kOver = 1;
  std::uintptr_t next_ = std::uintptr_t{1} << 32;
};

}  // namespace pac
