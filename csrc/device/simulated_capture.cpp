// The simulated device's captures: streams whose work becomes nodes of a graph.
#include <algorithm>

#include "device/simulated_checks.hpp"
#include "device/simulated_device.hpp"

namespace pac::alloc {

Device::Capture& SimulatedDevice::capture_of(const char* call, Stream stream) {
  const auto found = captured_.find(stream);
  require(found != captured_.end(), call, "stream ", stream, " is no part of a capture");
  return found->second;
}

void SimulatedDevice::begin_capture(Stream stream) {
  const std::lock_guard lock(mutex_);
  require(captured_.count(stream) == 0, "begin_capture", "stream ", stream, " is being captured");
  captured_[stream] = {next_capture_++, {}};
}

void SimulatedDevice::launch(Stream stream) {
  const std::lock_guard lock(mutex_);
  Capture& capture = capture_of("launch", stream);
  const GraphNode node = nodes_.empty() ? 1 : nodes_.rbegin()->first + 1;
  nodes_[node] = capture.frontier;
  capture.frontier = {node};
}

void SimulatedDevice::join(Stream stream, Stream awaited) {
  const std::lock_guard lock(mutex_);
  const Capture& before = capture_of("join", awaited);
  Capture& capture = captured_.emplace(stream, Capture{before.id, {}}).first->second;
  require(capture.id == before.id, "join", "streams ", stream, " and ", awaited, " are part of different captures");
  for (const GraphNode node : before.frontier) {
    if (std::find(capture.frontier.begin(), capture.frontier.end(), node) == capture.frontier.end()) {
      capture.frontier.push_back(node);
    }
  }
}

void SimulatedDevice::end_capture(Stream stream) {
  const std::lock_guard lock(mutex_);
  const CaptureId id = capture_of("end_capture", stream).id;
  for (auto at = captured_.begin(); at != captured_.end();) {
    at = at->second.id == id ? captured_.erase(at) : std::next(at);
  }
  if (captured_.empty()) nodes_.clear();
}

std::optional<Device::Capture> SimulatedDevice::capture(Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = captured_.find(stream);
  return found == captured_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<GraphNode> SimulatedDevice::dependencies(GraphNode node) {
  const std::lock_guard lock(mutex_);
  ++calls_.dependencies;
  const auto found = nodes_.find(node);
  require(found != nodes_.end(), "dependencies", "node ", node, " is of no graph being captured");
  return found->second;
}

}  // namespace pac::alloc
