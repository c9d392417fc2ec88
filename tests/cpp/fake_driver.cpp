// A libcuda.so.1 with one device of 1 GiB and no device memory: addresses are numbers. Host memory is real, and a copy
// to the host writes the addresses that it copies from; a copy back checks them. The library has the functions that the
// allocator calls, by the names and signatures of the driver's binary interface, written down here without cuda.h.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <set>
#include <vector>

#ifndef FAKE_INIT_STATUS
#define FAKE_INIT_STATUS 0
#endif
#ifndef FAKE_VIRTUAL_MEMORY
#define FAKE_VIRTUAL_MEMORY 1
#endif
#ifndef FAKE_REFUSES_SHARED_MEMORY
#define FAKE_REFUSES_SHARED_MEMORY 0
#endif
#ifndef FAKE_REFUSES_ACCESS
#define FAKE_REFUSES_ACCESS 0  // 1: to memory with the RDMA flag, as WSL2; 2: to any
#endif

namespace {

using Number = unsigned long long;
constexpr std::size_t kTotal = std::size_t{1} << 30;
constexpr std::size_t kGranularity = std::size_t{2} << 20;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kNotPermitted = 800;
constexpr int kOperatingSystem = 304;
constexpr int kVirtualMemorySupported = 102;
constexpr int kDescriptorSupported = 103;
constexpr int kRdmaSupported = 110;

/// The beginning of CUmemAllocationProp.
struct Properties {
  int type;
  int handle_types;
  int location[2];
  void* windows;
  unsigned char compression;
  unsigned char rdma;
};

int context_depth = 0;
Number next_address = Number{1} << 40;
Number next_handle = 1;
std::size_t in_use = 0;
void* const kContext = &context_depth;
void* const kEvent = &in_use;
std::map<Number, std::size_t> allocated, reserved, created, imported, mapped, pinned;
std::map<Number, Number> mapped_handles;
std::set<Number> for_rdma;  ///< handles
Number copied = 0;
/// The one capture: the last nodes of its streams, and what each node depends on. A node is the address of an entry.
using Nodes = std::vector<void*>;
std::map<void*, Nodes> last_nodes;
std::list<Nodes> nodes;
constexpr Number kCapture = 77;
constexpr int kActive = 1;
constexpr int kLossyQuery = 911;
bool early_launch = false;

/// Whether the range lies within ranges of the map without a gap.
bool covered(const std::map<Number, std::size_t>& ranges, Number begin, std::size_t size) {
  for (Number at = begin; at < begin + size;) {
    auto range = ranges.upper_bound(at);
    if (range == ranges.begin()) return false;
    --range;
    if (at >= range->first + range->second) return false;
    at = range->first + range->second;
  }
  return true;
}

constexpr std::size_t kCopyStep = 512;

/// Calls `one` with the host's and the device's address of every 512 bytes.
template <class One>
int copy(void* host, Number device, std::size_t size, One one) {
  const auto address = reinterpret_cast<Number>(host);
  const auto range = pinned.upper_bound(address);
  // A copy never spans two pinned ranges, whichever lie beside each other.
  if (range == pinned.begin() || !covered({*std::prev(range)}, address, size)) return kInvalidValue;
  if (!covered(mapped, device, size) && !covered(allocated, device, size)) return kInvalidValue;
  copied += size;
  for (std::size_t at = 0; at < size; at += kCopyStep) {
    if (!one(static_cast<char*>(host) + at, device + at)) return kInvalidValue;
  }
  return 0;
}

Number address_for(std::size_t size) {
  const Number address = next_address;
  next_address += (size + kGranularity - 1) / kGranularity * kGranularity;
  return address;
}

int take(std::map<Number, std::size_t>& from, Number key, std::size_t* size) {
  const auto found = from.find(key);
  if (found == from.end()) return kInvalidValue;
  *size = found->second;
  from.erase(found);
  return 0;
}

int give_back(std::map<Number, std::size_t>& from, Number key) {
  std::size_t size = 0;
  const int status = take(from, key, &size);
  if (status == 0) in_use -= size;
  return status;
}

int take_exactly(std::map<Number, std::size_t>& from, Number key, std::size_t expected) {
  std::size_t size = 0;
  const int status = take(from, key, &size);
  return status == 0 && size != expected ? kInvalidValue : status;
}

template <class Value>
int set(Value* result, Value value) {
  *result = value;
  return 0;
}

}  // namespace

extern "C" {

/// Contexts left pushed, bytes of memory in use and mappings: 0 when all was given back.
Number fake_left() { return static_cast<Number>(context_depth) + in_use + mapped.size() + imported.size(); }
/// Handles of other processes.
Number fake_imported() { return imported.size(); }
/// Pieces of physical memory, which only virtual memory has.
Number fake_created() { return created.size(); }
/// Bytes copied in either direction, and of pinned host memory.
Number fake_copied() { return copied; }
Number fake_pinned() {
  Number bytes = 0;
  for (const auto& [address, size] : pinned) bytes += size;
  return bytes;
}

/// Makes the stream part of the capture, and queues work on the stream, behind the work of `awaited`.
void fake_capture(void* stream, void* awaited) {
  const Nodes behind = last_nodes[awaited];
  Nodes& last = last_nodes[stream];
  if (stream != awaited) last.insert(last.end(), behind.begin(), behind.end());
  nodes.push_back(last);
  last = {&nodes.back()};
}
/// From now on an edge of the graph lets a kernel begin early, which the query without the data of edges refuses.
void fake_early_launch() { early_launch = true; }

int cuStreamGetCaptureInfo_v2(void* stream, int* status, Number* id, void**, void* const** last, std::size_t* count) {
  const auto found = last_nodes.find(stream);
  set(status, found == last_nodes.end() ? 0 : kActive);
  if (found == last_nodes.end()) return 0;
  set(id, kCapture);
  set(last, static_cast<void* const*>(found->second.data()));
  return set(count, found->second.size());
}
int cuGraphNodeGetDependencies(void* node, void** dependencies, std::size_t* count) {
  if (early_launch) return kLossyQuery;
  const Nodes& known = *static_cast<Nodes*>(node);
  if (dependencies != nullptr) std::copy(known.begin(), known.end(), dependencies);
  return set(count, known.size());
}

int cuInit(unsigned) { return FAKE_INIT_STATUS; }
int cuGetErrorName(int, const char** name) { return set(name, "FAKE_ERROR"); }
int cuGetErrorString(int, const char** text) { return set(text, "a fault of the fake driver"); }
int cuDeviceGet(int* device, int index) { return set(device, index); }
int cuDeviceGetCount(int* count) { return set(count, 1); }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  return set(value,
             attribute == kVirtualMemorySupported || attribute == kDescriptorSupported || attribute == kRdmaSupported
                 ? FAKE_VIRTUAL_MEMORY
                 : 0);
}
int cuDeviceCanAccessPeer(int* can, int, int) { return set(can, 0); }
int cuDeviceGetPCIBusId(char* text, int capacity, int) {
  std::strncpy(text, "0000:1b:00.0", static_cast<std::size_t>(capacity));
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return set(context, kContext); }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void* context) {
  ++context_depth;
  return context == kContext ? 0 : kInvalidValue;
}
int cuCtxPopCurrent_v2(void** context) {
  --context_depth;
  return set(context, kContext);
}
int cuCtxSynchronize() { return 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  set(free, kTotal - in_use);
  return set(total, kTotal);
}
int cuEventCreate(void** event, unsigned) { return set(event, kEvent); }
int cuEventRecord(void* event, void*) { return event == kEvent ? 0 : kInvalidValue; }
int cuEventQuery(void* event) { return event == kEvent ? 0 : kInvalidValue; }
int cuEventSynchronize(void* event) { return event == kEvent ? 0 : kInvalidValue; }
int cuEventDestroy_v2(void*) { return 0; }
int cuEventElapsedTime(float* milliseconds, void*, void*) { return set(milliseconds, 2.0F); }
int cuStreamGetCtx(void*, void** context) { return set(context, kContext); }

int cuStreamCreate(void** stream, unsigned) { return set(stream, kEvent); }
int cuStreamSynchronize(void* stream) { return stream == kEvent ? 0 : kInvalidValue; }
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return stream == kEvent && event == kEvent ? 0 : kInvalidValue;
}
int cuStreamIsCapturing(void*, int* status) { return set(status, 0); }
int cuStreamDestroy_v2(void* stream) { return stream == kEvent ? 0 : kInvalidValue; }
int cuMemHostAlloc(void** memory, std::size_t size, unsigned) {
  set(memory, std::malloc(size));
  if (*memory == nullptr) return kOutOfMemory;
  pinned.emplace(reinterpret_cast<Number>(*memory), size);
  return 0;
}
int cuMemFreeHost(void* memory) {
  if (pinned.erase(reinterpret_cast<Number>(memory)) == 0) return kInvalidValue;
  std::free(memory);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* host, Number device, std::size_t size, void*) {
  return copy(host, device, size, [](char* to, Number from) { return std::memcpy(to, &from, sizeof from) != nullptr; });
}
int cuMemcpyHtoDAsync_v2(Number device, const void* host, std::size_t size, void*) {
  return copy(const_cast<void*>(host), device, size,
              [](const char* from, Number to) { return std::memcmp(from, &to, sizeof to) == 0; });
}

int cuMemAlloc_v2(Number* address, std::size_t size) {
  if (in_use + size > kTotal) return kOutOfMemory;
  in_use += size;
  set(address, address_for(size));
  allocated.emplace(*address, size);
  return 0;
}
int cuMemFree_v2(Number address) { return give_back(allocated, address); }

int cuMemGetAllocationGranularity(std::size_t* bytes, const void*, int) { return set(bytes, kGranularity); }
int cuMemAddressReserve(Number* address, std::size_t size, std::size_t, Number, Number) {
  set(address, address_for(size));
  reserved.emplace(*address, size);
  return 0;
}
int cuMemAddressFree(Number address, std::size_t size) { return take_exactly(reserved, address, size); }
int cuMemCreate(Number* handle, std::size_t size, const Properties* properties, Number) {
  if (FAKE_REFUSES_SHARED_MEMORY && properties->handle_types != 0) return kNotPermitted;
  if (in_use + size > kTotal) return kOutOfMemory;
  in_use += size;
  set(handle, next_handle++);
  created.emplace(*handle, size);
  if (properties->rdma != 0) for_rdma.insert(*handle);
  return 0;
}
int cuMemRelease(Number handle) { return imported.erase(handle) == 1 ? 0 : give_back(created, handle); }
int cuMemMap(Number address, std::size_t size, std::size_t, Number handle, Number) {
  const auto& handles = imported.count(handle) == 1 ? imported : created;
  const auto found = handles.find(handle);
  const bool whole = found != handles.end() && found->second == size;
  mapped_handles[address] = handle;
  return whole && mapped.emplace(address, size).second ? 0 : kInvalidValue;
}
/// The descriptor of a file with the size of the memory.
int cuMemExportToShareableHandle(int* descriptor, Number handle, int, Number) {
  const auto found = created.find(handle);
  if (found == created.end()) return kInvalidValue;
  const std::size_t size = found->second;
  const int file = memfd_create("memory", 0);
  if (file < 0 || write(file, &size, sizeof size) != static_cast<ssize_t>(sizeof size)) return kOperatingSystem;
  return set(descriptor, file);
}
int cuMemImportFromShareableHandle(Number* handle, void* descriptor, int) {
  std::size_t size = 0;
  const auto file = static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor));
  if (pread(file, &size, sizeof size, 0) != static_cast<ssize_t>(sizeof size)) return kInvalidValue;
  set(handle, next_handle++);
  imported.emplace(*handle, size);
  return 0;
}
int cuMemSetAccess(Number address, std::size_t, const void*, std::size_t) {
  if (FAKE_REFUSES_ACCESS == 2 || (FAKE_REFUSES_ACCESS == 1 && for_rdma.count(mapped_handles[address]) == 1))
    return kInvalidValue;
  return mapped.count(address) == 1 ? 0 : kInvalidValue;
}
int cuMemUnmap(Number address, std::size_t size) { return take_exactly(mapped, address, size); }

}  // extern "C"
