// The tag of the calling thread's allocations.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "allocator/types.hpp"
#include "bindings/torch_headers.hpp"

namespace pac::bindings {

/// Torch hands these objects of a thread on to the autograd workers of its backward, so the workers have the tag of the
/// thread that called backward. A table lookup an allocation, once any tag was opened.
class ThreadTag {
 public:
  static alloc::Tag get() {
    if (C10_LIKELY(!opened().load(std::memory_order_relaxed)) || !Objects::contains(key())) return 0;
    return static_cast<const Holder&>(*Objects::get(key())).tag;
  }

  /// Returns the tag before.
  static alloc::Tag set(alloc::Tag tag) {
    const alloc::Tag before = get();
    opened().store(true, std::memory_order_relaxed);
    // No tag is the tag 0: torch 2.11 cannot take an object out again.
    Objects::set(key(), std::make_shared<Holder>(tag));
    return before;
  }

 private:
  using Objects = at::impl::ThreadLocalPythonObjects;

  /// Holds a number in place of a Python object. Nobody else asks for the key.
  struct Holder : c10::SafePyObject {
    explicit Holder(alloc::Tag of) : SafePyObject(nullptr, nullptr), tag(of) {}
    alloc::Tag tag;
  };

  static const std::string& key() {
    static const std::string text = "pyactcomp.tag";
    return text;
  }
  static std::atomic<bool>& opened() {
    static std::atomic<bool> value{false};
    return value;
  }
};

}  // namespace pac::bindings
