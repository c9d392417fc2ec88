// Frees of memory that other streams used: deferred by the capture of a graph, and reused within the capture where the
// graph tells the order (graph_capture_record_stream_reuse).
#include "allocator/caching_allocator.hpp"
#include "common/check.hpp"

namespace pac::alloc {

std::optional<CaptureId> CachingAllocator::reuse_joined(Stream stream) {
  if (!heap_.config.graph_capture_record_stream_reuse) return std::nullopt;
  const auto now = device_->capture(stream);
  if (!now) return std::nullopt;
  for (auto at = deferred_.begin(); at != deferred_.end();) {
    Block* const block = at->block;
    if (!at->marks || block->stream() != stream || !capture_order_.precede(*at->marks, stream, *now)) {
      ++at;
      continue;
    }
    at = deferred_.erase(at);
    block->uses.clear();
    heap_.release(block, {});
  }
  return now->id;
}

std::optional<CaptureOrder::Marks> CachingAllocator::marks_of_free(Block& block) {
  const auto found = captured_.find(&block);
  if (found == captured_.end()) return std::nullopt;
  const CaptureId capture = found->second;
  captured_.erase(found);
  return capture_order_.mark(capture, block.uses);
}

void CachingAllocator::collect_freed() {
  if (capturing()) return;
  while (!deferred_.empty()) {
    Block* const block = deferred_.back().block;
    deferred_.pop_back();
    try {
      order_.add_pending(block);
    } catch (const DeviceError&) {
      unordered_.push_back(block);
    }
  }
  if (order_.has_pending()) {
    order_.poll_pending([this](Block* block) { heap_.release(block, {}); });
  }
}

}  // namespace pac::alloc
