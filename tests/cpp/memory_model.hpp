// Who uses which bytes, told from what was asked of the allocator and from the device's mappings alone.
#pragma once

#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "device/simulated_device.hpp"
#include "stress.hpp"

namespace stress {

/// Which life of which private pool; 0 is the default pool. An id may live again.
using PoolLife = std::uint64_t;

struct Use {
  Stream stream;
  Event point;  ///< the stream's work on the bytes precedes this point
};

/// The bytes of a numbered space: in use, or who may not be done with them.
class UseMap {
 public:
  struct Range {
    std::uint64_t end;
    bool live;
    PoolLife pool;
    std::vector<Use> uses;
  };

  void set(std::uint64_t begin, Range range);
  void erase(std::uint64_t begin, std::uint64_t end);
  template <class Visit>
  void visit_with_begin(std::uint64_t begin, std::uint64_t end, Visit visit) const {
    auto range = ranges_.upper_bound(begin);
    if (range != ranges_.begin()) --range;
    for (; range != ranges_.end() && range->first < end; ++range) {
      if (range->second.end > begin) visit(range->first, range->second);
    }
  }
  template <class Visit>
  void visit(std::uint64_t begin, std::uint64_t end, Visit visit) const {
    visit_with_begin(begin, end, [&](std::uint64_t, const Range& range) { visit(range); });
  }

 private:
  void cut(std::uint64_t at);

  std::map<std::uint64_t, Range> ranges_;
};

class MemoryModel {
 public:
  explicit MemoryModel(const SimulatedDevice& device) : device_(device) {}

  std::set<PoolLife> alive;   ///< pools whose memory a graph may read at any time
  std::set<PoolLife> lent;    ///< those of them that may serve others before an allocation fails
  std::set<Stream> captured;  ///< into graphs: no event may be recorded on them, and nothing may wait

  /// A block was handed out. Throws Violation where another has its bytes, or a stream may not be done with them.
  /// Returns whose memory it is: a pool that was lent from keeps it.
  PoolLife allocated(Address address, Bytes size, Stream stream, PoolLife pool);
  /// A block is about to be freed, after these uses; `there`: its parts that have memory.
  void freed(Address address, Bytes size, PoolLife pool, const std::vector<Use>& uses,
             const std::vector<std::pair<Address, Bytes>>& there);
  /// Paused addresses got memory again.
  void resumed(Address address, Bytes size);
  /// The allocator takes the memory from under a range of addresses.
  void taking(Address address, Bytes size, bool waits);
  void destroyed(Handle handle);
  bool is_used(Address address, Bytes size) const;
  /// Keeps the first complaint for check(), because a device's caller is no place to throw to.
  void expect(bool holds, const std::string& complaint);
  void check() const { require(complaint_.empty(), complaint_); }

 private:
  template <class Visit>
  void pieces(Address address, Bytes size, Visit visit) const;

  const SimulatedDevice& device_;
  UseMap addresses_;
  UseMap physical_;
  std::string complaint_;
};

/// The simulated device, with a model that sees what is taken away, and a list of what is mapped.
class WatchedDevice final : public Device {
 public:
  WatchedDevice(SimulatedDevice& device, MemoryModel& model) : device_(device), model_(model) {}

  std::map<Address, Bytes> mapped;  ///< segments and mappings
  bool pausing = false;             ///< live blocks lose their memory, and get other memory at the same addresses

  /// The parts of a range of addresses that have memory: all, but while memory is paused.
  std::vector<std::pair<Address, Bytes>> with_memory(Address address, Bytes size) const;
  std::string name() const override { return device_.name(); }
  Memory memory() override { return device_.memory(); }
  double driver_seconds() const override { return device_.driver_seconds(); }
  std::optional<Address> acquire(Bytes size) override;
  void release(Address address, Bytes size) override;
  bool has_virtual_memory() const override { return device_.has_virtual_memory(); }
  Bytes granularity() const override { return device_.granularity(); }
  Address reserve(Bytes size) override { return device_.reserve(size); }
  void unreserve(Address address, Bytes size) override { device_.unreserve(address, size); }
  std::optional<Handle> create(Bytes size) override { return device_.create(size); }
  void destroy(Handle handle, Bytes size) override;
  void map(Address address, Bytes size, Handle handle) override;
  void unmap(Address address, Bytes size) override;
  int export_handle(Handle handle) override { return device_.export_handle(handle); }
  void close_export(int descriptor) override { device_.close_export(descriptor); }
  Handle import_handle(const Process& owner, int descriptor, Bytes size) override {
    return device_.import_handle(owner, descriptor, size);
  }
  Bytes host_available() override { return device_.host_available(); }
  std::optional<Address> acquire_host(Bytes size) override { return device_.acquire_host(size); }
  void release_host(Address address, Bytes size) override { device_.release_host(address, size); }
  void copy_to_host(const std::vector<Copy>& copies) override { device_.copy_to_host(copies); }
  void copy_from_host(const std::vector<Copy>& copies) override { device_.copy_from_host(copies); }
  Event record(Stream stream) override;
  bool completed(Event event) override { return device_.completed(event); }
  void wait(Event event) override { device_.wait(event); }
  void recycle(Event event) override { device_.recycle(event); }
  std::optional<Capture> capture(Stream stream) override { return device_.capture(stream); }
  std::vector<GraphNode> dependencies(GraphNode node) override { return device_.dependencies(node); }
  void synchronize() override;

 private:
  SimulatedDevice& device_;
  MemoryModel& model_;
};

}  // namespace stress
