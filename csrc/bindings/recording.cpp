#include "bindings/recording.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/columns.hpp"
#include "snapshots/lifetimes.hpp"
#include "snapshots/pauses.hpp"
#include "snapshots/recording.hpp"

namespace py = pybind11;

namespace pac::bindings {
namespace {

using alloc::PlainData;
using alloc::Value;

// Deeper than any annotation, and far below the limit of the C stack.
constexpr int kDeepest = 100;

/// A container named twice becomes one Python object.
class ToPython {
 public:
  explicit ToPython(const PlainData& data) : data_(data) {}

  py::object operator()(Value value, int depth = 0) {
    switch (value.kind()) {
      case Value::Kind::kNone:
        return py::none();
      case Value::Kind::kFalse:
      case Value::Kind::kTrue:
        return py::bool_(value.is(Value::Kind::kTrue));
      case Value::Kind::kInteger:
        return py::int_(data_.integer(value));
      case Value::Kind::kFloat:
        return py::float_(data_.number(value));
      case Value::Kind::kString:
        return text(value);
      default:
        break;
    }
    const auto known = made_.find(value.index());
    if (known != made_.end()) return known->second;
    alloc::expect(depth < kDeepest, "lists or dicts nested deeper than ", kDeepest);
    const std::vector<Value>& items = data_.items(value);
    if (value.is(Value::Kind::kDict)) {
      py::dict dict;
      made_.emplace(value.index(), dict);
      for (std::size_t i = 0; i < items.size(); i += 2) dict[(*this)(items[i])] = (*this)(items[i + 1], depth + 1);
      return dict;
    }
    py::list list;
    if (value.is(Value::Kind::kList)) made_.emplace(value.index(), list);
    for (const Value item : items) list.append((*this)(item, depth + 1));
    if (value.is(Value::Kind::kList)) return list;
    return made_.emplace(value.index(), py::tuple(list)).first->second;
  }

  /// Replaces bytes that are no UTF-8.
  py::object text(Value value) {
    py::object& made = strings_[value.index()];
    if (!made) {
      const std::string& text = data_.text(value);
      made = py::reinterpret_steal<py::object>(
          PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
      if (!made) throw py::error_already_set();
    }
    return made;
  }

 private:
  const PlainData& data_;
  std::unordered_map<std::size_t, py::object> made_, strings_;
};

std::unique_ptr<PlainData> read(int descriptor, std::uint64_t size) {
  const py::gil_scoped_release no_gil;
  alloc::Input input(descriptor, [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
  auto data = std::make_unique<PlainData>(size);
  alloc::read_pickle(input, *data);
  return data;
}

/// Turns a column into an array.array, and frees the column.
template <class Number>
py::object to_array(const char* code, std::vector<Number>& column) {
  const py::bytes bytes(reinterpret_cast<const char*>(column.data()), column.size() * sizeof(Number));
  std::vector<Number>().swap(column);
  return py::module_::import("array").attr("array")(code, bytes);
}

py::dict to_dict(alloc::RecordedEvents& events) {
  py::dict result;
  result["action"] = to_array("B", events.action);
  result["address"] = to_array("q", events.address);
  result["size"] = to_array("q", events.size);
  result["stream"] = to_array("q", events.stream);
  result["time_us"] = to_array("q", events.time_us);
  result["pool"] = to_array("i", events.pool);
  result["stack"] = to_array("i", events.stack);
  result["metadata"] = to_array("i", events.metadata);
  result["has_pools"] = events.has_pools;
  py::dict unknown;
  for (const auto& [name, count] : events.unknown) {
    unknown[py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(name.data(), static_cast<py::ssize_t>(name.size()), "replace"))] = count;
  }
  result["unknown"] = unknown;
  result["other_metadata"] = events.other_metadata;
  result["backwards"] = py::make_tuple(events.backwards, events.first_backwards);
  return result;
}

py::tuple to_tuple(const alloc::RecordedSegment& segment) {
  py::list blocks;
  for (const alloc::RecordedBlock& block : segment.blocks) {
    blocks.append(py::make_tuple(block.address, block.size, block.requested, block.active, block.pending, block.stack));
  }
  return py::make_tuple(segment.device, segment.address, segment.size, segment.stream, segment.pool, segment.small,
                        segment.expandable, segment.stack, blocks);
}

py::dict recording(const PlainData& data, const std::vector<std::string>& actions) {
  alloc::Recording found = [&] {
    const py::gil_scoped_release no_gil;
    return alloc::read_recording(data, actions);
  }();
  ToPython to_python(data);
  py::list devices, segments, frames, stacks, metadata;
  for (alloc::RecordedEvents& events : found.events) devices.append(to_dict(events));
  for (const alloc::RecordedSegment& segment : found.segments) segments.append(to_tuple(segment));
  for (const alloc::RecordedFrame& frame : found.frames) {
    const bool generated = frame.original.is(Value::Kind::kString);
    frames.append(py::make_tuple(to_python.text(frame.filename), frame.line, to_python.text(frame.name),
                                 generated ? to_python.text(frame.original) : py::str()));
  }
  for (const std::vector<std::int32_t>& stack : found.stacks) stacks.append(py::tuple(py::cast(stack)));
  for (const Value text : found.metadata)
    metadata.append(text.is(Value::Kind::kString) ? to_python.text(text) : py::str());
  py::dict result;
  result["devices"] = devices;
  result["segments"] = segments;
  result["frames"] = frames;
  result["stacks"] = stacks;
  result["pools"] = found.pools;
  result["metadata"] = metadata;
  return result;
}

EventArrays event_arrays(const py::object& events) {
  return {events.attr("action"), events.attr("address"), events.attr("size"), events.attr("stream"),
          events.attr("pool")};
}

py::tuple open_lifetimes(const py::object& events, std::size_t device) {
  const EventArrays arrays = event_arrays(events);
  const alloc::OpenLifetimes open = [&] {
    const py::gil_scoped_release no_gil;
    return alloc::find_open_lifetimes(arrays.columns(), device);
  }();
  py::dict freed, left;
  for (const auto& block : open.freed) freed[py::int_(block.address)] = block.event;
  for (const auto& block : open.left) left[py::int_(block.address)] = block.event;
  return py::make_tuple(freed, left);
}

std::vector<alloc::Address> check_overlaps(const py::object& events,
                                           const std::vector<std::tuple<alloc::Address, alloc::Bytes, bool>>& existing,
                                           std::size_t device) {
  const EventArrays arrays = event_arrays(events);
  const py::gil_scoped_release no_gil;
  std::vector<alloc::ExistingBlock> blocks;
  for (const auto& [address, size, may_be_wrong] : existing) blocks.push_back({address, size, may_be_wrong});
  return alloc::check_overlaps(arrays.columns(), blocks, device);
}

/// `existing`: (address, size, bytes without memory). Returns the addresses of the blocks paused before the first
/// event, {address: bytes without memory} of the blocks paused after the last one of `count`, the events that paused
/// blocks, and the peak of the paused bytes.
py::tuple find_pauses(const py::object& events,
                      const std::vector<std::tuple<alloc::Address, alloc::Bytes, alloc::Bytes>>& existing,
                      std::size_t count) {
  const EventArrays arrays = event_arrays(events);
  const alloc::Pauses found = [&] {
    const py::gil_scoped_release no_gil;
    std::vector<alloc::BlockBefore> before;
    before.reserve(existing.size());
    for (const auto& [address, size, absent] : existing) before.push_back({address, size, absent});
    return alloc::find_pauses(arrays.columns(), std::move(before), count);
  }();
  py::dict after;
  for (const alloc::BlockBefore& block : found.after) after[py::int_(block.address)] = block.absent;
  return py::make_tuple(found.before, after, found.rows, found.most);
}

}  // namespace

void bind_recording(py::module_& module) {
  py::class_<PlainData>(module, "PlainData", "The dicts, lists, numbers and strings of a file; nothing in it is run.")
      .def_static("from_pickle", &read, py::arg("descriptor"), py::arg("size"))
      .def("value", [](const PlainData& data) { return ToPython(data)(data.root); })
      .def(
          "get",
          [](const PlainData& data, const std::string& key) {
            const Value* found = data.root.is(Value::Kind::kDict) ? data.find(data.root, data.key(key)) : nullptr;
            return found ? ToPython(data)(*found) : py::none();
          },
          py::arg("key"))
      .def(
          "has",
          [](const PlainData& data, const std::string& key) {
            const Value* found = data.root.is(Value::Kind::kDict) ? data.find(data.root, data.key(key)) : nullptr;
            return found && !data.is_empty(*found);
          },
          py::arg("key"))
      .def("recording", &recording, py::arg("actions"));
  module.def("open_lifetimes", &open_lifetimes, py::arg("events"), py::arg("device"));
  module.def("find_pauses", &find_pauses, py::arg("events"), py::arg("existing"), py::arg("count"));
  module.def("check_overlaps", &check_overlaps, py::arg("events"), py::arg("existing"), py::arg("device"));
}

}  // namespace pac::bindings
