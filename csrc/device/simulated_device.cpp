// Longer than 400 lines: each call of the port checks what the driver would refuse or not notice.
#include "device/simulated_device.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "common/check.hpp"
#include "device/simulated_checks.hpp"

namespace pac::alloc {
namespace {

// Acquired segments lie where cudaMalloc's do on Linux; reserved addresses above them, with room for a range in each of
// two pools of some thousand graphs. All are below 2^53, the limit of exact integers in every JSON reader.
constexpr Address kAcquiredBegin = 0x7f0000000000;
constexpr Address kVirtualBegin = Address{1} << 50;
constexpr Bytes kVirtualSize = (Bytes{1} << 53) - kVirtualBegin;
constexpr Bytes kLargestCapacity = Bytes{1} << 62;
constexpr Address kHostBegin = 0x100000000000;
constexpr Bytes kHostSize = Bytes{1} << 45;

/// Host time of one call, by the size of the handle or segment.
struct Cost {
  Bytes size;
  double us;
};

// Medians on one H200 (CUDA 13.0, driver 580), each measured on 1 GiB of handles and divided by their number. Mapping
// includes setting the access, which takes most of the time.
constexpr Cost kCreate[] = {
    {2_MiB, 3724 / 512.0}, {20_MiB, 290 / 51.2}, {32_MiB, 191 / 32.0}, {128_MiB, 60 / 8.0}, {512_MiB, 18 / 2.0}};
constexpr Cost kMap[] = {{2_MiB, (469 + 11294) / 512.0},
                         {20_MiB, (21 + 962) / 51.2},
                         {32_MiB, (13 + 591) / 32.0},
                         {128_MiB, (5 + 204) / 8.0},
                         {512_MiB, (1 + 78) / 2.0}};
constexpr Cost kUnmap[] = {
    {2_MiB, 6680 / 512.0}, {20_MiB, 635 / 51.2}, {32_MiB, 388 / 32.0}, {128_MiB, 110 / 8.0}, {512_MiB, 40 / 2.0}};
constexpr Cost kDestroy[] = {
    {2_MiB, 3794 / 512.0}, {20_MiB, 552 / 51.2}, {32_MiB, 518 / 32.0}, {128_MiB, 303 / 8.0}, {512_MiB, 233 / 2.0}};
constexpr Cost kAcquire[] = {{2_MiB, 54}, {1024_MiB, 62}};
constexpr Cost kRelease[] = {{2_MiB, 31}, {1024_MiB, 216}};
// Not measured: a system call each, and the driver's own work.
constexpr double kShareUs = 10;
constexpr double kRecordUs = 0.19;
constexpr double kQueryUs = 0.11;

/// The time of a call in microseconds. Between two rows it is linear in the logarithm of the size; beyond the last row
/// it grows with the size.
template <std::size_t N>
double cost(const Cost (&rows)[N], Bytes size) {
  const Cost* above = std::find_if(rows, rows + N, [size](const Cost& row) { return row.size >= size; });
  if (above == rows) return rows[0].us;
  const Cost& below = above[-1];
  if (above == rows + N) return below.us * static_cast<double>(size) / static_cast<double>(below.size);
  const double share = std::log2(static_cast<double>(size) / static_cast<double>(below.size)) /
                       std::log2(static_cast<double>(above->size) / static_cast<double>(below.size));
  return below.us + share * (above->us - below.us);
}

}  // namespace

/// Physical memory with more than one owner: the device that created it and those that imported it.
struct SimulatedDevice::Shared {
  std::uint64_t number;
  Bytes size;
  std::shared_ptr<std::atomic<Bytes>> kept;
  bool destroyed = false;  ///< by the device that created it

  Shared(std::uint64_t shared_number, Bytes bytes, std::shared_ptr<std::atomic<Bytes>> kept_by_importers)
      : number(shared_number), size(bytes), kept(std::move(kept_by_importers)) {}
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() {
    if (destroyed) *kept -= size;
  }
};

struct SimulatedDevice::Kernel {
  std::mutex mutex;  // taken after a device's
  std::map<int, std::shared_ptr<Shared>> descriptors;
  int next_descriptor = 3;
  std::uint64_t next_number = 1;
};

SimulatedDevice::Kernel& SimulatedDevice::kernel() {
  static Kernel& kernel = *std::make_unique<Kernel>().release();  // outlives every device
  return kernel;
}

std::optional<Address> AddressSpace::take(Bytes size) {
  if (size > end_ - begin_) return std::nullopt;
  const Bytes rounded = round_up(size, 2_MiB);
  Address candidate = full_to_;
  bool no_hole = true;
  auto at = taken_.lower_bound(full_to_);
  if (at != taken_.begin()) --at;  // this range may reach beyond full_to_
  for (; at != taken_.end(); ++at) {
    const auto& [address, taken] = *at;
    if (address >= candidate && address - candidate >= rounded) break;
    no_hole = no_hole && address <= candidate;
    candidate = std::max(candidate, round_up(address + round_up(taken, 2_MiB), 2_MiB));
    if (no_hole) full_to_ = candidate;
  }
  if (end_ < candidate || end_ - candidate < rounded) return std::nullopt;
  taken_.emplace(candidate, size);
  return candidate;
}

bool AddressSpace::take_at(Address address, Bytes size) {
  const Bytes rounded = round_up(size, 2_MiB);
  if (address % 512 != 0 || rounded > UINT64_MAX - address) return false;
  const auto after = taken_.lower_bound(address);
  if (after != taken_.end() && after->first - address < rounded) return false;
  if (after != taken_.begin()) {
    const auto& [before, taken] = *std::prev(after);
    if (address - before < round_up(taken, 2_MiB)) return false;
  }
  taken_.emplace_hint(after, address, size);
  return true;
}

void AddressSpace::give_back(Address address) {
  taken_.erase(address);
  if (address < full_to_) full_to_ = std::max(begin_, round_down(address, 2_MiB));
}

bool AddressSpace::holds(Address address, Bytes size) const {
  const auto found = taken_.find(address);
  return found != taken_.end() && found->second == size;
}

bool AddressSpace::covers(Address address, Bytes size) const {
  const auto after = taken_.upper_bound(address);
  if (after == taken_.begin()) return false;
  const auto& [begin, taken] = *std::prev(after);
  return address - begin < taken && size <= taken - (address - begin);
}

SimulatedDevice::SimulatedDevice(Bytes capacity, bool virtual_memory, bool asynchronous)
    : capacity_(capacity),
      virtual_memory_(virtual_memory),
      asynchronous_(asynchronous),
      failures_{{"acquire", {}}, {"acquire_host", {}}, {"copy", {}},   {"create", {}},
                {"map", {}},     {"reserve", {}},      {"export", {}}, {"import", {}}},
      acquired_(kAcquiredBegin, kVirtualBegin - kAcquiredBegin),
      virtual_(kVirtualBegin, kVirtualSize),
      host_(kHostBegin, kHostSize),
      host_limit_(kHostSize) {
  PAC_CHECK(capacity > 0 && capacity <= kLargestCapacity, "capacity is 1 to 2**62 bytes, got ", capacity);
}

Device::Memory SimulatedDevice::memory() {
  const std::lock_guard lock(mutex_);
  return {capacity_ - reserved_ - *kept_, capacity_};
}

double SimulatedDevice::driver_seconds() const {
  const std::lock_guard lock(mutex_);
  return (memory_us_ + events_us_) * 1e-6;
}

double SimulatedDevice::memory_seconds() const {
  const std::lock_guard lock(mutex_);
  return memory_us_ * 1e-6;
}

std::optional<Address> SimulatedDevice::acquire(Bytes size) {
  const std::lock_guard lock(mutex_);
  require(size > 0, "acquire", "of 0 bytes");
  ++calls_.acquire;
  if (fails("acquire") || size > capacity_ - reserved_ - *kept_) return std::nullopt;
  std::optional<Address> address = suggested_.load(std::memory_order_relaxed);
  if (*address == 0 || !acquired_.take_at(*address, size)) address = acquired_.take(size);
  if (!address) return std::nullopt;
  mapped_.emplace(*address, Mapping{size, next_handle_++});
  reserved_ += size;
  memory_us_ += cost(kAcquire, size);
  succeeded("acquire");
  return address;
}

void SimulatedDevice::release(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  require(acquired_.holds(address, size), "release", size, " bytes at ", Hex{address}, " were not acquired");
  ++calls_.release;
  ++calls_.synchronising;
  contents_.erase(mapped_.at(address).handle);
  mapped_.erase(address);
  acquired_.give_back(address);
  reserved_ -= size;
  memory_us_ += cost(kRelease, size);
  finish_all();
}

Address SimulatedDevice::reserve(Bytes size) {
  const std::lock_guard lock(mutex_);
  check_virtual("reserve", 0, size);
  ++calls_.reserve;
  if (fails("reserve")) throw DeviceError("simulated device: reserve: fails, as it was asked to");
  const std::optional<Address> address = virtual_.take(size);
  if (!address) throw DeviceError("simulated device: reserve: no hole of " + std::to_string(size) + " bytes is left");
  addresses_ += size;
  succeeded("reserve");
  return *address;
}

void SimulatedDevice::unreserve(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  check_virtual("unreserve", address, size);
  require(virtual_.holds(address, size), "unreserve", size, " bytes at ", Hex{address}, " were not reserved");
  const auto mapping = mapped_.lower_bound(address);
  require(mapping == mapped_.end() || mapping->first - address >= size, "unreserve", size, " bytes at ", Hex{address},
          " have memory mapped in them");
  ++calls_.unreserve;
  addresses_ -= size;
  virtual_.give_back(address);
}

std::optional<Handle> SimulatedDevice::create(Bytes size) {
  const std::lock_guard lock(mutex_);
  check_virtual("create", 0, size);
  ++calls_.create;
  if (fails("create") || size > capacity_ - reserved_ - *kept_) return std::nullopt;
  const Handle handle = next_handle_++;
  handles_.emplace(handle, Physical{size});
  reserved_ += size;
  memory_us_ += cost(kCreate, size);
  succeeded("create");
  return handle;
}

void SimulatedDevice::destroy(Handle handle, Bytes size) {
  const std::lock_guard lock(mutex_);
  check_virtual("destroy", 0, size);
  const auto found = handles_.find(handle);
  require(found != handles_.end(), "destroy", "handle ", handle, " does not exist");
  require(found->second.size == size, "destroy", "handle ", handle, " has ", found->second.size, " bytes, not ", size);
  require(found->second.mappings == 0, "destroy", "handle ", handle, " is mapped");
  require(found->second.descriptor < 0, "destroy", "handle ", handle, " has an open export");
  ++calls_.destroy;
  if (!found->second.imported) {
    reserved_ -= size;
    if (found->second.shared) {
      *kept_ += size;
      found->second.shared->destroyed = true;
    }
  }
  handles_.erase(found);
  contents_.erase(handle);
  memory_us_ += cost(kDestroy, size);
}

void SimulatedDevice::map(Address address, Bytes size, Handle handle) {
  const std::lock_guard lock(mutex_);
  check_virtual("map", address, size);
  const auto found = handles_.find(handle);
  require(found != handles_.end(), "map", "handle ", handle, " does not exist");
  require(found->second.size == size, "map", "handle ", handle, " has ", found->second.size, " bytes, not ", size);
  require(virtual_.covers(address, size), "map", size, " bytes at ", Hex{address}, " lie in no reserved range");
  const auto after = mapped_.lower_bound(address);
  const bool overlaps_after = after != mapped_.end() && after->first - address < size;
  const bool overlaps_before =
      after != mapped_.begin() && address - std::prev(after)->first < std::prev(after)->second.size;
  require(!overlaps_after && !overlaps_before, "map", size, " bytes at ", Hex{address}, " overlap a mapping");
  ++calls_.map;
  if (fails("map")) throw DeviceError("simulated device: map: fails, as it was asked to");
  mapped_.emplace(address, Mapping{size, handle});
  ++found->second.mappings;
  memory_us_ += cost(kMap, size);
  succeeded("map");
}

void SimulatedDevice::unmap(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  check_virtual("unmap", address, size);
  const auto found = mapped_.find(address);
  require(found != mapped_.end() && found->second.size == size && virtual_.covers(address, size), "unmap", size,
          " bytes at ", Hex{address}, " are not what was mapped there");
  ++calls_.unmap;
  --handles_.at(found->second.handle).mappings;
  mapped_.erase(found);
  memory_us_ += cost(kUnmap, size);
}

int SimulatedDevice::export_handle(Handle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  require(found != handles_.end(), "export", "handle ", handle, " does not exist");
  Physical& physical = found->second;
  require(!physical.imported, "export", "handle ", handle, " was imported");
  require(physical.descriptor < 0, "export", "handle ", handle, " has an open export");
  ++calls_.exports;
  if (fails("export")) throw DeviceError("simulated device: export: fails, as it was asked to");
  Kernel& shared = kernel();
  const std::lock_guard table(shared.mutex);
  if (!physical.shared) physical.shared = std::make_shared<Shared>(shared.next_number++, physical.size, kept_);
  physical.descriptor = shared.next_descriptor++;
  shared.descriptors.emplace(physical.descriptor, physical.shared);
  memory_us_ += kShareUs;
  succeeded("export");
  return physical.descriptor;
}

void SimulatedDevice::close_export(int descriptor) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(handles_.begin(), handles_.end(),
                                  [&](const auto& each) { return each.second.descriptor == descriptor; });
  require(descriptor >= 0 && found != handles_.end(), "close_export", "descriptor ", descriptor, " is not open");
  found->second.descriptor = -1;
  Kernel& shared = kernel();
  const std::lock_guard table(shared.mutex);
  shared.descriptors.erase(descriptor);
}

Handle SimulatedDevice::import_handle(const Process& owner, int descriptor, Bytes size) {
  const std::lock_guard lock(mutex_);
  check_virtual("import", 0, size);
  require(owner.nonce == this_process().nonce, "import", "process ", owner.pid, " is another one");
  std::shared_ptr<Shared> memory;
  {
    Kernel& shared = kernel();
    const std::lock_guard table(shared.mutex);
    const auto found = shared.descriptors.find(descriptor);
    require(found != shared.descriptors.end(), "import", "descriptor ", descriptor, " is not open");
    memory = found->second;
  }
  require(memory->size == size, "import", "descriptor ", descriptor, " has ", memory->size, " bytes, not ", size);
  require(std::none_of(handles_.begin(), handles_.end(),
                       [&](const auto& each) { return each.second.imported && each.second.shared == memory; }),
          "import", "descriptor ", descriptor, " is imported already");
  ++calls_.imports;
  if (fails("import")) throw DeviceError("simulated device: import: fails, as it was asked to");
  const Handle handle = next_handle_++;
  handles_.emplace(handle, Physical{size, 0, std::move(memory), -1, true});
  memory_us_ += kShareUs;
  succeeded("import");
  return handle;
}

Event SimulatedDevice::record(Stream stream) {
  const std::lock_guard lock(mutex_);
  require(captured_.count(stream) == 0, "record", "stream ", stream, " is being captured");
  ++calls_.record;
  events_us_ += kRecordUs;
  const Event event = next_event_++;
  events_.emplace(event, stream);
  pending_[stream].insert(event);
  if (!asynchronous_) finish(stream, event);
  return event;
}

bool SimulatedDevice::completed(Event event) {
  const std::lock_guard lock(mutex_);
  const Stream stream = stream_of("completed", event);
  ++calls_.query;
  events_us_ += kQueryUs;
  return pending_[stream].count(event) == 0;
}

std::optional<std::set<Stream>> SimulatedDevice::advanced() {
  const std::lock_guard lock(mutex_);
  return std::exchange(advanced_, {});
}

void SimulatedDevice::wait(Event event) {
  const std::lock_guard lock(mutex_);
  const Stream stream = stream_of("wait", event);
  ++calls_.wait;
  ++calls_.synchronising;
  finish(stream, event);
}

void SimulatedDevice::recycle(Event event) {
  const std::lock_guard lock(mutex_);
  pending_[stream_of("recycle", event)].erase(event);
  events_.erase(event);
}

void SimulatedDevice::synchronize() {
  const std::lock_guard lock(mutex_);
  ++calls_.synchronize;
  ++calls_.synchronising;
  finish_all();
}

void SimulatedDevice::complete(Stream stream, std::uint64_t count) {
  const std::lock_guard lock(mutex_);
  const std::set<Event>& pending = pending_[stream];
  if (pending.empty() || count == 0) return;
  finish(stream, count >= pending.size() ? *pending.rbegin()
                                         : *std::next(pending.begin(), static_cast<std::ptrdiff_t>(count) - 1));
}

void SimulatedDevice::complete_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& [stream, pending] : pending_) {
    if (!pending.empty()) finish(stream, *pending.rbegin());
  }
}

void SimulatedDevice::fail(const std::string& call, std::uint64_t count, std::uint64_t skip) {
  const std::lock_guard lock(mutex_);
  const auto found = failures_.find(call);
  PAC_CHECK(found != failures_.end(),
            "call is acquire, acquire_host, copy, create, map, reserve, export or import, got '", call, "'");
  found->second = {count, skip};
}

SimulatedDevice::Calls SimulatedDevice::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

Bytes SimulatedDevice::reserved() const {
  const std::lock_guard lock(mutex_);
  return reserved_;
}

std::uint64_t SimulatedDevice::open_exports() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::uint64_t>(
      std::count_if(handles_.begin(), handles_.end(), [](const auto& each) { return each.second.descriptor >= 0; }));
}

std::uint64_t SimulatedDevice::live_events() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

SimulatedDevice::Piece SimulatedDevice::physical(Address address) const {
  const std::lock_guard lock(mutex_);
  return piece_at("physical", address);
}

SimulatedDevice::Piece SimulatedDevice::piece_at(const char* call, Address address) const {
  const auto found = mapping_at(call, address);
  const Bytes offset = address - found->first;
  return {found->second.handle, offset, found->second.size - offset};
}

std::uint64_t SimulatedDevice::shared_memory(Address address) const {
  const std::lock_guard lock(mutex_);
  const auto physical = handles_.find(mapping_at("shared_memory", address)->second.handle);
  return physical == handles_.end() || !physical->second.shared ? 0 : physical->second.shared->number;
}

std::map<Address, SimulatedDevice::Mapping>::const_iterator SimulatedDevice::mapping_at(const char* call,
                                                                                        Address address) const {
  const auto after = mapped_.upper_bound(address);
  const auto found = after == mapped_.begin() ? mapped_.end() : std::prev(after);
  require(found != mapped_.end() && address - found->first < found->second.size, call, "nothing lies at ",
          Hex{address});
  return found;
}

Event SimulatedDevice::now() const {
  const std::lock_guard lock(mutex_);
  return next_event_;
}

bool SimulatedDevice::finished(Stream stream, Event point) const {
  const std::lock_guard lock(mutex_);
  const auto found = done_.find(stream);
  return point <= all_done_ || (found != done_.end() && point <= found->second);
}

bool SimulatedDevice::fails(const char* call) {
  Failure& failure = failures_.at(call);
  if (failure.skip > 0 || failure.count == 0) return false;
  --failure.count;
  return true;
}

void SimulatedDevice::succeeded(const char* call) {
  Failure& failure = failures_.at(call);
  if (failure.skip > 0) --failure.skip;
}

void SimulatedDevice::check_virtual(const char* call, Address address, Bytes size) const {
  require(virtual_memory_, call, "this device has no virtual memory");
  require(size > 0 && size % granularity() == 0, call, size, " bytes are not a positive multiple of 2 MiB");
  require(address % granularity() == 0, call, "the address ", Hex{address}, " is not a multiple of 2 MiB");
}

void SimulatedDevice::finish(Stream stream, Event last) {
  std::set<Event>& pending = pending_[stream];
  pending.erase(pending.begin(), pending.upper_bound(last));
  done_[stream] = std::max(done_[stream], last);
  advanced_.insert(stream);
}

void SimulatedDevice::finish_all() {
  for (const auto& [stream, pending] : pending_) {
    if (!pending.empty()) advanced_.insert(stream);
  }
  pending_.clear();
  all_done_ = next_event_++;
}

Stream SimulatedDevice::stream_of(const char* call, Event event) const {
  const auto found = events_.find(event);
  require(found != events_.end(), call, "event ", event, " is unknown or was recycled");
  return found->second;
}

}  // namespace pac::alloc
