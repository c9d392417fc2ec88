// The port: the only door between the allocator core and a device.
//
// Contract of every function. It is called with the core's lock held, except wait() and synchronize(); it never calls
// back into the core. Sizes and addresses of virtual memory are multiples of granularity(). Running out of memory is a
// result (nullopt); any other failure throws DeviceError and leaves the device as it was. Only release(), wait() and
// synchronize() may wait for the device; no other function waits for work that a stream still has to do. The caller
// guarantees that nothing still running reads or writes memory that it releases or unmaps, and that it unmaps,
// unreserves and destroys exactly the ranges and handles that it mapped, reserved and created.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "allocator/types.hpp"

namespace pac::alloc {

class Device {
 public:
  struct Memory {
    Bytes free;
    Bytes total;
  };

  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  /// Its name in messages, "GPU 0".
  virtual std::string name() const = 0;
  virtual Memory memory() = 0;
  /// Host time spent so far inside the functions below that handle memory; the simulated device's is an estimate.
  virtual double driver_seconds() const = 0;

  // Memory whose addresses are its own (cudaMalloc).
  virtual std::optional<Address> acquire(Bytes size) = 0;
  virtual void release(Address address, Bytes size) = 0;

  // Virtual memory: a range of addresses, physical memory, and the mapping of one to the other. A handle is mapped
  // whole; it may be mapped at several addresses at once, and is destroyed only when it is mapped nowhere. map()
  // gives access to this device and to every peer that was enabled, now or later.
  virtual bool has_virtual_memory() const = 0;
  virtual Bytes granularity() const = 0;
  virtual Address reserve(Bytes size) = 0;
  virtual void unreserve(Address address, Bytes size) = 0;
  virtual std::optional<Handle> create(Bytes size) = 0;
  virtual void destroy(Handle handle, Bytes size) = 0;
  virtual void map(Address address, Bytes size, Handle handle) = 0;
  virtual void unmap(Address address, Bytes size) = 0;

  // Order between the host and streams. record() marks what the stream has been given so far; completed() asks;
  // wait() blocks the calling thread. An event goes back with recycle() once it is of no more use. None of them is
  // called for a stream that is being captured into a graph.
  virtual Event record(Stream stream) = 0;
  virtual bool completed(Event event) = 0;
  /// The streams of which events may have completed since this was asked last, by the one allocator that asks; nullopt
  /// where the device cannot tell, so that each has to be asked for.
  virtual std::optional<std::set<Stream>> advanced() { return std::nullopt; }
  virtual void wait(Event event) = 0;
  virtual void recycle(Event event) = 0;
  /// Waits for everything the device was given, on any stream. Not called while a stream is being captured.
  virtual void synchronize() = 0;
};

/// Where a private pool's segments come from when not from the device: a torch.cuda.MemPool with its own allocator.
class SegmentSource {
 public:
  SegmentSource() = default;
  SegmentSource(const SegmentSource&) = delete;
  SegmentSource& operator=(const SegmentSource&) = delete;
  virtual ~SegmentSource() = default;

  virtual std::optional<Address> acquire(Bytes size, Stream stream) = 0;
  virtual void release(Address address, Bytes size) = 0;
};

}  // namespace pac::alloc
