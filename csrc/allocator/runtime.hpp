// The process's allocators, one per device, over CUDA. The pluggable library, the Python module and the torch subclass
// all use this Runtime, so there is one state, however the allocator was attached.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "allocator/allocator.hpp"

namespace pac::alloc {

/// Name of the capsule with _core's Runtime*. Raise the number whenever a layout or a virtual function changes in a
/// header that crosses libraries.
constexpr char kRuntimeCapsule[] = "pyactcomp._core.runtime.v5";
/// Environment variable with the settings of a process without a call to configure(), in parse_config's syntax.
constexpr char kConfigVariable[] = "PYACTCOMP_ALLOC_CONF";

class Runtime {
 public:
  Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  virtual ~Runtime() = default;

  /// Sets the configuration of allocators created from now on, in place of kConfigVariable, and applies it to existing
  /// ones. Throws if an allocator exists and the growth differs.
  virtual void configure(const Config& config) = 0;
  /// Reads kConfigVariable at the first use. Throws std::invalid_argument, naming the variable, if malformed.
  virtual Config config() = 0;
  virtual int device_count() = 0;
  /// Sets who is told, once, that a device maps no memory and so grows by malloc though its growth was to be vmm.
  /// Called without the lock, from any thread; must not throw.
  virtual void on_growth_by_malloc(std::function<void(const std::string&)> told) = 0;
  /// The device's allocator. The first call creates the allocator and the CUDA context. Without virtual memory on the
  /// device, growth is by cudaMalloc. Throws std::invalid_argument for an index out of range, DeviceError without CUDA.
  virtual Allocator& device(int index) = 0;
  /// nullptr if the device's allocator was not created yet.
  virtual Allocator* existing(int index) noexcept = 0;
  /// Allocates on a device without changing the current one.
  virtual Address allocate(Bytes size, int device, Stream stream, Context context = {}) = 0;
  /// Frees the address, trying the calling thread's last device first. False: no allocator has the address.
  virtual bool try_free(Address address, Context context = {}) = 0;
  /// The device of the allocator with this address, or -1.
  virtual int owner(Address address) = 0;
  /// Gives `peer` access to all memory mapped on `device`, now and later. Devices with an allocator and a peer
  /// connection have access from the start: the pluggable route is not told of peers.
  virtual void enable_peer_access(int device, int peer) = 0;

  /// Opens a block that another process shared; the address of its first handle on `device`, valid while a copy lives.
  /// nullptr if the text is not of Allocator::share. Throws std::invalid_argument for a damaged text, DeviceError.
  virtual std::shared_ptr<const Address> open_shared(const std::string& text, int device) = 0;

  /// Memory straight from the device, not cached and in no statistics. nullopt: out of memory.
  virtual std::optional<Address> acquire_segment(Bytes size, int device) = 0;
  virtual void release_segment(Address address, Bytes size, int device) = 0;
};

/// The process's Runtime. Never destroyed: tensors are freed after static destructors ran.
Runtime& runtime();

}  // namespace pac::alloc
