// The link of a CUDA device, by the driver's functions.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "device/cuda_driver.hpp"
#include "device/link.hpp"

namespace pac {

class CudaLink final : public Link {
 public:
  /// Creates the device's primary context if the process has none yet. Throws DeviceError.
  explicit CudaLink(int index);
  ~CudaLink();

  Status send(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept override;
  Status bring(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept override;
  Status wait(Stream stream, Event event) noexcept override;
  void recycle(Event event) noexcept override;
  Status mark(Stream stream, Event* made) noexcept override;
  Status finish(Event event) noexcept override;
  double elapsed(Event begin, Event end) noexcept override;
  void recycle_mark(Event event) noexcept override;
  bool is_capturing(Stream stream) noexcept override;
  void* pin(std::size_t size) noexcept override;
  void unpin(void* memory, std::size_t size) noexcept override;
  std::size_t available() noexcept override;
  void describe(Status status, char* text, std::size_t capacity) noexcept override;

  /// How often each copy runs: with 2 the link is half as fast, for tests.
  int repeat = 1;
  /// The streams of the copies to the host and back, for tests that delay them.
  std::pair<Stream, Stream> streams() const;
  /// Whether device and host share one memory, so that nothing is won by copies.
  bool is_integrated() const;
  /// The PCI address, as in /sys/bus/pci/devices.
  void pci_address(char* text, int capacity) const;
  /// Measures the rates of copies to the host and back, each of `size` bytes `rounds` times, in bytes a second; waits
  /// for the copies. Throws DeviceError.
  std::pair<double, double> measure(std::size_t size, int rounds);

 private:
  template <class Call>
  CUresult inside(const Call& call) const noexcept;
  CUresult record(CUstream stream, CUevent* event, bool timed = false) noexcept;
  CUresult follow(CUstream follower, CUstream stream) noexcept;
  double timed(bool out, CUdeviceptr device, void* host, std::size_t size, int rounds);
  void check(CUresult status, const char* call) const;

  const alloc::CudaDriver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream out_ = nullptr, back_ = nullptr;
  std::mutex mutex_;  ///< guards the spare events
  std::vector<CUevent> spare_, spare_marks_;
};

}  // namespace pac
