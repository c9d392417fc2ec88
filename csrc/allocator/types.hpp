// The allocator's vocabulary. Addresses, streams and events are numbers here: the core never dereferences them.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace pac::alloc {

using Address = std::uint64_t;
using Bytes = std::uint64_t;
using Stream = std::uint64_t;  ///< the value of a cudaStream_t; 0 is the default stream
using Event = std::uint64_t;
using CaptureId = std::uint64_t;  ///< of one capture of work into a graph, and of no other in the process
using GraphNode = std::uint64_t;  ///< of a graph being captured
using Handle = std::uint64_t;     ///< mappable physical memory
using Tag = std::uint32_t;        ///< a part of the memory, paused and resumed together; 0: memory without a tag

constexpr Bytes operator""_KiB(unsigned long long count) { return count << 10; }
constexpr Bytes operator""_MiB(unsigned long long count) { return count << 20; }

constexpr Bytes round_up(Bytes size, Bytes multiple) { return (size + multiple - 1) / multiple * multiple; }
constexpr Bytes round_down(Bytes size, Bytes multiple) { return size / multiple * multiple; }

/// Names a private pool as PyTorch does; {0, 0} is everybody's default pool.
struct PoolId {
  std::uint64_t first = 0;
  std::uint64_t second = 0;

  bool is_default() const { return first == 0 && second == 0; }
  friend bool operator==(const PoolId& a, const PoolId& b) { return a.first == b.first && a.second == b.second; }
  friend bool operator!=(const PoolId& a, const PoolId& b) { return !(a == b); }
  friend bool operator<(const PoolId& a, const PoolId& b) {
    return a.first != b.first ? a.first < b.first : a.second < b.second;
  }
};

/// The caller's data beside an event or a memory block, such as the call stack of the allocation. Opaque to the core.
using Context = std::shared_ptr<void>;

/// Every fallback failed. The text begins as PyTorch's does and names the setting that would help.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The device has memory, and the driver refused a mapping, an address or an access right.
class DriverRefusal final : public OutOfMemory {
 public:
  using OutOfMemory::OutOfMemory;
};

/// There is no such private pool, or the pool is not in the state that the call needs. A RuntimeError, as torch's.
class PoolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The memory that a call needs is paused, or cannot be paused or resumed now. Nothing was changed.
class PauseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The address was never handed out, or was freed before.
class UnknownAddress : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace pac::alloc
