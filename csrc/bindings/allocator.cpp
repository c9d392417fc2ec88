// Longer than 400 lines: one class, all of whose methods Python calls.
#include "bindings/allocator.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "allocator/caching_allocator.hpp"
#include "allocator/config.hpp"
#include "allocator/tags.hpp"
#include "bindings/allocator_config.hpp"
#include "bindings/allocator_dicts.hpp"
#include "bindings/python_values.hpp"
#include "bindings/sharing.hpp"
#include "bindings/simulated_device.hpp"
#include "device/simulated_device.hpp"

#if PAC_CUDA_ALLOCATOR
#include "allocator/cuda_runtime.hpp"
#endif

namespace py = pybind11;

namespace pac::bindings {
namespace {

using alloc::Address;
using alloc::Bytes;
using alloc::Config;
using alloc::SimulatedDevice;

/// The core for Python. Calls that may wait for the device release the GIL; callbacks acquire the GIL.
class CachingAllocator {
 public:
  CachingAllocator(std::shared_ptr<alloc::CachingAllocator> core, int device)
      : core_(std::move(core)), device_(device) {}
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;
  ~CachingAllocator() {
    core_.reset();
    collect_dropped();
  }

  alloc::CachingAllocator& core() const { return *core_; }
  alloc::PrivatePools& pools() const { return *core_; }

  Address allocate(const py::object& size, const py::object& stream, const std::string& tag) const {
    const Bytes bytes = to_bytes("size", size);
    const alloc::Stream on = to_number("stream", stream);
    alloc::Context context = this->context();
    const py::gil_scoped_release no_gil;
    return core_->allocate(bytes, on, std::move(context), alloc::tag_named(tag));
  }

  /// The calling stack, if history with stacks is recorded.
  alloc::Context context() const { return stacks_ ? python_stack() : nullptr; }

  void record_history(const std::optional<std::string>& enabled, const py::object& max_entries,
                      const std::optional<std::string>& stacks, bool clear, const py::iterable& skip_actions) {
    if (enabled && enabled != "all" && enabled != "state") {
      throw py::value_error("enabled must be 'all', 'state' or None, got '" + *enabled + "'");
    }
    if (stacks && stacks != "python") throw py::value_error("stacks must be 'python' or None, got '" + *stacks + "'");
    alloc::HistoryOptions options;
    options.enabled = enabled.has_value();
    options.record_trace = enabled == "all";
    options.max_entries = to_number("max_entries", max_entries);
    options.clear = clear;
    for (const py::handle action : skip_actions) options.skip_actions |= action_bit(action.cast<std::string>());
    core_->record_history(options);
    stacks_ = options.enabled && stacks.has_value();
    collect_dropped();
  }

  py::dict counters() const { return bindings::counters(core_->stats(), core_->config()); }

  py::dict stats() const {
    const alloc::Stats stats = core_->stats();
    py::dict result = bindings::counters(stats, core_->config());
    add_fragmentation(result, stats, core_->fragmentation());
    return result;
  }

  py::dict snapshot(const py::object& pool) const {
    return bindings::snapshot(device_, core_->segments(to_pool(pool)), core_->trace(), core_->config());
  }

 private:
  std::shared_ptr<alloc::CachingAllocator> core_;
  int device_;
  bool stacks_ = false;
};

/// Accepts the streams whose allocations come from a pool; None accepts all.
std::function<bool(alloc::Stream)> stream_filter(const py::object& streams) {
  if (streams.is_none()) return [](alloc::Stream) { return true; };
  std::unordered_set<alloc::Stream> accepted;
  for (const py::handle stream : py::iterable(streams)) accepted.insert(to_number("a stream", stream));
  return [accepted = std::move(accepted)](alloc::Stream stream) { return accepted.count(stream) > 0; };
}

py::dict delta(const alloc::CheckpointDelta& changes) {
  py::dict result;
  result["freed"] = changes.freed;
  result["allocated"] = changes.allocated;
  return result;
}

void bind_private_pools(py::class_<CachingAllocator, std::shared_ptr<CachingAllocator>>& type) {
  using Self = CachingAllocator;
  type.def(
          "begin_allocate_to_pool",
          [](const Self& self, const py::object& pool, const py::object& streams, const std::string& tag,
             bool captures) {
            self.pools().begin_allocate_to_pool(to_pool(pool), stream_filter(streams), alloc::tag_named(tag), captures);
          },
          py::arg("pool"), py::arg("streams") = py::none(), py::arg("tag") = "", py::arg("captures") = true)
      .def(
          "end_allocate_to_pool",
          [](const Self& self, const py::object& pool) { self.pools().end_allocate_to_pool(to_pool(pool)); },
          py::arg("pool"))
      .def(
          "create_or_incref_pool",
          [](const Self& self, const py::object& pool, const std::string& tag) {
            self.pools().create_or_incref_pool(to_pool(pool), nullptr, alloc::tag_named(tag));
          },
          py::arg("pool"), py::arg("tag") = "")
      .def(
          "release_pool",
          [](const Self& self, const py::object& pool) {
            const alloc::PoolId id = to_pool(pool);
            const py::gil_scoped_release no_gil;
            self.pools().release_pool(id);
          },
          py::arg("pool"))
      .def(
          "pool_use_count",
          [](const Self& self, const py::object& pool) { return self.pools().pool_use_count(to_pool(pool)); },
          py::arg("pool"))
      .def(
          "set_use_on_oom",
          [](const Self& self, const py::object& pool, bool use) { self.pools().set_use_on_oom(to_pool(pool), use); },
          py::arg("pool"), py::arg("use"))
      .def(
          "set_no_split", [](const Self& self, const py::object& pool) { self.pools().set_no_split(to_pool(pool)); },
          py::arg("pool"))
      .def(
          "live_allocations",
          [](const Self& self, const py::object& pool) { return self.pools().live_allocations(to_pool(pool)); },
          py::arg("pool"))
      .def(
          "checkpoint", [](const Self& self, const py::object& pool) { return self.pools().checkpoint(to_pool(pool)); },
          py::arg("pool"))
      .def(
          "restore",
          [](const Self& self, const alloc::PoolCheckpoint& checkpoint) {
            return delta(self.pools().restore(checkpoint));
          },
          py::arg("checkpoint"));
}

/// By name; the empty name stands for memory without a tag.
std::vector<alloc::Tag> tags_named(const std::vector<std::string>& names) {
  std::vector<alloc::Tag> tags(names.size());
  std::transform(names.begin(), names.end(), tags.begin(), &alloc::tag_named);
  return tags;
}

alloc::PauseOptions pause_options(const std::map<std::string, bool>& keep, bool resume_on_allocation) {
  alloc::PauseOptions options;
  for (const auto& [name, kept] : keep) options.keep[alloc::tag_named(name)] = kept;
  options.resume_on_allocation = resume_on_allocation;
  return options;
}

void bind_pausing(py::class_<CachingAllocator, std::shared_ptr<CachingAllocator>>& type) {
  using Self = CachingAllocator;
  type.def(
          "check_pause",
          [](const Self& self, const std::map<std::string, bool>& keep) {
            self.core().check_pause(pause_options(keep, false));
          },
          py::arg("keep"))
      .def(
          "pause",
          [](const Self& self, const std::map<std::string, bool>& keep, bool resume_on_allocation) {
            const alloc::PauseOptions options = pause_options(keep, resume_on_allocation);
            const auto pause = [&] {
              const py::gil_scoped_release no_gil;
              return self.core().pause(options);
            };
            return to_dict(pause());
          },
          py::arg("keep"), py::arg("resume_on_allocation") = false)
      .def(
          "resume",
          [](const Self& self, const std::vector<std::string>& tags) {
            const auto resume = [&] {
              const py::gil_scoped_release no_gil;
              return self.core().resume(tags_named(tags));
            };
            return to_dict(resume());
          },
          py::arg("tags"))
      .def("paused",
           [](const Self& self) {
             py::dict result;
             for (const alloc::PausedInfo& each : self.core().paused()) {
               result[py::str(alloc::name_of(each.tag))] = py::make_tuple(each.released, each.saved);
             }
             return result;
           })
      .def(
          "saved",
          [](const Self& self, const py::object& address, const py::object& size) {
            py::list ranges;
            for (const alloc::HostRange& each :
                 self.core().saved(to_number("address", address), to_bytes("size", size))) {
              ranges.append(py::make_tuple(each.address, each.size));
            }
            return ranges;
          },
          py::arg("address"), py::arg("size"))
      .def(
          "hold", [](const Self& self, const py::object& pool, bool held) { self.core().hold(to_pool(pool), held); },
          py::arg("pool"), py::arg("held"))
      .def("trim_host", [](const Self& self) { self.core().trim_host(); });
}

void bind_reports(py::class_<CachingAllocator, std::shared_ptr<CachingAllocator>>& type) {
  using Self = CachingAllocator;
  type.def("counters", &Self::counters)
      .def("stats", &Self::stats)
      .def("reset_peak_stats", [](const Self& self) { self.core().reset_peak_stats(); })
      .def("reset_accumulated_stats", [](const Self& self) { self.core().reset_accumulated_stats(); })
      .def("push_scope", [](const Self& self) { return self.core().push_scope(); })
      .def(
          "pop_scope", [](const Self& self, std::int64_t id) { return scope(self.core().pop_scope(id)); },
          py::arg("id"))
      // 100,000 events with stacks of 20 Python frames took 66 MB, and span many training steps.
      .def("record_history", &Self::record_history, py::arg("enabled") = "all", py::arg("max_entries") = 100'000,
           py::arg("stacks") = "python", py::arg("clear") = false, py::arg("skip_actions") = py::tuple())
      .def("snapshot", &Self::snapshot, py::arg("pool") = py::make_tuple(0, 0))
      .def("check_invariants", [](const Self& self) { self.core().check_invariants(); });
}

void bind_caching_allocator(py::module_& module) {
  using Self = CachingAllocator;
  py::class_<alloc::PoolCheckpoint>(module, "PoolCheckpoint", "The blocks of a private pool at one moment.");
  py::class_<Self, std::shared_ptr<Self>> type(module, "CachingAllocator", "The caching allocator of one device.");
  type.def(py::init([](const std::shared_ptr<SimulatedDevice>& device, const Config& config) {
             return std::make_shared<Self>(std::make_shared<alloc::CachingAllocator>(device, config), 0);
           }),
           py::arg("device"), py::arg("config") = Config())
      .def("allocate", &Self::allocate, py::arg("size"), py::arg("stream") = 0, py::arg("tag") = "")
      .def(
          "free", [](const Self& self, const py::object& address) { self.core().free(to_number("address", address)); },
          py::arg("address"))
      .def(
          "owns",
          [](const Self& self, const py::object& address) { return self.core().owns(to_number("address", address)); },
          py::arg("address"))
      .def(
          "record_stream",
          [](const Self& self, const py::object& address, const py::object& stream) {
            self.core().record_stream(to_number("address", address), to_number("stream", stream));
          },
          py::arg("address"), py::arg("stream"))
      .def(
          "base_allocation",
          [](const Self& self, const py::object& address) {
            const alloc::BaseAllocation base = self.core().base_allocation(to_number("address", address));
            return std::make_pair(base.address, base.size);
          },
          py::arg("address"))
      .def(
          "block",
          [](const Self& self, const py::object& address) {
            return block(self.core().block(to_number("address", address)));
          },
          py::arg("address"))
      .def(
          "share",
          [](const Self& self, const py::object& address) -> std::optional<py::tuple> {
            const auto memory = self.core().share(to_number("address", address));
            if (!memory) return std::nullopt;
            return py::make_tuple(py::bytes(memory->text), memory->offset, memory->piece_size, memory->descriptors);
          },
          py::arg("address"))
      .def(
          "empty_cache",
          [](const Self& self, const py::object& pool) {
            const alloc::PoolId id = to_pool(pool);
            alloc::Context context = self.context();
            const py::gil_scoped_release no_gil;
            self.core().empty_cache(id, std::move(context));
          },
          py::arg("pool") = py::make_tuple(0, 0))
      .def("largest_available", [](const Self& self) { return self.core().largest_available(); })
      .def_property_readonly("config", [](const Self& self) { return self.core().config(); })
      .def(
          "configure", [](const Self& self, const Config& config) { self.core().configure(config); }, py::arg("config"))
      .def(
          "add_pressure_callback",
          [](const Self& self, const py::object& callback) {
            return self.core().add_pressure_callback(pressure_callback(callback));
          },
          py::arg("callback"))
      .def(
          "remove_pressure_callback",
          [](const Self& self, int id) {
            self.core().remove_pressure_callback(id);
            collect_dropped();
          },
          py::arg("id"))
      .def(
          "set_growth_callback",
          [](const Self& self, const py::object& callback) {
            self.core().set_growth_callback([call = pressure_callback(callback)] { call(0); });
          },
          py::arg("callback"))
      .def(
          "add_oom_observer",
          [](const Self& self, const py::object& observer) {
            return self.core().add_oom_observer(oom_observer(observer));
          },
          py::arg("observer"));
  bind_private_pools(type);
  bind_pausing(type);
  bind_reports(type);
}

#if PAC_CUDA_ALLOCATOR
/// One wrapper per device, because the wrapper stores whether stacks are recorded.
std::shared_ptr<CachingAllocator> wrapped(int index, alloc::CachingAllocator& core) {
  // Never destroyed: the allocators of the process outlive the interpreter, whose objects they may still hold.
  static auto* const wrappers = std::make_unique<std::map<int, std::shared_ptr<CachingAllocator>>>().release();
  std::shared_ptr<CachingAllocator>& wrapper = (*wrappers)[index];
  if (!wrapper) {
    const std::shared_ptr<alloc::CachingAllocator> owned_by_the_runtime(&core, [](alloc::CachingAllocator*) {});
    wrapper = std::make_shared<CachingAllocator>(owned_by_the_runtime, index);
  }
  return wrapper;
}

std::shared_ptr<CachingAllocator> runtime_device(int index) {
  const auto create = [index]() -> alloc::CachingAllocator& {
    const py::gil_scoped_release no_gil;
    return alloc::runtime().device(index);
  };
  return wrapped(index, create());
}

std::shared_ptr<CachingAllocator> runtime_existing(int index) {
  alloc::CachingAllocator* const core = alloc::runtime().existing(index);
  return core == nullptr ? nullptr : wrapped(index, *core);
}

void bind_runtime(py::module_& module) {
  alloc::runtime().on_growth_by_malloc(&warn_later);
  module.def("runtime_configure", [](const Config& config) { alloc::runtime().configure(config); }, py::arg("config"));
  module.def("runtime_config", [] { return alloc::runtime().config(); });
  module.def("runtime_device", &runtime_device, py::arg("index"));
  module.def("runtime_existing", &runtime_existing, py::arg("index"));
  module.def("runtime_capsule", [] { return py::capsule(&alloc::runtime(), alloc::kRuntimeCapsule); });
  module.def(
      "runtime_open_shared",
      [](const py::bytes& text, int device) { return opened(alloc::runtime().open_shared(std::string(text), device)); },
      py::arg("text"), py::arg("device"));
}
#endif

void raise_out_of_memory(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const alloc::OutOfMemory& out_of_memory) {
    py::set_error(py::module_::import("torch").attr("OutOfMemoryError"), out_of_memory.what());
  } catch (const alloc::PauseError& refused) {
    py::set_error(py::module_::import("pyactcomp.errors").attr("PyactcompError"), refused.what());
  }
}

}  // namespace

void bind_allocator(py::module_& module) {
  py::register_local_exception_translator(&raise_out_of_memory);
  bind_config(module);
  bind_simulated_device(module);
  bind_sharing(module);
  bind_caching_allocator(module);
  module.def("tag_named", &alloc::tag_named, py::arg("name"));
#if PAC_CUDA_ALLOCATOR
  module.attr("has_cuda_allocator") = true;
  bind_runtime(module);
#else
  module.attr("has_cuda_allocator") = false;
#endif
}

}  // namespace pac::bindings
