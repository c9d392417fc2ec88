// One CUDA device, as device.hpp asks of a device.
//
// Makes driver calls only, each inside the device's primary context, which torch uses too. So a call may come from any
// thread, with any current device, and leaves the CUDA runtime's last error alone. Each call is made in relaxed capture
// mode, because some thread of the process may be capturing a graph.
//
// acquire(), release() and enable_peer() may be called without the core's lock. At process exit the driver goes first:
// functions that give memory or events back then do nothing, and every event counts as completed.
#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "device/cuda_driver.hpp"
#include "device/device.hpp"

namespace pac::alloc {

class CudaDevice final : public Device {
 public:
  /// Creates the device's primary context if the process has none yet. Throws DeviceError.
  explicit CudaDevice(int index);
  ~CudaDevice() override;

  /// Throws DeviceError if there is no driver.
  static int count();
  static bool can_access_peer(int device, int peer);

  std::string name() const override { return "GPU " + std::to_string(index_); }
  Memory memory() override;
  double driver_seconds() const override;
  std::optional<Address> acquire(Bytes size) override;
  void release(Address address, Bytes size) override;
  bool has_virtual_memory() const override { return granularity_ != 0; }
  /// Why there is no virtual memory; empty if there is.
  const std::string& unmappable() const { return unmappable_; }
  Bytes granularity() const override { return granularity_; }
  Address reserve(Bytes size) override;
  void unreserve(Address address, Bytes size) override;
  std::optional<Handle> create(Bytes size) override;
  void destroy(Handle handle, Bytes size) override;
  void map(Address address, Bytes size, Handle handle) override;
  void unmap(Address address, Bytes size) override;
  int export_handle(Handle handle) override;
  void close_export(int descriptor) override;
  Handle import_handle(const Process& owner, int descriptor, Bytes size) override;
  Bytes host_available() override;
  std::optional<Address> acquire_host(Bytes size) override;
  void release_host(Address address, Bytes size) override;
  void copy_to_host(const std::vector<Copy>& copies) override;
  void copy_from_host(const std::vector<Copy>& copies) override;
  Event record(Stream stream) override;
  bool completed(Event event) override;
  void wait(Event event) override;
  void recycle(Event event) override;
  std::optional<Capture> capture(Stream stream) override;
  std::vector<GraphNode> dependencies(GraphNode node) override;
  void synchronize() override;

  /// Lets `peer` read and write all memory mapped here, now and later. Acquired memory needs cudaDeviceEnablePeerAccess
  /// instead, called by torch. Throws DeviceError if the two devices cannot reach each other.
  void enable_peer(int peer);

 private:
  struct What {
    const char* call;
    Bytes size = 0;
    Address address = 0;
  };

  template <class Call>
  CUresult inside(CUcontext context, Call&& call) const;
  template <class Call>
  CUresult inside(Call&& call) const {
    return inside(context_, call);
  }
  template <class Call>
  CUresult timed(Call&& call);
  template <class Call>
  void give_back(const What& what, Call&& call);
  void check(CUresult status, const What& what) const;
  void look_for_virtual_memory();
  std::string find_mappable_properties();
  CUresult try_mapping(const char** call);
  /// Calls `one` with each copy and a stream, then waits for the stream.
  template <class One>
  void copy(const char* call, const std::vector<Copy>& copies, One&& one);
  CUresult record_elsewhere(CUstream stream, CUevent* event);

  const CudaDriver& driver_;
  int index_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUmemAllocationProp properties_{};  ///< guarded by the core's lock
  Bytes granularity_ = 0;             ///< 0: no virtual memory
  std::string unmappable_;
  std::atomic<std::int64_t> driver_ns_{0};
  // Guarded by the core's lock, as record() and recycle() are.
  std::vector<CUevent> spare_events_;
  std::set<CUevent> foreign_events_;  ///< events in use, of other devices' contexts

  std::mutex mutex_;  ///< guards the members below
  std::map<Address, Bytes> mappings_;
  std::vector<CUmemAccessDesc> access_;  ///< this device, then its peers
};

}  // namespace pac::alloc
