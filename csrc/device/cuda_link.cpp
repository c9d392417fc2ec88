#include "device/cuda_link.hpp"

#include <cstdio>
#include <string>

#include "common/check.hpp"
#include "device/host_memory.hpp"

namespace pac {
namespace {

CUevent event_in(Link::Event event) {
  return reinterpret_cast<CUevent>(event);  // NOLINT(performance-no-int-to-ptr)
}

CUstream stream_in(Link::Stream stream) {
  return reinterpret_cast<CUstream>(stream);  // NOLINT(performance-no-int-to-ptr)
}

CUdeviceptr address_of(void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

/// Runs `call`, which must not throw, with the context current.
template <class Call>
CUresult CudaLink::inside(const Call& call) const noexcept {
  if (alloc::forked_after_cuda()) return CUDA_ERROR_NOT_INITIALIZED;
  const CUresult pushed = driver_.cuCtxPushCurrent(context_);
  if (pushed != CUDA_SUCCESS) return pushed;
  const CUresult status = call();
  CUcontext popped = nullptr;
  driver_.cuCtxPopCurrent(&popped);
  return status;
}

void CudaLink::check(CUresult status, const char* call) const {
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver_.cuGetErrorString(status, &text);
  throw DeviceError(std::string(call) + " failed: " + (text != nullptr ? text : "unknown error"));
}

CudaLink::CudaLink(int index) : driver_(alloc::cuda_driver()) {
  check(driver_.cuDeviceGet(&device_, index), "cuDeviceGet");
  check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  const CUresult status = inside([this] {
    const CUresult made = driver_.cuStreamCreate(&out_, CU_STREAM_NON_BLOCKING);
    return made == CUDA_SUCCESS ? driver_.cuStreamCreate(&back_, CU_STREAM_NON_BLOCKING) : made;
  });
  check(status, "cuStreamCreate");
}

CudaLink::~CudaLink() {
  if (alloc::forked_after_cuda()) return;
  // Errors are ignored: a destructor cannot report them.
  inside([this] {
    for (CUevent event : spare_) driver_.cuEventDestroy(event);
    for (CUevent event : spare_marks_) driver_.cuEventDestroy(event);
    driver_.cuStreamDestroy(out_);
    return driver_.cuStreamDestroy(back_);
  });
  driver_.cuDevicePrimaryCtxRelease(device_);
}

/// Puts an event after the work queued on a stream.
CUresult CudaLink::record(CUstream stream, CUevent* event, bool timed) noexcept {
  *event = nullptr;
  std::vector<CUevent>& spare = timed ? spare_marks_ : spare_;
  {
    const std::lock_guard lock(mutex_);
    if (!spare.empty()) {
      *event = spare.back();
      spare.pop_back();
    }
  }
  CUresult status = CUDA_SUCCESS;
  if (*event == nullptr) status = driver_.cuEventCreate(event, timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING);
  if (status == CUDA_SUCCESS) status = driver_.cuEventRecord(*event, stream);
  if (status != CUDA_SUCCESS && *event != nullptr) {
    const std::lock_guard lock(mutex_);
    spare.push_back(*event);
    *event = nullptr;
  }
  return status;
}

/// Lets the next work of `follower` run after the work queued on a stream.
CUresult CudaLink::follow(CUstream follower, CUstream stream) noexcept {
  CUevent event = nullptr;
  CUresult status = record(stream, &event);
  if (status == CUDA_SUCCESS) status = driver_.cuStreamWaitEvent(follower, event, 0);
  if (event != nullptr) recycle(reinterpret_cast<Event>(event));
  return status;
}

Link::Status CudaLink::send(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept {
  *done = 0;
  return inside([&] {
    CUresult status = follow(out_, stream_in(stream));
    for (std::size_t i = 0; i < count && status == CUDA_SUCCESS; ++i) {
      const Copy& copy = copies[i];
      if (copy.after != 0) status = driver_.cuStreamWaitEvent(out_, event_in(copy.after), 0);
      for (int again = 0; again < repeat && status == CUDA_SUCCESS; ++again) {
        status = driver_.cuMemcpyDtoHAsync(copy.host, address_of(copy.device), copy.size, out_);
      }
    }
    CUevent event = nullptr;
    if (status == CUDA_SUCCESS) status = record(out_, &event);
    *done = reinterpret_cast<Event>(event);
    return status;
  });
}

Link::Status CudaLink::bring(Stream stream, const Copy* copies, std::size_t count, Event* done) noexcept {
  for (std::size_t i = 0; i < count; ++i) done[i] = 0;
  return inside([&] {
    CUresult status = follow(back_, stream_in(stream));
    for (std::size_t i = 0; i < count && status == CUDA_SUCCESS; ++i) {
      const Copy& copy = copies[i];
      if (copy.after != 0) status = driver_.cuStreamWaitEvent(back_, event_in(copy.after), 0);
      for (int again = 0; again < repeat && status == CUDA_SUCCESS; ++again) {
        status = driver_.cuMemcpyHtoDAsync(address_of(copy.device), copy.host, copy.size, back_);
      }
      CUevent event = nullptr;
      if (status == CUDA_SUCCESS) status = record(back_, &event);
      done[i] = reinterpret_cast<Event>(event);
    }
    return status;
  });
}

Link::Status CudaLink::wait(Stream stream, Event event) noexcept {
  if (event == 0) return 0;
  const CUresult status = inside([&] { return driver_.cuStreamWaitEvent(stream_in(stream), event_in(event), 0); });
  return status == CUDA_ERROR_DEINITIALIZED ? 0 : status;
}

void CudaLink::recycle(Event event) noexcept {
  if (event == 0) return;
  const std::lock_guard lock(mutex_);
  spare_.push_back(event_in(event));
}

Link::Status CudaLink::mark(Stream stream, Event* made) noexcept {
  return inside([&] {
    CUevent event = nullptr;
    const CUresult status = record(stream_in(stream), &event, true);
    *made = reinterpret_cast<Event>(event);
    return status;
  });
}

Link::Status CudaLink::finish(Event event) noexcept {
  return inside([&] { return driver_.cuEventSynchronize(event_in(event)); });
}

double CudaLink::elapsed(Event begin, Event end) noexcept {
  float milliseconds = 0;
  const CUresult status =
      inside([&] { return driver_.event_elapsed_time(&milliseconds, event_in(begin), event_in(end)); });
  return status == CUDA_SUCCESS ? milliseconds / 1e3 : -1;
}

void CudaLink::recycle_mark(Event event) noexcept {
  if (event == 0) return;
  const std::lock_guard lock(mutex_);
  spare_marks_.push_back(event_in(event));
}

bool CudaLink::is_capturing(Stream stream) noexcept {
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  // The legacy default stream cannot be captured: asked beside a capture, the query fails and the capture with it.
  if (stream == 0) return false;
  const CUresult status = inside([&] { return driver_.cuStreamIsCapturing(stream_in(stream), &state); });
  return status == CUDA_SUCCESS && state != CU_STREAM_CAPTURE_STATUS_NONE;
}

void* CudaLink::pin(std::size_t size) noexcept {
  void* memory = nullptr;
  // After a failed call of the driver no later call returns its error, unlike the runtime's.
  const CUresult status = inside([&] { return driver_.cuMemHostAlloc(&memory, size, CU_MEMHOSTALLOC_PORTABLE); });
  return status == CUDA_SUCCESS ? memory : nullptr;
}

void CudaLink::unpin(void* memory, std::size_t) noexcept {
  inside([&] {
    driver_.cuStreamSynchronize(out_);
    driver_.cuStreamSynchronize(back_);
    return driver_.cuMemFreeHost(memory);
  });
}

std::size_t CudaLink::available() noexcept { return alloc::available_host_memory(); }

void CudaLink::describe(Status status, char* text, std::size_t capacity) noexcept {
  const char* name = nullptr;
  const char* what = nullptr;
  driver_.cuGetErrorName(static_cast<CUresult>(status), &name);
  driver_.cuGetErrorString(static_cast<CUresult>(status), &what);
  std::snprintf(text, capacity, "%s: %s", name != nullptr ? name : "CUDA error", what != nullptr ? what : "unknown");
}

std::pair<Link::Stream, Link::Stream> CudaLink::streams() const {
  return {reinterpret_cast<Stream>(out_), reinterpret_cast<Stream>(back_)};
}

bool CudaLink::is_integrated() const {
  int integrated = 0;
  check(driver_.cuDeviceGetAttribute(&integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, device_), "cuDeviceGetAttribute");
  return integrated != 0;
}

void CudaLink::pci_address(char* text, int capacity) const {
  check(driver_.cuDeviceGetPCIBusId(text, capacity, device_), "cuDeviceGetPCIBusId");
}

double CudaLink::timed(bool out, CUdeviceptr device, void* host, std::size_t size, int rounds) {
  CUevent begin = nullptr;
  CUevent end = nullptr;
  float milliseconds = 0;
  CUstream stream = out ? out_ : back_;
  const auto copy = [&] {
    return out ? driver_.cuMemcpyDtoHAsync(host, device, size, stream)
               : driver_.cuMemcpyHtoDAsync(device, host, size, stream);
  };
  const CUresult status = inside([&] {
    CUresult each = driver_.cuEventCreate(&begin, CU_EVENT_DEFAULT);
    if (each == CUDA_SUCCESS) each = driver_.cuEventCreate(&end, CU_EVENT_DEFAULT);
    if (each == CUDA_SUCCESS) each = copy();  // the first copy is slower
    if (each == CUDA_SUCCESS) each = driver_.cuEventRecord(begin, stream);
    for (int i = 0; i < rounds && each == CUDA_SUCCESS; ++i) each = copy();
    if (each == CUDA_SUCCESS) each = driver_.cuEventRecord(end, stream);
    if (each == CUDA_SUCCESS) each = driver_.cuEventSynchronize(end);
    if (each == CUDA_SUCCESS) each = driver_.event_elapsed_time(&milliseconds, begin, end);
    if (begin != nullptr) driver_.cuEventDestroy(begin);
    if (end != nullptr) driver_.cuEventDestroy(end);
    return each;
  });
  check(status, "a copy between device and host");
  return static_cast<double>(size) * rounds / (milliseconds / 1e3);
}

std::pair<double, double> CudaLink::measure(std::size_t size, int rounds) {
  CUdeviceptr device = 0;
  check(inside([&] { return driver_.cuMemAlloc(&device, size); }), "cuMemAlloc");
  void* const host = pin(size);
  const auto free_both = [&] {
    if (host != nullptr) unpin(host, size);
    inside([&] { return driver_.cuMemFree(device); });
  };
  try {
    if (host == nullptr) throw DeviceError("no host memory could be pinned");
    const double out = timed(true, device, host, size, rounds);
    const double back = timed(false, device, host, size, rounds);
    free_both();
    return {out, back};
  } catch (...) {
    free_both();
    throw;
  }
}

}  // namespace pac
