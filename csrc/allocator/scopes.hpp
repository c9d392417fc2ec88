// Allocations counted between two points of a program.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocator/stats.hpp"

namespace pac::alloc {

/// Counts between open() and the close() of the same scope.
struct ScopeStats {
  std::int64_t allocated_bytes = 0;  ///< left over: allocated at the end minus at the beginning
  std::int64_t peak_bytes = 0;       ///< the peak above the memory allocated at the beginning
  std::int64_t total_bytes = 0;      ///< bytes of all allocations
  std::int64_t allocations = 0;
  std::int64_t reserved_bytes = 0;  ///< reserved at the end minus at the beginning
};

/// An allocation is counted in the latest scope alone; close() adds later scopes' counts to the earlier ones'.
class Scopes {
 public:
  explicit Scopes(const Stats& stats) : stats_(stats) {}

  std::int64_t open() {
    const std::int64_t allocated = stats_.allocated_bytes.all().current;
    scopes_.push_back({next_, allocated, stats_.reserved_bytes.all().current, allocated});
    return next_++;
  }

  /// Counts an allocation that `stats` has counted.
  void count(Bytes size) {
    if (scopes_.empty()) return;
    Scope& scope = scopes_.back();
    scope.peak = std::max(scope.peak, stats_.allocated_bytes.all().current);
    scope.total += static_cast<std::int64_t>(size);
    ++scope.allocations;
  }

  ScopeStats close(std::int64_t id) {
    const auto scope = std::find_if(scopes_.begin(), scopes_.end(), [&](const Scope& each) { return each.id == id; });
    if (scope == scopes_.end()) throw std::logic_error("no scope " + std::to_string(id) + " is open");
    // Later scopes began inside this one: their counts are this scope's too.
    Scope counts = *scope;
    for (auto later = std::next(scope); later != scopes_.end(); ++later) counts.add(*later);
    // The scope before has the later scopes' counts by itself, and only lacks this scope's own.
    if (scope != scopes_.begin()) std::prev(scope)->add(*scope);
    scopes_.erase(scope);
    return {stats_.allocated_bytes.all().current - counts.allocated, counts.peak - counts.allocated, counts.total,
            counts.allocations, stats_.reserved_bytes.all().current - counts.reserved};
  }

 private:
  struct Scope {
    std::int64_t id;
    std::int64_t allocated;  ///< at the beginning
    std::int64_t reserved;   ///< at the beginning
    std::int64_t peak;
    std::int64_t total = 0;
    std::int64_t allocations = 0;

    void add(const Scope& inner) {
      peak = std::max(peak, inner.peak);
      total += inner.total;
      allocations += inner.allocations;
    }
  };

  const Stats& stats_;
  std::vector<Scope> scopes_;  ///< the latest last
  std::int64_t next_ = 0;
};

}  // namespace pac::alloc
