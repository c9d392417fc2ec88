// Values between Python and the allocator: checked arguments, and references for threads without the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <string>

#include "allocator/types.hpp"

namespace pac::bindings {

/// An address, a stream or a count. TypeError for anything but an integer (neither bool nor float is one), ValueError
/// for a negative number or one beyond 64 bits; both name the argument and the value.
std::uint64_t to_number(const char* name, pybind11::handle value);

/// The same for a size in bytes; also takes a text in parse_bytes's syntax.
alloc::Bytes to_bytes(const char* name, pybind11::handle value);

/// A share: an int or float, but no bool.
double to_share(const char* name, pybind11::handle value);

/// A pair of integers.
alloc::PoolId to_pool(pybind11::handle value);

/// The calling thread's Python stack, innermost Python frame first. Any thread may drop the result, also under a lock.
alloc::Context python_stack();

/// A stack in PyTorch's format, [{filename, line, name}]; empty for a context of another library.
pybind11::list frames(const alloc::Context& context);

/// Wraps a Python function for the core, to be called from any thread, without the GIL. An exception becomes a
/// std::runtime_error that names the function.
std::function<bool(alloc::Bytes)> pressure_callback(const pybind11::object& function);
std::function<void(alloc::Bytes, alloc::Bytes, alloc::Bytes)> oom_observer(const pybind11::object& function);

/// A UserWarning of the main thread, soon. From any thread, with or without the GIL, also under a lock.
void warn_later(const std::string& text) noexcept;

/// Drops the Python references released by the core since the last call. Needs the GIL.
void collect_dropped();

}  // namespace pac::bindings
