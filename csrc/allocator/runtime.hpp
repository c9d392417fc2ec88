// The process's allocators, one a device, over CUDA. The pluggable library's functions, the Python module and the
// torch subclass all reach them here, so there is one state however the allocator was attached.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "allocator/allocator.hpp"

namespace pac::alloc {

/// Changes whenever a layout or a virtual function of the headers that cross libraries does.
constexpr std::uint32_t kRuntimeVersion = 1;
/// Name of the capsule in which _core hands out its Runtime*.
constexpr char kRuntimeCapsule[] = "pyactcomp._core.runtime.v1";
/// Settings of a process that never calls configure(), in parse_config's syntax.
constexpr char kConfigVariable[] = "PYACTCOMP_ALLOC_CONF";

class Runtime {
 public:
  Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  virtual ~Runtime() = default;

  /// Sets what allocators created from now on are configured with, in place of kConfigVariable. Throws where one
  /// exists and the growth differs; other settings are applied to those that exist.
  virtual void configure(const Config& config) = 0;
  /// Reads kConfigVariable at the first use. Throws std::invalid_argument that names it where it is malformed.
  virtual Config config() = 0;
  virtual int device_count() = 0;
  /// The allocator of a device, created, with its CUDA context, at the first call. It grows by cudaMalloc where the
  /// device has no virtual memory. Throws std::invalid_argument for an index out of range, DeviceError without CUDA.
  virtual Allocator& device(int index) = 0;
  /// nullptr where the device's allocator was not created yet.
  virtual Allocator* existing(int index) noexcept = 0;
  /// Allocates on a device without changing the current one.
  virtual Address allocate(Bytes size, int device, Stream stream, Context context = {}) = 0;
  /// Looks at the calling thread's last device first. False: no allocator's address.
  virtual bool try_free(Address address, Context context = {}) = 0;
  /// The device whose allocator handed the address out, or -1.
  virtual int owner(Address address) = 0;
  /// Gives `peer` access to what `device` has mapped and will map. Devices that both have an allocator, and can
  /// reach each other, have it from the start: the plain route is not told of peers.
  virtual void enable_peer_access(int device, int peer) = 0;

  /// Memory straight from the device, kept by no allocator and in no statistics. nullopt: out of memory.
  virtual std::optional<Address> acquire_segment(Bytes size, int device) = 0;
  virtual void release_segment(Address address, Bytes size, int device) = 0;
};

/// The one of this process. It is never destroyed: tensors are freed after static destructors ran.
Runtime& runtime();

}  // namespace pac::alloc
