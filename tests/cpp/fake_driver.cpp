// A libcuda.so.1 with one device of 1 GiB and no memory: addresses are numbers. It has the functions that the allocator
// calls, by the names and signatures of the driver's binary interface, written down here without cuda.h.
#include <cstddef>
#include <map>

#ifndef FAKE_INIT_STATUS
#define FAKE_INIT_STATUS 0
#endif
#ifndef FAKE_VIRTUAL_MEMORY
#define FAKE_VIRTUAL_MEMORY 1
#endif

namespace {

using Number = unsigned long long;
constexpr std::size_t kTotal = std::size_t{1} << 30;
constexpr std::size_t kGranularity = std::size_t{2} << 20;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kVirtualMemorySupported = 102;

int context_depth = 0;
Number next_address = Number{1} << 40;
Number next_handle = 1;
std::size_t in_use = 0;
void* const kContext = &context_depth;
void* const kEvent = &in_use;
std::map<Number, std::size_t> allocated, reserved, created, mapped;

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
Number fake_left() { return static_cast<Number>(context_depth) + in_use + mapped.size(); }
/// Pieces of physical memory, which only virtual memory has.
Number fake_created() { return next_handle - 1; }

int cuInit(unsigned) { return FAKE_INIT_STATUS; }
int cuGetErrorName(int, const char** name) { return set(name, "FAKE_ERROR"); }
int cuGetErrorString(int, const char** text) { return set(text, "a fault of the fake driver"); }
int cuDeviceGet(int* device, int index) { return set(device, index); }
int cuDeviceGetCount(int* count) { return set(count, 1); }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  return set(value, attribute == kVirtualMemorySupported ? FAKE_VIRTUAL_MEMORY : 0);
}
int cuDeviceCanAccessPeer(int* can, int, int) { return set(can, 0); }
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
int cuStreamGetCtx(void*, void** context) { return set(context, kContext); }

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
int cuMemCreate(Number* handle, std::size_t size, const void*, Number) {
  if (in_use + size > kTotal) return kOutOfMemory;
  in_use += size;
  set(handle, next_handle++);
  created.emplace(*handle, size);
  return 0;
}
int cuMemRelease(Number handle) { return give_back(created, handle); }
int cuMemMap(Number address, std::size_t size, std::size_t, Number handle, Number) {
  return created.count(handle) == 1 && mapped.emplace(address, size).second ? 0 : kInvalidValue;
}
int cuMemSetAccess(Number address, std::size_t, const void*, std::size_t) {
  return mapped.count(address) == 1 ? 0 : kInvalidValue;
}
int cuMemUnmap(Number address, std::size_t size) { return take_exactly(mapped, address, size); }

}  // extern "C"
