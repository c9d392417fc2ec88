// The order of a pause and of a resume, under the lock.
#include "allocator/caching_allocator.hpp"

namespace pac::alloc {

PoolGroup& CachingAllocator::running_group(Stream stream, Tag tag) {
  PoolGroup& group = group_for(stream, tag);
  if (pausing_.any()) pausing_.check_running(group);
  return group;
}

void CachingAllocator::resume_for(PoolGroup& group, Lock& lock) {
  const Tag tag = group.tag;
  if (capturing() || !pausing_.resumes_on_allocation(group)) return;
  try {
    resume_tags({tag}, lock);
  } catch (const PauseError&) {
    if (pausing_.has(tag)) throw;  // else another thread resumed the tag while this one waited for the device
  }
}

void CachingAllocator::check_pause(const PauseOptions& options) {
  const Lock lock(mutex_);
  pausing_.check_can_pause(options, capturing());
}

PauseReport CachingAllocator::pause(const PauseOptions& options) {
  Lock lock(mutex_);
  pausing_.check_can_pause(options, capturing());
  const Serial now = finish_device(lock);
  pausing_.check_can_pause(options, capturing());  // the lock was dropped
  vmm_->finish_moves();                            // of threads that allocated meanwhile
  PauseReport report;
  const std::vector<PoolGroup*> groups = pausing_.save(options, now, report);
  try {
    pausing_.release(groups, report);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    std::vector<Tag> tags;
    for (const auto& [tag, keep] : options.keep) tags.push_back(tag);
    try {
      resume_tags(tags, lock);
    } catch (const std::exception&) {
      // The tags stay paused, as paused() tells; the first error is the one to report.
    }
    std::rethrow_exception(error);
  }
  return report;
}

ResumeReport CachingAllocator::resume(const std::vector<Tag>& tags) {
  Lock lock(mutex_);
  pausing_.check_paused(tags);
  if (capturing()) throw PauseError("memory cannot be resumed while a CUDA graph is captured: end the capture first");
  return resume_tags(tags, lock);
}

ResumeReport CachingAllocator::resume_tags(const std::vector<Tag>& tags, Lock& lock) {
  if (const auto report = pausing_.resume(tags)) return *report;
  release_cached(lock, {}, {});
  // The lock was dropped: another thread may have resumed the tags, made pools, and paused again.
  pausing_.check_paused(tags);
  if (const auto report = pausing_.resume(tags)) return *report;
  pausing_.fail(tags);
}

std::vector<PausedInfo> CachingAllocator::paused() {
  const Lock lock(mutex_);
  return pausing_.paused();
}

std::vector<HostRange> CachingAllocator::saved(Address address, Bytes size) {
  const Lock lock(mutex_);
  return pausing_.saved(address, size);
}

void CachingAllocator::hold(PoolId pool, bool held) {
  const Lock lock(mutex_);
  PoolGroup& group = private_group(pool);
  if (group.paused) throw PauseError("the memory pool is paused, and others cannot hold memory that is not there");
  group.held = held;
}

}  // namespace pac::alloc
