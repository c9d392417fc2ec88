#include "bindings/replay.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/columns.hpp"
#include "bindings/python_values.hpp"
#include "snapshots/replay.hpp"

namespace py = pybind11;

namespace pac::bindings {
namespace {

using alloc::Bytes;

using SegmentRow = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::size_t, bool, bool>;
using BlockRow = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::size_t, bool>;

/// The blocks that are paused before the first event: address -> bytes without memory.
using PausedBytes = std::map<std::uint64_t, Bytes>;

/// (address, size, stream, pool, small, expandable) of each segment, and (address, size, requested, stream, pool,
/// pending) of each block, both by address. A block outside every segment gets a segment of its own, at an unknown
/// place. Paused blocks are left out: they have no memory.
std::vector<alloc::SegmentInfo> to_segments(const std::vector<SegmentRow>& segments,
                                            const std::vector<BlockRow>& blocks,
                                            const std::vector<alloc::PoolId>& pools, const PausedBytes& paused) {
  std::vector<alloc::SegmentInfo> result;
  auto at = segments.begin();
  const auto pass = [&](Bytes before) {
    for (; at != segments.end() && std::get<0>(*at) <= before; ++at) {
      const auto& [address, size, stream, pool, small, expandable] = *at;
      const alloc::PoolKind kind = small ? alloc::PoolKind::kSmall : alloc::PoolKind::kLarge;
      result.push_back({address, size, stream, kind, pools.at(pool), expandable, {}, {}});
    }
  };
  for (const auto& [address, size, requested, stream, pool, pending] : blocks) {
    pass(address);
    if (paused.count(address) > 0) continue;
    if (result.empty() || address - result.back().address >= result.back().size) {
      result.push_back({address, size, stream, alloc::PoolKind::kLarge, pools.at(pool), true, {}, {}});
    }
    const auto state = pending ? alloc::BlockState::kPending : alloc::BlockState::kAllocated;
    result.back().blocks.push_back({address, size, requested, state, {}});
  }
  pass(UINT64_MAX);
  return result;
}

/// A replay, and the arrays of its events.
class Replay {
 public:
  Replay(const py::object& action, const py::object& address, const py::object& size, const py::object& stream,
         const py::object& pool, const py::iterable& pools, const py::object& emptied,
         const std::vector<SegmentRow>& segments, const std::vector<BlockRow>& blocks, const alloc::Config& config,
         bool expandable, const py::object& capacity, std::size_t points, const std::optional<PausedBytes>& paused)
      : events_(action, address, size, stream, pool) {
    std::vector<alloc::PoolId> ids;
    for (const py::handle id : pools) ids.push_back(to_pool(id));
    const std::vector<alloc::SegmentInfo> existing = to_segments(segments, blocks, ids, paused.value_or(PausedBytes()));
    alloc::Config settings = config;
    if (expandable) settings.growth = alloc::Growth::kExpandable;
    const Bytes bytes = to_bytes("capacity", capacity);
    const Column<std::uint64_t> rows("emptied", emptied);
    std::vector<std::uint64_t> ends(rows.data(), rows.data() + rows.count());
    const py::gil_scoped_release no_gil;
    core_ = std::make_unique<alloc::Replay>(events_.columns(), std::move(ids), std::move(ends), settings, bytes,
                                            existing, points);
    if (!paused) return;
    std::vector<alloc::ReplayedBefore> before;
    for (const auto& [at, bytes_of, requested, on, of_pool, pending] : blocks) {
      if (pending) continue;  // freed, so it is not resumed
      const auto absent = paused->find(at);
      before.push_back({{at, bytes_of, absent == paused->end() ? 0 : absent->second},
                        requested,
                        on,
                        static_cast<std::uint32_t>(of_pool)});
    }
    core_->follow_pauses(std::move(before));
  }

  bool advance(std::size_t count) {
    const py::gil_scoped_release no_gil;
    const std::lock_guard lock(mutex_);
    return core_->advance(count);
  }

  std::size_t position() const { return core_->position(); }

  py::dict result() const {
    const std::lock_guard lock(mutex_);
    const alloc::Stats stats = core_->stats();
    const alloc::ReplayCounts& counts = core_->counts();
    py::dict result;
    result["peak_allocated"] = stats.allocated_bytes.all().peak;
    result["peak_active"] = stats.active_bytes.all().peak;
    result["peak_requested"] = stats.requested_bytes.all().peak;
    result["peak_reserved"] = stats.reserved_bytes.all().peak;
    result["driver_calls"] = core_->driver_calls();
    result["driver_seconds"] = core_->driver_seconds();
    result["retries"] = stats.num_alloc_retries;
    const auto failed = core_->out_of_memory_at();
    result["oom_at"] = failed ? py::object(py::int_(*failed)) : py::none();
    result["allocations"] = counts.allocations;
    result["unknown_frees"] = counts.unknown_frees;
    result["lost_frees"] = counts.lost_frees;
    result["cache_emptied"] = counts.cache_emptied;
    return result;
  }

  py::list timeline() const {
    const std::lock_guard lock(mutex_);
    py::list points;
    for (const alloc::TimelinePoint& point : core_->timeline()) {
      points.append(py::make_tuple(point.end, point.allocated, point.active, point.reserved));
    }
    return points;
  }

 private:
  EventArrays events_;
  std::unique_ptr<alloc::Replay> core_;
  mutable std::mutex mutex_;
};

}  // namespace

void bind_replay(py::module_& module) {
  py::class_<Replay>(module, "Replay", "The events of a recording, given to an allocator on a simulated device.")
      .def(
          py::init<const py::object&, const py::object&, const py::object&, const py::object&, const py::object&,
                   const py::iterable&, const py::object&, const std::vector<SegmentRow>&, const std::vector<BlockRow>&,
                   const alloc::Config&, bool, const py::object&, std::size_t, const std::optional<PausedBytes>&>(),
          py::arg("action"), py::arg("address"), py::arg("size"), py::arg("stream"), py::arg("pool"), py::arg("pools"),
          py::arg("emptied"), py::arg("segments"), py::arg("blocks"), py::arg("config"), py::arg("expandable"),
          py::arg("capacity"), py::arg("points"), py::arg("paused") = py::none())
      .def("advance", &Replay::advance, py::arg("count"))
      .def("result", &Replay::result)
      .def("timeline", &Replay::timeline)
      .def_property_readonly("position", &Replay::position);
}

}  // namespace pac::bindings
