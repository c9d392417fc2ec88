// The host memory that this process may still use.
#pragma once

#include "allocator/types.hpp"

namespace pac::alloc {

/// The kernel's estimate of memory available without swapping, or what the control group still allows if that is less.
Bytes available_host_memory();

}  // namespace pac::alloc
