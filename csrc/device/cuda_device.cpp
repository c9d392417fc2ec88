// Longer than 400 lines: one class, all of whose calls to the driver are checked.
#include "device/cuda_device.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <sstream>
#include <string>

#include "common/check.hpp"
#include "device/descriptor_socket.hpp"
#include "device/host_memory.hpp"

namespace pac::alloc {

namespace {

CUmemAccessDesc access_of(CUdevice device) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

std::string failure(const CudaDriver& driver, CUresult status, const std::string& what) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(status, &name);
  driver.cuGetErrorString(status, &text);
  std::ostringstream message;
  message << what << " failed: " << (name != nullptr ? name : "error ");
  if (name == nullptr) message << static_cast<int>(status);
  if (text != nullptr) message << ": " << text;
  return message.str();
}

[[noreturn]] void fail(const CudaDriver& driver, CUresult status, const std::string& what) {
  throw DeviceError(failure(driver, status, what));
}

/// The driver was shut down, as at process exit: there is nothing left to give back.
bool gone(CUresult status) { return status == CUDA_ERROR_DEINITIALIZED; }

CUevent event_of(Event event) {
  return reinterpret_cast<CUevent>(event);  // NOLINT(performance-no-int-to-ptr)
}

void* host_pointer(Address address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

CUstream stream_of(Stream stream) {
  return reinterpret_cast<CUstream>(stream);  // NOLINT(performance-no-int-to-ptr)
}

CUgraphNode node_of(GraphNode node) {
  return reinterpret_cast<CUgraphNode>(node);  // NOLINT(performance-no-int-to-ptr)
}

std::vector<GraphNode> numbers_of(const CUgraphNode* nodes, std::size_t count) {
  std::vector<GraphNode> numbers;
  std::transform(nodes, nodes + count, std::back_inserter(numbers),
                 [](CUgraphNode node) { return reinterpret_cast<GraphNode>(node); });
  return numbers;
}

}  // namespace

/// Runs `call`, which must not throw, with the context current and in relaxed capture mode.
template <class Call>
CUresult CudaDevice::inside(CUcontext context, Call&& call) const {
  const CUresult pushed = driver_.cuCtxPushCurrent(context);
  if (pushed != CUDA_SUCCESS) return pushed;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver_.cuThreadExchangeStreamCaptureMode(&mode);
  const CUresult status = call();
  driver_.cuThreadExchangeStreamCaptureMode(&mode);
  CUcontext popped = nullptr;
  driver_.cuCtxPopCurrent(&popped);
  return status;
}

template <class Call>
CUresult CudaDevice::timed(Call&& call) {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  const auto begin = std::chrono::steady_clock::now();
  const CUresult status = inside(call);
  const auto spent = std::chrono::steady_clock::now() - begin;
  driver_ns_.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count(), std::memory_order_relaxed);
  return status;
}

template <class Call>
void CudaDevice::give_back(const What& what, Call&& call) {
  if (forked_after_cuda()) return;  // the memory is the parent process's
  const CUresult status = timed(call);
  if (!gone(status)) check(status, what);
}

void CudaDevice::check(CUresult status, const What& what) const {
  if (status == CUDA_SUCCESS) return;
  std::ostringstream text;
  text << what.call;
  if (what.size != 0) text << " of " << what.size << " bytes";
  if (what.address != 0) text << " at 0x" << std::hex << what.address << std::dec;
  text << " on " << name();
  fail(driver_, status, text.str());
}

CudaDevice::CudaDevice(int index) : driver_(cuda_driver()), index_(index) {
  check(driver_.cuDeviceGet(&device_, index), {"cuDeviceGet"});
  access_.push_back(access_of(device_));
  check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), {"cuDevicePrimaryCtxRetain"});
  look_for_virtual_memory();
}

CudaDevice::~CudaDevice() {
  if (forked_after_cuda()) return;
  // Errors are ignored: a destructor cannot report them.
  inside([&] {
    for (CUevent event : spare_events_) driver_.cuEventDestroy(event);
    return CUDA_SUCCESS;
  });
  driver_.cuDevicePrimaryCtxRelease(device_);
}

void CudaDevice::look_for_virtual_memory() {
  const auto supported = [&](CUdevice_attribute attribute) {
    int value = 0;
    return driver_.cuDeviceGetAttribute(&value, attribute, device_) == CUDA_SUCCESS && value != 0;
  };
  if (!driver_.virtual_memory || !supported(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    unmappable_ = "the device or its driver has no virtual memory management";
    return;
  }
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties_.location.id = device_;
  if (supported(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)) {
    properties_.allocFlags.gpuDirectRDMACapable = 1;
  }
  if (driver_.sharing && supported(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
    properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  }
  std::size_t least = 0;
  const CUresult status = driver_.cuMemGetAllocationGranularity(&least, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (status != CUDA_SUCCESS) {
    unmappable_ = failure(driver_, status, "cuMemGetAllocationGranularity");
    return;
  }
  granularity_ = std::max<Bytes>(2_MiB, least);
  unmappable_ = find_mappable_properties();
  if (!unmappable_.empty()) granularity_ = 0;
}

/// A driver may announce a property, create memory with it, and refuse access to the mapping (RDMA under WSL2), or
/// refuse to create it (memory for other processes in some containers). Returns why no memory can be mapped at all;
/// empty if some can.
std::string CudaDevice::find_mappable_properties() {
  const CUmemAllocationProp announced = properties_;
  std::string refused;
  for (const bool rdma : {true, false}) {
    for (const bool shared : {true, false}) {
      properties_ = announced;
      if (!rdma) properties_.allocFlags.gpuDirectRDMACapable = 0;
      if (!shared) properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
      const char* call = nullptr;
      const CUresult status = inside([&] { return try_mapping(&call); });
      // Only memory is short: the first growth reports it if it still is.
      if (status == CUDA_SUCCESS || status == CUDA_ERROR_OUT_OF_MEMORY) return {};
      refused = failure(driver_, status, call != nullptr ? call : "cuCtxPushCurrent");
    }
  }
  return refused;
}

/// `call` is the last call that was made.
CUresult CudaDevice::try_mapping(const char** call) {
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0;
  *call = "cuMemAddressReserve";
  CUresult status = driver_.cuMemAddressReserve(&address, granularity_, granularity_, 0, 0);
  if (status != CUDA_SUCCESS) return status;
  *call = "cuMemCreate";
  status = driver_.cuMemCreate(&handle, granularity_, &properties_, 0);
  if (status == CUDA_SUCCESS) {
    *call = "cuMemMap";
    status = driver_.cuMemMap(address, granularity_, 0, handle, 0);
    if (status == CUDA_SUCCESS) {
      *call = "cuMemSetAccess";
      status = driver_.cuMemSetAccess(address, granularity_, access_.data(), access_.size());
      driver_.cuMemUnmap(address, granularity_);
    }
    driver_.cuMemRelease(handle);
  }
  driver_.cuMemAddressFree(address, granularity_);
  return status;
}

int CudaDevice::count() {
  const CudaDriver& driver = cuda_driver();
  int count = 0;
  const CUresult status = driver.cuDeviceGetCount(&count);
  if (status != CUDA_SUCCESS) fail(driver, status, "cuDeviceGetCount");
  return count;
}

bool CudaDevice::can_access_peer(int device, int peer) {
  const CudaDriver& driver = cuda_driver();
  int can = 0;
  const CUresult status = driver.cuDeviceCanAccessPeer(&can, device, peer);
  if (status != CUDA_SUCCESS) fail(driver, status, "cuDeviceCanAccessPeer");
  return can != 0;
}

Device::Memory CudaDevice::memory() {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  std::size_t free = 0;
  std::size_t total = 0;
  check(inside([&] { return driver_.cuMemGetInfo(&free, &total); }), {"cuMemGetInfo"});
  return {free, total};
}

double CudaDevice::driver_seconds() const {
  return static_cast<double>(driver_ns_.load(std::memory_order_relaxed)) * 1e-9;
}

std::optional<Address> CudaDevice::acquire(Bytes size) {
  CUdeviceptr address = 0;
  const CUresult status = timed([&] { return driver_.cuMemAlloc(&address, size); });
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return std::nullopt;
  check(status, {"cuMemAlloc", size});
  return address;
}

void CudaDevice::release(Address address, Bytes size) {
  give_back({"cuMemFree", size, address}, [&] { return driver_.cuMemFree(address); });
}

Address CudaDevice::reserve(Bytes size) {
  CUdeviceptr address = 0;
  check(timed([&] { return driver_.cuMemAddressReserve(&address, size, granularity_, 0, 0); }),
        {"cuMemAddressReserve", size});
  return address;
}

void CudaDevice::unreserve(Address address, Bytes size) {
  give_back({"cuMemAddressFree", size, address}, [&] { return driver_.cuMemAddressFree(address, size); });
}

std::optional<Handle> CudaDevice::create(Bytes size) {
  CUmemGenericAllocationHandle handle = 0;
  CUresult status = timed([&] { return driver_.cuMemCreate(&handle, size, &properties_, 0); });
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return std::nullopt;
  if (status != CUDA_SUCCESS && properties_.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE) {
    // Some containers refuse memory that can be shared: then there is memory, and no sharing.
    CUmemAllocationProp private_properties = properties_;
    private_properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    status = timed([&] { return driver_.cuMemCreate(&handle, size, &private_properties, 0); });
    if (status == CUDA_ERROR_OUT_OF_MEMORY) return std::nullopt;
    if (status == CUDA_SUCCESS) properties_ = private_properties;
  }
  check(status, {"cuMemCreate", size});
  return handle;
}

void CudaDevice::destroy(Handle handle, Bytes size) {
  give_back({"cuMemRelease", size}, [&] { return driver_.cuMemRelease(handle); });
}

void CudaDevice::map(Address address, Bytes size, Handle handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto mapping = mappings_.emplace(address, size).first;
  const char* call = "cuMemMap";
  const CUresult status = timed([&] {
    const CUresult mapped = driver_.cuMemMap(address, size, 0, handle, 0);
    if (mapped != CUDA_SUCCESS) return mapped;
    call = "cuMemSetAccess";
    const CUresult granted = driver_.cuMemSetAccess(address, size, access_.data(), access_.size());
    if (granted != CUDA_SUCCESS) driver_.cuMemUnmap(address, size);
    return granted;
  });
  if (status == CUDA_SUCCESS) return;
  mappings_.erase(mapping);
  check(status, {call, size, address});
}

void CudaDevice::unmap(Address address, Bytes size) {
  if (forked_after_cuda()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  give_back({"cuMemUnmap", size, address}, [&] { return driver_.cuMemUnmap(address, size); });
  mappings_.erase(address);
}

int CudaDevice::export_handle(Handle handle) {
  if (properties_.requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE) {
    throw DeviceError("the driver gives " + name() +
                      " no memory that other processes can open; to share CUDA tensors, enable the allocator with "
                      "growth=\"malloc\" (PYACTCOMP_ALLOC_CONF=growth:malloc)");
  }
  int descriptor = -1;
  const CUresult status = timed([&] {
    return driver_.cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  });
  if (status != CUDA_SUCCESS && out_of_descriptors()) {
    throw DeviceError(
        "a CUDA tensor cannot be shared: this process has too many open files, and a shared tensor has one for each of "
        "the 20 to 64 MiB pieces that it lies in; raise the limit (ulimit -n), or free shared tensors");
  }
  check(status, {"cuMemExportToShareableHandle"});
  ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);  // a program started by this process must not keep the memory
  try {
    offer(descriptor);
  } catch (...) {
    ::close(descriptor);
    throw;
  }
  return descriptor;
}

void CudaDevice::close_export(int descriptor) {
  if (forked_after_cuda()) return;
  withdraw(descriptor);
  ::close(descriptor);
}

Handle CudaDevice::import_handle(const Process& owner, int descriptor, Bytes size) {
  if (!driver_.sharing || granularity_ == 0) {
    throw DeviceError("the driver cannot open CUDA tensors of other processes on " + name() +
                      "; enable the allocator with growth=\"malloc\" in the process that sends");
  }
  const Descriptor copy = fetch_descriptor(owner, descriptor);
  CUmemGenericAllocationHandle handle = 0;
  const auto number = static_cast<std::uintptr_t>(copy.number());
  const CUresult status = timed([&] {
    // The driver takes the descriptor in place of a pointer.
    return driver_.cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(number),  // NOLINT
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  });
  check(status, {"cuMemImportFromShareableHandle", size});
  return handle;
}

Bytes CudaDevice::host_available() { return available_host_memory(); }

std::optional<Address> CudaDevice::acquire_host(Bytes size) {
  void* memory = nullptr;
  const CUresult status = timed([&] { return driver_.cuMemHostAlloc(&memory, size, CU_MEMHOSTALLOC_PORTABLE); });
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return std::nullopt;
  check(status, {"cuMemHostAlloc", size});
  return reinterpret_cast<Address>(memory);
}

void CudaDevice::release_host(Address address, Bytes size) {
  give_back({"cuMemFreeHost", size, address}, [&] { return driver_.cuMemFreeHost(host_pointer(address)); });
}

template <class One>
void CudaDevice::copy(const char* call, const std::vector<Copy>& copies, One&& one) {
  CUstream stream = nullptr;
  check(timed([&] { return driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING); }), {"cuStreamCreate"});
  const Copy* failed = nullptr;
  const CUresult status = timed([&] {
    CUresult queued = CUDA_SUCCESS;
    for (const Copy& each : copies) {
      queued = one(each, stream);
      if (queued == CUDA_SUCCESS) continue;
      failed = &each;
      break;
    }
    // Also after a failure: the copies before it still run.
    const CUresult done = driver_.cuStreamSynchronize(stream);
    driver_.cuStreamDestroy(stream);
    return queued == CUDA_SUCCESS ? done : queued;
  });
  check(status, failed != nullptr ? What{call, failed->size, failed->device} : What{call});
}

void CudaDevice::copy_to_host(const std::vector<Copy>& copies) {
  copy("cuMemcpyDtoHAsync", copies, [&](const Copy& each, CUstream stream) {
    return driver_.cuMemcpyDtoHAsync(host_pointer(each.host), each.device, each.size, stream);
  });
}

void CudaDevice::copy_from_host(const std::vector<Copy>& copies) {
  copy("cuMemcpyHtoDAsync", copies, [&](const Copy& each, CUstream stream) {
    return driver_.cuMemcpyHtoDAsync(each.device, host_pointer(each.host), each.size, stream);
  });
}

void CudaDevice::enable_peer(int peer) {
  if (peer == index_) return;
  if (!can_access_peer(peer, index_)) {
    throw DeviceError("GPU " + std::to_string(peer) + " cannot reach the memory of " + name() +
                      ": the two have no peer-to-peer connection");
  }
  const CUmemAccessDesc access = access_of(peer);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_peer = [&](const CUmemAccessDesc& known) { return known.location.id == access.location.id; };
  if (std::any_of(access_.begin(), access_.end(), is_peer)) return;
  access_.reserve(access_.size() + 1);
  for (const auto& [address, size] : mappings_) {
    // A copy: a structured binding cannot be captured in C++17.
    const CUdeviceptr start = address;
    const std::size_t bytes = size;
    check(timed([&] { return driver_.cuMemSetAccess(start, bytes, &access, 1); }), {"cuMemSetAccess", bytes, start});
  }
  access_.push_back(access);
}

Event CudaDevice::record(Stream stream) {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  CUevent event = nullptr;
  if (!spare_events_.empty()) {
    event = spare_events_.back();
    spare_events_.pop_back();
  }
  const char* call = "cuEventRecord";
  const CUresult status = inside([&] {
    if (event == nullptr) {
      call = "cuEventCreate";
      const CUresult created = driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
      if (created != CUDA_SUCCESS) return created;
      call = "cuEventRecord";
    }
    return driver_.cuEventRecord(event, stream_of(stream));
  });
  if (status == CUDA_SUCCESS) return reinterpret_cast<Event>(event);
  if (event != nullptr) spare_events_.push_back(event);
  if (status == CUDA_ERROR_INVALID_HANDLE && stream != 0) {
    // Event and stream must be of one device. This stream may be of a peer reading memory mapped here.
    const CUresult recorded = record_elsewhere(stream_of(stream), &event);
    if (recorded == CUDA_SUCCESS) return reinterpret_cast<Event>(event);
  }
  if (gone(status)) return 0;  // stands for a completed event
  check(status, {call});
  return 0;
}

CUresult CudaDevice::record_elsewhere(CUstream stream, CUevent* event) {
  CUcontext context = nullptr;
  const CUresult found = inside([&] { return driver_.cuStreamGetCtx(stream, &context); });
  if (found != CUDA_SUCCESS) return found;
  const CUresult status = inside(context, [&] {
    const CUresult created = driver_.cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
    if (created != CUDA_SUCCESS) return created;
    const CUresult recorded = driver_.cuEventRecord(*event, stream);
    if (recorded != CUDA_SUCCESS) driver_.cuEventDestroy(*event);
    return recorded;
  });
  if (status == CUDA_SUCCESS) foreign_events_.insert(*event);
  return status;
}

bool CudaDevice::completed(Event event) {
  if (event == 0) return true;
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  const CUresult status = inside([&] { return driver_.cuEventQuery(event_of(event)); });
  if (status == CUDA_ERROR_NOT_READY) return false;
  if (!gone(status)) check(status, {"cuEventQuery"});
  return true;
}

void CudaDevice::wait(Event event) {
  if (event == 0) return;
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  const CUresult status = inside([&] { return driver_.cuEventSynchronize(event_of(event)); });
  if (!gone(status)) check(status, {"cuEventSynchronize"});
}

void CudaDevice::recycle(Event event) {
  if (event == 0) return;
  if (foreign_events_.erase(event_of(event)) == 0) {
    spare_events_.push_back(event_of(event));
  } else {
    give_back({"cuEventDestroy"}, [&] { return driver_.cuEventDestroy(event_of(event)); });
  }
}

std::optional<Device::Capture> CudaDevice::capture(Stream stream) {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  if (driver_.stream_capture_info == nullptr || driver_.node_dependencies == nullptr) return std::nullopt;
  CUstreamCaptureStatus state = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  const CUgraphNode* nodes = nullptr;
  std::size_t count = 0;
  const CUresult status =
      inside([&] { return driver_.stream_capture_info(stream_of(stream), &state, &id, nullptr, &nodes, &count); });
  // Refused for the default stream beside a capture too: memory is then reused after the capture.
  if (status != CUDA_SUCCESS || state != CU_STREAM_CAPTURE_STATUS_ACTIVE) return std::nullopt;
  return Capture{id, numbers_of(nodes, count)};
}

std::vector<GraphNode> CudaDevice::dependencies(GraphNode node) {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  std::size_t count = 0;
  if (inside([&] { return driver_.node_dependencies(node_of(node), nullptr, &count); }) != CUDA_SUCCESS) return {};
  std::vector<CUgraphNode> nodes(count);
  if (count == 0 ||
      inside([&] { return driver_.node_dependencies(node_of(node), nodes.data(), &count); }) != CUDA_SUCCESS) {
    return {};
  }
  return numbers_of(nodes.data(), count);
}

void CudaDevice::synchronize() {
  if (forked_after_cuda()) throw DeviceError(kForkedAfterCuda);
  const CUresult status = inside([&] { return driver_.cuCtxSynchronize(); });
  if (!gone(status)) check(status, {"cuCtxSynchronize"});
}

}  // namespace pac::alloc
