// The port: the only door between the allocator core and a device.
//
// Contract of every function. The caller holds the core's lock, except for wait() and synchronize(), and the Importer's
// calls for memory of other processes; no function calls back into the core. Sizes and addresses of virtual memory are
// multiples of granularity(). Running out of memory is a result (nullopt); any other failure throws DeviceError and
// leaves the device as before. Only release(), wait(), synchronize() and the copies may wait for the device; no other
// function waits for work queued on a stream. The caller guarantees two things. No running kernel reads or writes
// memory being released or unmapped. Ranges and handles to unmap, unreserve and destroy are exactly the mapped,
// reserved and created ones.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "allocator/types.hpp"
#include "device/process.hpp"

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

  /// The device's name in messages, "GPU 0".
  virtual std::string name() const = 0;
  virtual Memory memory() = 0;
  /// Host time spent so far in the memory functions below; an estimate on the simulated device.
  virtual double driver_seconds() const = 0;

  // Memory at a fixed address (cudaMalloc).
  virtual std::optional<Address> acquire(Bytes size) = 0;
  virtual void release(Address address, Bytes size) = 0;

  // Virtual memory: a range of addresses, physical memory, and the mapping of one to the other. A handle is mapped
  // whole, may be mapped at several addresses at once, and is destroyed only when mapped nowhere. map() gives access to
  // this device and to every peer enabled now or later.
  virtual bool has_virtual_memory() const = 0;
  virtual Bytes granularity() const = 0;
  virtual Address reserve(Bytes size) = 0;
  virtual void unreserve(Address address, Bytes size) = 0;
  virtual std::optional<Handle> create(Bytes size) = 0;
  virtual void destroy(Handle handle, Bytes size) = 0;
  virtual void map(Address address, Bytes size, Handle handle) = 0;
  virtual void unmap(Address address, Bytes size) = 0;

  // Handles shared between processes. An export is a file descriptor: while it is open, other processes can import the
  // handle, and the handle is not destroyed. An imported handle is mapped and destroyed like a created one, and keeps
  // the memory until then, whatever becomes of the owner.
  virtual int export_handle(Handle handle) = 0;
  virtual void close_export(int descriptor) = 0;
  virtual Handle import_handle(const Process& owner, int descriptor, Bytes size) = 0;

  // Pinned host memory, and copies between host and device. A copy may span several mappings.
  struct Copy {
    Address device;
    Address host;
    Bytes size;
  };
  /// The bytes of host memory that could be pinned now without driving the process out of memory.
  virtual Bytes host_available() = 0;
  virtual std::optional<Address> acquire_host(Bytes size) = 0;
  virtual void release_host(Address address, Bytes size) = 0;
  /// Both wait until all copies are done. The device must have finished its work on the memory.
  virtual void copy_to_host(const std::vector<Copy>& copies) = 0;
  virtual void copy_from_host(const std::vector<Copy>& copies) = 0;

  // Order between the host and streams. record() puts an event after the work queued on the stream; completed()
  // queries the event; wait() blocks the calling thread until then. recycle() takes back an event no longer needed.
  // None of the four is called for a stream being captured into a graph.
  virtual Event record(Stream stream) = 0;
  virtual bool completed(Event event) = 0;
  /// The streams with events that may have completed since the last call, for the one allocator on this device; nullopt
  /// if the device cannot tell, so that every event must be queried.
  virtual std::optional<std::set<Stream>> advanced() { return std::nullopt; }
  virtual void wait(Event event) = 0;
  virtual void recycle(Event event) = 0;

  // Order within a graph being captured.
  struct Capture {
    CaptureId id;
    std::vector<GraphNode> frontier;  ///< what the stream's next work will depend on
  };
  /// nullopt if the stream is no part of a capture, or if the device cannot tell.
  virtual std::optional<Capture> capture(Stream stream) = 0;
  /// The nodes that this one starts after; some may be missing.
  virtual std::vector<GraphNode> dependencies(GraphNode node) = 0;

  /// Waits for all work queued on all streams. Not called while a stream is being captured.
  virtual void synchronize() = 0;
};

/// The source of a private pool's segments in place of the device: the allocator given to a torch.cuda.MemPool.
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
