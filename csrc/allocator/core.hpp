// The caching allocator of one device.
#pragma once

#include <memory>

#include "allocator/allocator.hpp"
#include "allocator/config.hpp"
#include "allocator/device.hpp"

namespace pac::alloc {

/// Throws std::invalid_argument for settings out of range. A device without virtual memory grows by malloc whatever is
/// asked; config() tells.
std::shared_ptr<Allocator> make_allocator(std::shared_ptr<Device> device, const Config& config = {});

/// Whether this thread is in a call of a SegmentSource, which an allocator makes under its lock: a source that is made
/// of this library's own functions must take memory from the device then, not from an allocator.
bool inside_segment_source();

}  // namespace pac::alloc
