// Torch's records about allocations: call stacks, compile contexts, user metadata and annotations.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator/types.hpp"
#include "bindings/torch_headers.hpp"

namespace pac::bindings {

/// Torch's context of a memory block or an event, kept by the core.
struct Origin {
  std::shared_ptr<c10::GatheredContext> stack;
  bool stack_in_trace = false;
  std::string compile_context;
  std::string user_metadata;

  static alloc::Context keep(Origin origin) { return std::make_unique<Origin>(std::move(origin)); }
  /// nullptr for a context of another library.
  static const Origin* of(const alloc::Context& context) {
    return std::get_deleter<std::default_delete<Origin>>(context) ? static_cast<const Origin*>(context.get()) : nullptr;
  }
};

class Recorder {
 public:
  using AnnotationEntry = c10::CachingDeviceAllocator::AnnotationEntry;
  using CreateContextFn = c10::CachingDeviceAllocator::CreateContextFn;
  using RecordContext = c10::CachingDeviceAllocator::RecordContext;

  bool recording() const { return recording_.load(std::memory_order_relaxed); }

  /// The context of the present call, with a stack if torch records stacks from level `least` on. Called without any
  /// lock: gathering may need the GIL.
  alloc::Context origin(RecordContext least) const {
    return C10_LIKELY(!recording()) ? alloc::Context() : gather(least);
  }

  /// The context of a free: the stack is the allocation's where torch records none for frees, and the compile context
  /// and the metadata are the present ones.
  alloc::Context origin_of_free(const alloc::Context& allocation) const {
    alloc::Context context = gather(RecordContext::ALL);
    const Origin* of_allocation = Origin::of(allocation);
    if (level_ >= RecordContext::ALL || !of_allocation) return context;
    Origin origin = context ? *Origin::of(context) : Origin();
    origin.stack = of_allocation->stack;
    origin.stack_in_trace = of_allocation->stack_in_trace;
    return Origin::keep(std::move(origin));
  }

  void configure(bool enabled, CreateContextFn recorder, std::size_t max_entries, RecordContext when, bool clear) {
    TORCH_CHECK(when == RecordContext::NEVER || recorder, "recording contexts needs a function that gathers them");
    const std::lock_guard lock(mutex_);
    max_entries_ = max_entries;
    if (clear || !enabled) annotations_.clear();
    trim();
    recorder_ = enabled ? recorder : nullptr;
    level_ = enabled ? when : RecordContext::NEVER;
    recording_ = enabled;
  }

  void annotate(c10::DeviceIndex device, const std::vector<std::pair<std::string, std::string>>& values) {
    const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
    AnnotationEntry entry(device, 0);
    entry.time_.t_ = std::chrono::duration_cast<std::chrono::microseconds>(since_epoch).count();
    for (const auto& [name, value] : values) entry.recordUserMetadata(name, value);
    const std::lock_guard lock(mutex_);
    annotations_.push_back(std::move(entry));
    trim();
  }

  std::vector<AnnotationEntry> annotations() const {
    const std::lock_guard lock(mutex_);
    return {annotations_.begin(), annotations_.end()};
  }

  // Of the calling thread's allocations.
  void push_compile_context(const std::string& context) { thread().compile_contexts.push_back(context); }
  void pop_compile_context() {
    if (!thread().compile_contexts.empty()) thread().compile_contexts.pop_back();
  }
  std::string& user_metadata() { return thread().user_metadata; }

 private:
  struct Announced {
    std::vector<std::string> compile_contexts;
    std::string user_metadata;
  };
  static Announced& thread() {
    thread_local Announced announced;
    return announced;
  }

  alloc::Context gather(RecordContext least) const {
    const RecordContext level = level_;
    const CreateContextFn recorder = recorder_;
    Origin origin;
    if (level >= least && recorder) origin.stack = recorder();
    origin.stack_in_trace = level >= RecordContext::ALLOC;
    if (!thread().compile_contexts.empty()) origin.compile_context = thread().compile_contexts.back();
    origin.user_metadata = thread().user_metadata;
    if (!origin.stack && origin.compile_context.empty() && origin.user_metadata.empty()) return {};
    return Origin::keep(std::move(origin));
  }

  void trim() {
    while (annotations_.size() > max_entries_) annotations_.pop_front();
  }

  std::atomic<bool> recording_{false};
  std::atomic<CreateContextFn> recorder_{nullptr};
  std::atomic<RecordContext> level_{RecordContext::NEVER};

  mutable std::mutex mutex_;  // guards the members below
  std::size_t max_entries_ = 0;
  std::deque<AnnotationEntry> annotations_;
};

}  // namespace pac::bindings
