#include "allocator/capture_order.hpp"

#include <algorithm>

namespace pac::alloc {

std::optional<CaptureOrder::Marks> CaptureOrder::mark(CaptureId capture, const std::vector<Stream>& streams) {
  Marks marks{capture, {}};
  for (const Stream stream : streams) {
    const auto now = device_.capture(stream);
    if (!now || now->id != capture) return std::nullopt;
    marks.nodes.insert(marks.nodes.end(), now->frontier.begin(), now->frontier.end());
  }
  return marks;
}

bool CaptureOrder::precede(const Marks& marks, Stream stream, const Device::Capture& now) {
  if (marks.capture != now.id) return false;
  Before& before = before_[stream];
  if (before.capture != now.id) before = {now.id, {}};
  std::vector<GraphNode> ahead = now.frontier;
  while (!ahead.empty()) {
    const GraphNode node = ahead.back();
    ahead.pop_back();
    if (!before.nodes.insert(node).second) continue;
    const std::vector<GraphNode> earlier = device_.dependencies(node);
    ahead.insert(ahead.end(), earlier.begin(), earlier.end());
  }
  return std::all_of(marks.nodes.begin(), marks.nodes.end(),
                     [&](GraphNode node) { return before.nodes.count(node) != 0; });
}

}  // namespace pac::alloc
