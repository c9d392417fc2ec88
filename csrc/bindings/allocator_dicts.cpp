#include "bindings/allocator_dicts.hpp"

#include <algorithm>
#include <string>

#include "allocator/segments.hpp"
#include "bindings/python_values.hpp"

namespace py = pybind11;

namespace pac::bindings {
namespace {

using alloc::Action;
using alloc::BlockState;
using alloc::Bytes;
using alloc::PoolKind;

void add(py::dict& into, const std::string& prefix, const alloc::Stat& stat) {
  into[py::str(prefix + ".current")] = stat.current;
  into[py::str(prefix + ".peak")] = stat.peak;
  into[py::str(prefix + ".allocated")] = stat.allocated;
  into[py::str(prefix + ".freed")] = stat.freed;
}

void add(py::dict& into, const std::string& prefix, const alloc::StatArray& stats) {
  add(into, prefix + ".all", stats.of[0]);
  add(into, prefix + ".small_pool", stats.of[static_cast<std::size_t>(PoolKind::kSmall)]);
  add(into, prefix + ".large_pool", stats.of[static_cast<std::size_t>(PoolKind::kLarge)]);
}

template <class Part, class Whole>
double share(Part part, Whole whole, double of_nothing) {
  return whole == 0 ? of_nothing : static_cast<double>(part) / static_cast<double>(whole);
}

/// PyTorch writes -1 for no limit: every block may be split.
py::int_ split_limit(const alloc::Config& config) {
  return config.max_split_size == alloc::kUnlimited ? py::int_(-1) : py::int_(config.max_split_size);
}

const char* name(BlockState state) {
  switch (state) {
    case BlockState::kFree:
      return "inactive";
    case BlockState::kAllocated:
      return "active_allocated";
    case BlockState::kPending:
      return "active_pending_free";
  }
  throw std::logic_error("a block in no state");
}

const char* name(Action action) {
  switch (action) {
    case Action::kAlloc:
      return "alloc";
    case Action::kFreeRequested:
      return "free_requested";
    case Action::kFreeCompleted:
      return "free_completed";
    case Action::kSegmentAlloc:
      return "segment_alloc";
    case Action::kSegmentFree:
      return "segment_free";
    case Action::kSegmentMap:
      return "segment_map";
    case Action::kSegmentUnmap:
      return "segment_unmap";
    case Action::kSnapshot:
      return "snapshot";
    case Action::kOutOfMemory:
      return "oom";
  }
  throw std::logic_error("an event of no kind");
}

py::tuple pair(const alloc::PoolId& pool) { return py::make_tuple(pool.first, pool.second); }

py::dict segment(int device, const alloc::SegmentInfo& info) {
  Bytes allocated = 0;
  Bytes active = 0;
  Bytes requested = 0;
  py::list blocks;
  for (const alloc::BlockInfo& entry : info.blocks) {
    if (entry.state == BlockState::kAllocated) allocated += entry.size;
    if (entry.state != BlockState::kFree) {
      active += entry.size;
      requested += entry.requested;
    }
    blocks.append(block(entry));
  }
  py::dict result;
  result["device"] = device;
  result["address"] = info.address;
  result["total_size"] = info.size;
  result["allocated_size"] = allocated;
  result["active_size"] = active;
  result["requested_size"] = requested;
  result["stream"] = info.stream;
  result["segment_type"] = info.kind == PoolKind::kSmall ? "small" : "large";
  result["segment_pool_id"] = pair(info.pool);
  result["is_expandable"] = info.expandable;
  result["frames"] = frames(info.context);
  result["blocks"] = std::move(blocks);
  return result;
}

py::dict event(const alloc::TraceEntry& entry) {
  py::dict result;
  result["action"] = name(entry.action);
  result[entry.action == Action::kOutOfMemory ? "device_free" : "addr"] = entry.address;
  result["size"] = entry.size;
  result["stream"] = entry.stream;
  result["time_us"] = entry.time_us;
  result["pool_id"] = pair(entry.pool);
  result["frames"] = frames(entry.context);
  return result;
}

py::dict settings(const alloc::Config& config, const alloc::Trace& trace) {
  py::dict divisions;
  for (std::size_t interval = 0; interval < config.roundup_power2_divisions.size(); ++interval) {
    divisions[py::str(std::to_string(1U << interval))] = config.roundup_power2_divisions[interval];
  }
  py::dict result;
  result["PYTORCH_CUDA_ALLOC_CONF"] = alloc::to_string(config);
  result["max_split_size"] = split_limit(config);
  result["garbage_collection_threshold"] = config.garbage_collection_threshold;
  result["expandable_segments"] = config.growth == alloc::Growth::kVmm;
  result["roundup_power2_divisions"] = std::move(divisions);
  result["trace_alloc_overflowed"] = trace.dropped > 0;
  return result;
}

}  // namespace

py::dict counters(const alloc::Stats& stats, const alloc::Config& config) {
  py::dict result;
  add(result, "allocation", stats.allocation);
  add(result, "segment", stats.segment);
  add(result, "active", stats.active);
  add(result, "inactive_split", stats.inactive_split);
  add(result, "allocated_bytes", stats.allocated_bytes);
  add(result, "reserved_bytes", stats.reserved_bytes);
  add(result, "active_bytes", stats.active_bytes);
  add(result, "inactive_split_bytes", stats.inactive_split_bytes);
  add(result, "requested_bytes", stats.requested_bytes);
  for (const auto& [pool, stat] : stats.reserved_bytes_by_private_pool) {
    add(result,
        "reserved_bytes_by_private_pools." + std::to_string(pool.first) + "_" + std::to_string(pool.second) + ".all",
        stat);
  }
  add(result, "oversize_allocations", stats.oversize_allocations);
  add(result, "oversize_segments", stats.oversize_segments);
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["num_oom_rejections"] = 0;  // a policy of PyTorch 2.12, without a setting here
  result["num_sync_all_streams"] = stats.num_sync_all_streams;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["max_split_size"] = split_limit(config);
  return result;
}

void add_fragmentation(py::dict& into, const alloc::Stats& stats, const alloc::Fragmentation& fragmentation) {
  // Paused blocks are active and not reserved.
  into["utilization"] = std::min(1.0, share(stats.active_bytes.all().peak, stats.reserved_bytes.all().peak, 1.0));
  into["fragmentation.external"] = 1.0 - share(fragmentation.largest_free, fragmentation.free, 1.0);
  into["fragmentation.internal"] = 1.0 - share(fragmentation.requested, fragmentation.allocated, 1.0);
  for (const auto& [size, bytes] : fragmentation.free_below) {
    into[py::str("fragmentation.free_below." + std::to_string(size))] = share(bytes, fragmentation.free, 0.0);
  }
  for (const auto& [size, count] : fragmentation.histogram) {
    into[py::str("free_blocks." + std::to_string(size))] = count;
  }
  for (const auto& [stream, bytes] : fragmentation.free_by_stream) {
    into[py::str("free_bytes.stream." + std::to_string(stream))] = bytes;
  }
  into["free_bytes.largest"] = fragmentation.largest_free;
  into["paused_bytes"] = fragmentation.paused;
  py::list pins;
  for (const alloc::Pin& pin : fragmentation.pins) {
    py::dict entry;
    entry["address"] = pin.block.address;
    entry["size"] = pin.block.size;
    entry["requested"] = pin.block.requested;
    entry["pinned_bytes"] = pin.pinned;
    entry["frames"] = frames(pin.block.context);
    pins.append(std::move(entry));
  }
  into["pins"] = std::move(pins);
  into["pieces_moved"] = stats.num_pieces_moved;
  into["stream_steals"] = stats.num_stream_steals;
  into["driver_seconds"] = stats.driver_seconds;
}

py::dict to_dict(const alloc::PauseReport& report) {
  py::dict result;
  result["released"] = report.released;
  result["saved"] = report.saved;
  result["pinned"] = report.pinned;
  py::list skipped;
  for (const alloc::NotPaused& each : report.skipped) {
    skipped.append(py::make_tuple(py::make_tuple(each.pool.first, each.pool.second), each.bytes, each.reason));
  }
  result["skipped"] = skipped;
  return result;
}

py::dict to_dict(const alloc::ResumeReport& report) {
  py::dict result;
  result["mapped"] = report.mapped;
  result["restored"] = report.restored;
  return result;
}

py::dict scope(const alloc::ScopeStats& stats) {
  py::dict result;
  result["allocated_bytes"] = stats.allocated_bytes;
  result["peak_bytes"] = stats.peak_bytes;
  result["total_bytes"] = stats.total_bytes;
  result["allocations"] = stats.allocations;
  result["reserved_bytes"] = stats.reserved_bytes;
  return result;
}

py::dict block(const alloc::BlockInfo& block) {
  py::dict result;
  result["address"] = block.address;
  result["size"] = block.size;
  result["requested_size"] = block.requested;
  result["state"] = name(block.state);
  result["frames"] = frames(block.context);
  return result;
}

py::dict snapshot(int device, const std::vector<alloc::SegmentInfo>& segments, const alloc::Trace& trace,
                  const alloc::Config& config) {
  py::list all;
  for (const alloc::SegmentInfo& info : alloc::with_memory(segments)) all.append(segment(device, info));
  py::list events;
  for (const alloc::TraceEntry& entry : trace.entries) events.append(event(entry));
  // One list per device index, up to this device's.
  py::list traces;
  for (int index = 0; index < device; ++index) traces.append(py::list());
  traces.append(std::move(events));
  py::dict result;
  result["segments"] = std::move(all);
  result["device_traces"] = std::move(traces);
  result["allocator_settings"] = settings(config, trace);
  result["external_annotations"] = py::list();
  return result;
}

std::uint32_t action_bit(const std::string& action) {
  std::string known;
  for (auto index = static_cast<std::uint32_t>(Action::kAlloc);
       index <= static_cast<std::uint32_t>(Action::kOutOfMemory); ++index) {
    const char* const candidate = name(static_cast<Action>(index));
    if (action == candidate) return 1U << index;
    known += std::string(known.empty() ? "" : ", ") + candidate;
  }
  throw py::value_error("skip_actions takes " + known + "; got '" + action + "'");
}

}  // namespace pac::bindings
