// One thread, every kind of operation, and a model that knows the answer to each.
#pragma once

#include <deque>
#include <iterator>
#include <memory>
#include <set>
#include <vector>

#include "allocator/caching_allocator.hpp"
#include "allocator/sharing.hpp"
#include "memory_model.hpp"
#include "stress.hpp"

namespace stress {

constexpr Stream kStreams[] = {0, 7, 0x55a0c0ffee00, 0x55a0c0ffee80};

constexpr Tag kTags[] = {0, 1, 2};

struct Live {
  Address address;
  Bytes size;
  Bytes requested;
  PoolLife owner;
  std::vector<Stream> streams;                              ///< its own, and those recorded
  Tag tag;                                                  ///< as it was asked for
  std::vector<std::shared_ptr<const Address>> opened = {};  ///< in other processes
};

struct PrivatePool {
  explicit PrivatePool(PoolId pool_id) : id(pool_id) {}

  PoolId id;
  PoolLife life = 0;  ///< 0: it does not exist
  int uses = 0;
  std::set<Stream> open;  ///< streams that allocate from it
};

/// A counter of the model's own.
struct Counter {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t added = 0;
  std::int64_t taken = 0;

  void add(Bytes amount) {
    current += static_cast<std::int64_t>(amount);
    added += static_cast<std::int64_t>(amount);
    if (current > peak) peak = current;
  }
  void take(Bytes amount) {
    current -= static_cast<std::int64_t>(amount);
    taken += static_cast<std::int64_t>(amount);
  }
};

/// What the counters should say.
struct Expected {
  Counter allocation, allocated, requested;
  std::int64_t out_of_memory = 0;
};

struct OpenScope {
  std::int64_t id;
  ScopeStats counts;  ///< `allocated_bytes` and `reserved_bytes`: at the beginning
};

class Modelled {
 public:
  explicit Modelled(const Options& options);
  void run();
  std::uint64_t done() const { return done_; }

 private:
  Stream any_stream() { return kStreams[random_.below(std::size(kStreams))]; }
  Live& any_live() { return live_[random_.below(live_.size())]; }
  Bytes next_size();
  void step();
  void allocate(Bytes size, Stream stream, Tag tag = 0);
  void pause_and_resume();
  void free(std::size_t index);
  void record_stream();
  void share_or_close();
  void refuse_unknown();
  void complete_events();
  void empty_cache();
  void inject_failures();
  void change_pools();
  void release(PrivatePool& pool);
  void end_capture(PrivatePool& pool);
  void configure();
  void reset_stats();
  void change_scopes();
  void check_counters();
  void check_blocks();
  void finish();

  Options options_;
  Random random_;
  Setup setup_;
  SimulatedDevice device_;
  MemoryModel model_;
  std::shared_ptr<WatchedDevice> watched_;
  std::shared_ptr<CachingAllocator> core_;
  std::shared_ptr<SimulatedDevice> receiver_;  ///< another process's
  std::shared_ptr<Importer> importer_;
  std::uint64_t done_ = 0;

  std::vector<Live> live_;
  std::deque<Address> freed_;
  std::vector<Bytes> sizes_;  ///< that come again
  PrivatePool pools_[3] = {PrivatePool({1, 0}), PrivatePool({2, 0}), PrivatePool({0, 5})};
  std::vector<PrivatePool*> open_;  ///< the latest first, as it is asked first
  PoolLife lives_ = 0;
  Expected expected_;
  std::vector<OpenScope> scopes_;
  bool failing_ = false;
  std::int64_t observed_ = 0;
};

}  // namespace stress
