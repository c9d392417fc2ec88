// The order of work within a graph being captured: a node runs after the nodes that it depends on.
#pragma once

#include <map>
#include <optional>
#include <unordered_set>
#include <vector>

#include "allocator/types.hpp"
#include "device/device.hpp"

namespace pac::alloc {

class CaptureOrder {
 public:
  explicit CaptureOrder(Device& device) : device_(device) {}

  /// The last nodes of some streams at one moment.
  struct Marks {
    CaptureId capture;
    std::vector<GraphNode> nodes;
  };

  /// The streams' last nodes; nullopt if one of them is no part of the capture, so that no node shows its work.
  std::optional<Marks> mark(CaptureId capture, const std::vector<Stream>& streams);
  /// Whether all marked work runs before the stream's next work. `now` is the stream's capture.
  bool precede(const Marks& marks, Stream stream, const Device::Capture& now);
  /// Forgets every node: a node's number may be given again after the capture.
  void forget() { before_.clear(); }

 private:
  /// The nodes before a stream's next work. Their set only grows, so no node is visited twice.
  struct Before {
    CaptureId capture = 0;
    std::unordered_set<GraphNode> nodes;
  };

  Device& device_;
  std::map<Stream, Before> before_;
};

}  // namespace pac::alloc
