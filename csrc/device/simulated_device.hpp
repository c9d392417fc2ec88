// A simulated device: tests run the core on it without a GPU, and replays run recordings on it.
//
// The simulation is strict. Every call the real driver would reject or, worse, not notice throws std::logic_error,
// naming the call, and changes nothing: sizes or addresses off the granularity, overlapping mappings, mapping part of a
// handle or a dead one, destroying a mapped handle, unmapping or releasing memory that was never mapped or acquired;
// destroying a handle with an open export, importing one closed, of another size or twice.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include "device/device.hpp"

namespace pac::alloc {

/// Part of an address space: disjoint ranges, each in the lowest hole large enough.
class AddressSpace {
 public:
  AddressSpace(Address begin, Bytes size) : begin_(begin), end_(begin + size), full_to_(begin) {}

  std::optional<Address> take(Bytes size);
  /// Takes this range, inside the space or not. False, without a change, if misaligned or partly taken.
  bool take_at(Address address, Bytes size);
  void give_back(Address address);
  /// Whether exactly this range was taken.
  bool holds(Address address, Bytes size) const;
  /// Whether the range lies within a taken range.
  bool covers(Address address, Bytes size) const;

 private:
  Address begin_;
  Address end_;
  Address full_to_;  ///< no hole lies below: a search begins here
  std::map<Address, Bytes> taken_;
};

class SimulatedDevice final : public Device {
 public:
  struct Calls {
    std::uint64_t acquire = 0, release = 0, reserve = 0, unreserve = 0, create = 0, destroy = 0, map = 0, unmap = 0;
    std::uint64_t exports = 0, imports = 0;
    std::uint64_t record = 0, query = 0, wait = 0, synchronize = 0, dependencies = 0;
    /// The calls that wait for the device: wait, synchronize and release.
    std::uint64_t synchronising = 0;
  };
  /// Physical bytes, up to the end of their mapping. No two live handles or segments share a handle number.
  struct Piece {
    Handle handle;
    Bytes offset;
    Bytes size;
  };

  /// `asynchronous`: events complete by complete() or by a call that waits; otherwise at once.
  explicit SimulatedDevice(Bytes capacity, bool virtual_memory = true, bool asynchronous = true);

  std::string name() const override { return "simulated GPU"; }
  Memory memory() override;
  /// An estimate from calls timed on a GPU, event calls included. Reserving addresses was not timed and counts as free.
  double driver_seconds() const override;
  std::optional<Address> acquire(Bytes size) override;
  void release(Address address, Bytes size) override;
  bool has_virtual_memory() const override { return virtual_memory_; }
  Bytes granularity() const override { return 2_MiB; }
  Address reserve(Bytes size) override;
  void unreserve(Address address, Bytes size) override;
  std::optional<Handle> create(Bytes size) override;
  void destroy(Handle handle, Bytes size) override;
  void map(Address address, Bytes size, Handle handle) override;
  void unmap(Address address, Bytes size) override;
  int export_handle(Handle handle) override;
  void close_export(int descriptor) override;
  /// From any simulated device of this process, itself included: a table that they share stands for the kernel.
  Handle import_handle(const Process& owner, int descriptor, Bytes size) override;
  Bytes host_available() override;
  std::optional<Address> acquire_host(Bytes size) override;
  void release_host(Address address, Bytes size) override;
  void copy_to_host(const std::vector<Copy>& copies) override { copy("copy_to_host", copies, true); }
  void copy_from_host(const std::vector<Copy>& copies) override { copy("copy_from_host", copies, false); }
  Event record(Stream stream) override;
  bool completed(Event event) override;
  std::optional<std::set<Stream>> advanced() override;
  void wait(Event event) override;
  void recycle(Event event) override;
  std::optional<Capture> capture(Stream stream) override;
  std::vector<GraphNode> dependencies(GraphNode node) override;
  void synchronize() override;

  /// Host time in memory calls alone, without event calls.
  double memory_seconds() const;
  /// The address of segments acquired from now on, unless already taken; a replay knows the recorded one. 0: the lowest
  /// hole.
  void suggest(Address address) { suggested_.store(address, std::memory_order_relaxed); }

  /// Lets the oldest `count` events of a stream complete, or all of them.
  void complete(Stream stream, std::uint64_t count = UINT64_MAX);
  void complete_all();
  /// Makes the next `count` calls of this name ("acquire", "acquire_host", "copy", "create", "map", "reserve", "export"
  /// or "import") fail, after `skip` successful ones: acquire, acquire_host and create as out of memory, the others by
  /// throwing DeviceError. Replaces the earlier setting for the name.
  void fail(const std::string& call, std::uint64_t count, std::uint64_t skip = 0);

  // A capture: work launched on its streams becomes nodes of a graph. Nodes are numbered anew once no capture is left.
  void begin_capture(Stream stream);
  /// Queues work on a stream of a capture.
  void launch(Stream stream);
  /// Lets the stream wait for the work of `awaited`, and become part of the capture.
  void join(Stream stream, Stream awaited);
  /// Ends the capture of the stream, for all its streams.
  void end_capture(Stream stream);

  /// Writes or reads the 512 bytes at an address as one number; memory never written holds 0.
  void write(Address address, std::uint64_t value);
  std::uint64_t read(Address address) const;
  /// The host memory that may still be pinned.
  void limit_host(Bytes bytes);
  /// Bytes of reserved addresses.
  Bytes addresses() const;
  /// Bytes of pinned host memory.
  Bytes pinned() const;

  /// Calls the driver would have seen, failed ones included.
  Calls calls() const;
  Bytes capacity() const { return capacity_; }
  /// Bytes of live handles and acquired segments. Imported handles count on the device that created them.
  Bytes reserved() const;
  /// Bytes of destroyed handles that other devices still import.
  Bytes kept_by_importers() const { return kept_->load(); }
  std::uint64_t open_exports() const;
  /// The same number for the same physical memory, on every device that exported or imported it; 0 otherwise.
  std::uint64_t shared_memory(Address address) const;
  /// Events recorded and not recycled.
  std::uint64_t live_events() const;
  /// The physical memory at an address; std::logic_error if there is none.
  Piece physical(Address address) const;
  /// Now, as a point in the order of events: work queued on a stream before now precedes the stream's next event.
  Event now() const;
  /// Whether completed events and waiting calls prove the stream finished with all work queued before the point.
  bool finished(Stream stream, Event point) const;

 private:
  struct Mapping {
    Bytes size;
    Handle handle;
  };
  struct Shared;
  struct Physical {
    Bytes size;
    std::uint64_t mappings = 0;
    std::shared_ptr<Shared> shared = nullptr;  ///< once exported, or imported
    int descriptor = -1;                       ///< of the open export
    bool imported = false;
  };
  struct Kernel;
  static Kernel& kernel();
  struct Failure {
    std::uint64_t count = 0;
    std::uint64_t skip = 0;
  };

  /// The number at each 512 bytes of one piece of memory that were written.
  using Contents = std::map<Bytes, std::uint64_t>;

  void copy(const char* call, const std::vector<Copy>& copies, bool to_host);
  Piece piece_at(const char* call, Address address) const;
  bool fails(const char* call);
  void succeeded(const char* call);
  std::map<Address, Mapping>::const_iterator mapping_at(const char* call, Address address) const;
  void check_virtual(const char* call, Address address, Bytes size) const;
  void finish(Stream stream, Event last);
  void finish_all();
  Stream stream_of(const char* call, Event event) const;
  Capture& capture_of(const char* call, Stream stream);

  Bytes capacity_;
  bool virtual_memory_;
  bool asynchronous_;

  mutable std::mutex mutex_;  // waiting is done without the core's lock, and tests complete events from other threads
  Bytes reserved_ = 0;
  double memory_us_ = 0.0;
  double events_us_ = 0.0;
  std::atomic<Address> suggested_ = 0;
  Calls calls_;
  std::map<std::string, Failure> failures_;

  AddressSpace acquired_;
  AddressSpace virtual_;
  std::map<Address, Mapping> mapped_;  // acquired segments too, each under a handle number of its own
  std::unordered_map<Handle, Physical> handles_;
  std::shared_ptr<std::atomic<Bytes>> kept_ = std::make_shared<std::atomic<Bytes>>(0);
  Handle next_handle_ = 1;

  AddressSpace host_;
  Bytes pinned_ = 0;
  Bytes addresses_ = 0;
  Bytes host_limit_;
  std::unordered_map<Handle, Contents> contents_;
  std::map<Address, std::uint64_t> host_contents_;

  std::unordered_map<Event, Stream> events_;
  std::map<Stream, std::set<Event>> pending_;  // numbers ascend, so the oldest is the first
  std::map<Stream, Event> done_;               // the youngest completed event
  std::set<Stream> advanced_;
  std::map<Stream, Capture> captured_;
  std::map<GraphNode, std::vector<GraphNode>> nodes_;  // of the captures in progress, with their dependencies
  CaptureId next_capture_ = 1;
  Event all_done_ = 0;  // the youngest point at which every stream had finished
  Event next_event_ = 1;
};

}  // namespace pac::alloc
