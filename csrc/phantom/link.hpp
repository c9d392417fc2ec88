// A link to a host that is not there: copies of memory without elements are done at once, and pinned memory is an
// address. What a tape takes and gives back does not depend on how far copies have come, so it is what a GPU would see.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/link.hpp"

namespace pac::phantom {

class NoLink final : public Link {
 public:
  Status send(Stream, const Copy*, std::size_t, Event* done) noexcept override {
    *done = 0;
    return 0;
  }
  Status bring(Stream, const Copy*, std::size_t count, Event* done) noexcept override {
    for (std::size_t i = 0; i < count; ++i) done[i] = 0;
    return 0;
  }
  Status wait(Stream, Event) noexcept override { return 0; }
  void recycle(Event) noexcept override {}
  Status mark(Stream, Event* made) noexcept override {
    *made = 0;
    return 0;
  }
  Status finish(Event) noexcept override { return 0; }
  double elapsed(Event, Event) noexcept override { return 0; }
  void recycle_mark(Event) noexcept override {}
  bool is_capturing(Stream) noexcept override { return false; }

  void* pin(std::size_t size) noexcept override {
    next_ += size + kGap;                          // so that no two slabs touch
    return reinterpret_cast<void*>(next_ - size);  // NOLINT(performance-no-int-to-ptr): nobody reads there
  }
  void unpin(void*, std::size_t) noexcept override {}
  std::size_t available() noexcept override { return std::size_t{1} << 60; }

  void describe(Status, char* text, std::size_t capacity) noexcept override {
    if (capacity > 0) *text = '\0';  // no call fails
  }

 private:
  static constexpr std::uintptr_t kGap = 4096;
  std::uintptr_t next_ = std::uintptr_t{1} << 40;
};

}  // namespace pac::phantom
