// What crosses between Python and the allocator: checked arguments, and references that threads without the GIL hold.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>

#include "allocator/types.hpp"

namespace pac::bindings {

/// An address, a stream or a count. TypeError for what is no integer (neither bool nor float is one) and ValueError for
/// what is negative or beyond 64 bits; both name the argument and what was got.
std::uint64_t to_number(const char* name, pybind11::handle value);

/// The same for bytes, which may also be a text as parse_bytes takes it.
alloc::Bytes to_bytes(const char* name, pybind11::handle value);

/// A share: an int or float, but no bool.
double to_share(const char* name, pybind11::handle value);

/// A pair of integers.
alloc::PoolId to_pool(pybind11::handle value);

/// The calling thread's Python stack, innermost frame first. Any thread may drop it, also under a lock.
alloc::Context python_stack();

/// A stack as PyTorch writes it, [{filename, line, name}]; empty for a context that is none of ours.
pybind11::list frames(const alloc::Context& context);

/// Python functions as the core calls them: from any thread, without the GIL. What they raise becomes a
/// std::runtime_error that names the function.
std::function<bool(alloc::Bytes)> pressure_callback(const pybind11::object& function);
std::function<void(alloc::Bytes, alloc::Bytes, alloc::Bytes)> oom_observer(const pybind11::object& function);

/// Drops the Python references that the core has let go of since the last call. Needs the GIL.
void collect_dropped();

}  // namespace pac::bindings
