// What the library for torch asks of the process's allocators, one a device: virtual functions, for the reason in
// allocator.hpp.
#pragma once

#include <memory>
#include <string>

#include "allocator/allocator.hpp"

namespace pac::alloc {

/// Name of the capsule with _core's Runtime*. Raise the number whenever a layout or a virtual function changes in a
/// header that crosses libraries.
constexpr char kRuntimeCapsule[] = "pyactcomp._core.runtime.v6";

class Runtime {
 public:
  Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// The settings of allocators created from now on. Reads PYACTCOMP_ALLOC_CONF at the first use.
  /// Throws std::invalid_argument, naming the variable, if malformed.
  virtual Config config() = 0;
  /// The device's allocator. The first call creates the allocator and the CUDA context. Without virtual memory on the
  /// device, growth is by cudaMalloc. Throws std::invalid_argument for an index out of range, DeviceError without CUDA.
  virtual Allocator& device(int index) = 0;
  /// nullptr if the device's allocator was not created yet.
  virtual Allocator* existing(int index) noexcept = 0;
  /// Frees the address, trying the calling thread's last device first. False: no allocator has the address.
  virtual bool try_free(Address address, Context context = {}) = 0;
  /// The device of the allocator with this address, or -1.
  virtual int owner(Address address) = 0;
  /// Gives `peer` access to all memory mapped on `device`, now and later. Devices with an allocator and a peer
  /// connection have access from the start: the pluggable route is not told of peers.
  virtual void enable_peer_access(int device, int peer) = 0;
  /// Opens a block that another process shared; the address of its first handle on `device`, valid while a copy lives.
  /// nullptr if the text is not of Allocation::share. Throws std::invalid_argument for a damaged text, DeviceError.
  virtual std::shared_ptr<const Address> open_shared(const std::string& text, int device) = 0;

 protected:
  ~Runtime() = default;
};

}  // namespace pac::alloc
