#include "allocator/caching_allocator.hpp"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "allocator/diagnosis.hpp"
#include "common/check.hpp"

namespace pac::alloc {

namespace {

// Beyond any device, and far enough from 2^64 that no rounding overflows.
constexpr Bytes kLargestRequest = Bytes{1} << 56;
constexpr Bytes kExabyte = Bytes{1} << 60;

[[noreturn]] void throw_unknown(Address address) {
  std::ostringstream text;
  text << "0x" << std::hex << address
       << " is not an address of this allocator: it was never allocated, or was freed before";
  throw UnknownAddress(text.str());
}

/// The settings, with a growth the device supports.
Config supported(Config config, const Device& device) {
  validate(config);
  if (!device.has_virtual_memory()) config.growth = Growth::kMalloc;
  return config;
}

}  // namespace

CachingAllocator::CachingAllocator(std::shared_ptr<Device> device, const Config& config)
    : device_(std::move(device)),
      heap_(supported(config, *device_)),
      order_(*device_),
      malloc_(make_malloc_supply(heap_, *device_, order_)),
      vmm_(heap_.config.growth == Growth::kVmm          ? make_vmm_supply(heap_, *device_, order_)
           : heap_.config.growth == Growth::kExpandable ? make_expandable_supply(heap_, *device_, order_)
                                                        : nullptr),
      capture_order_(*device_),
      pausing_(device_, heap_, vmm_.get()),
      scopes_(heap_.stats) {}

CachingAllocator::~CachingAllocator() {
  try {
    order_.clear();
    if (vmm_) vmm_->release_everything();
    malloc_->release_everything();
    Lock lock(mutex_);
    return_segments(lock);
  } catch (const std::exception&) {
    // The device is gone: there is no memory to give back, and a destructor must not throw.
    return;
  }
}

Block& CachingAllocator::live(Address address) {
  Block* block = heap_.find_live(address);
  if (!block) throw_unknown(address);
  return *block;
}

// ---- allocating ----

Address CachingAllocator::allocate(Bytes size, Stream stream, Context context, Tag tag) {
  if (size == 0) return 0;
  if (size >= kExabyte) throw OutOfMemory("CUDA out of memory. Tried to allocate more than 1EB memory.");
  Lock lock(mutex_);
  Request request{size, 0, stream, nullptr, &context, tag};
  if (size > kLargestRequest) {
    request.size = size;
    refused_.clear();
    fail(request, lock, {});
  }
  request.size = heap_.round_size(size);
  collect_freed();
  const auto capture = capturing() ? reuse_joined(stream) : std::nullopt;
  if (pausing_.any()) resume_for(group_for(stream, tag), lock);
  Block* block = find_fit(running_group(stream, tag), request);
  if (!block) block = obtain(request, lock);
  block = heap_.allocate(block, request);
  if (capture) captured_[block] = *capture;
  scopes_.count(block->size);
  return block->address;
}

Block* CachingAllocator::find_fit(PoolGroup& group, Request& request) {
  Supply& supply = supply_for(group);
  request.pool = &supply.pool_of(group, request.size);
  return supply.find_fit(request);
}

Block* CachingAllocator::attempt(Request& request, Effort effort, Lock& lock) {
  // The lock may have been dropped since the last attempt: pools and free blocks are looked up again.
  if (Block* block = find_fit(running_group(request.stream, request.tag), request)) return block;
  PoolGroup& group = request.pool->group;
  if (group.source) return grow_from_source(request, lock);
  const Releasing guard(heap_, *request.context);
  try {
    return supply_for(group).grow(request, effort, capturing());
  } catch (const DeviceError& error) {
    // Page tables and addresses run out too. Whether the device itself failed shows when it is waited for.
    refused_ = error.what();
    return nullptr;
  }
}

Block* CachingAllocator::obtain(Request& request, Lock& lock) {
  if (before_growth_) call_before_growth(lock);
  refused_.clear();
  if (Block* block = attempt(request, Effort::kNormal, lock)) return block;
  if (Block* block = borrow_from_private_pools(request)) return block;
  if (Block* block = wait_for_streams(request, lock)) return block;
  if (!capturing()) {
    const auto release = [&] {
      const Releasing guard(heap_, *request.context);
      return supply_for(request.pool->group).release_oversize(request);
    };
    const bool released = release();
    return_segments(lock);
    if (released) {
      if (Block* block = attempt(request, Effort::kNormal, lock)) return block;
    }
    release_cached(lock, {}, *request.context);
    ++heap_.stats.num_alloc_retries;
    if (Block* block = attempt(request, Effort::kScavenge, lock)) return block;
  }
  std::string callback_error;
  if (Block* block = ask_callbacks(request, lock, callback_error)) return block;
  PoolGroup& group = group_for(request.stream, request.tag);  // the lock was dropped
  request.pool = &supply_for(group).pool_of(group, request.size);
  fail(request, lock, callback_error);
}

Block* CachingAllocator::borrow_from_private_pools(Request& request) {
  if (request.pool->group.is_private()) return nullptr;
  Block* found = nullptr;
  Pool* const own = request.pool;
  heap_.for_each_group([&](PoolGroup& group) {
    if (found || !group.use_on_oom || group.paused) return;
    found = find_fit(group, request);
  });
  if (!found) request.pool = own;
  return found;
}

Block* CachingAllocator::wait_for_streams(Request& request, Lock& lock) {
  if (capturing()) return nullptr;
  while (const auto oldest = order_.hold_oldest_pending()) {
    wait(*oldest, lock);
    collect_freed();
    if (Block* block = attempt(request, Effort::kNormal, lock)) return block;
    if (capturing()) return nullptr;  // another thread began a capture, and nothing is collected meanwhile
  }
  if (heap_.config.growth != Growth::kVmm) return nullptr;
  if (Block* block = attempt(request, Effort::kScavenge, lock)) return block;
  // The stream with the most free memory first.
  std::map<Stream, Bytes> free_by_stream;
  heap_.for_each_pool([&](const Pool& pool) {
    for (const Block* block : pool.free) free_by_stream[block->stream()] += block->size;
  });
  std::vector<std::pair<Bytes, Stream>> streams;
  for (const auto& [stream, bytes] : free_by_stream) {
    if (stream != request.stream) streams.emplace_back(bytes, stream);
  }
  std::sort(streams.rbegin(), streams.rend());
  for (const auto& [bytes, stream] : streams) {
    order_.fence(stream, heap_.clock());
    if (const auto fence = order_.hold_fence(stream)) wait(*fence, lock);
    if (Block* block = attempt(request, Effort::kScavenge, lock)) return block;
    if (capturing()) return nullptr;
  }
  return nullptr;
}

void CachingAllocator::wait(StreamOrder::Wait wait, Lock& lock) {
  lock.unlock();
  std::exception_ptr error;
  try {
    device_->wait(wait.event);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  order_.end_wait(wait);
  if (error) std::rethrow_exception(error);
}

Block* CachingAllocator::ask_callbacks(Request& request, Lock& lock, std::string& error) {
  // A callback may allocate and run out of memory too: no callback is called from within one.
  thread_local bool asking = false;
  if (asking) return nullptr;
  struct Asking {
    Asking() { asking = true; }
    ~Asking() { asking = false; }
    Asking(const Asking&) = delete;
    Asking& operator=(const Asking&) = delete;
  };
  const auto callbacks = callbacks_;
  for (const auto& [id, callback] : callbacks) {
    bool freed = false;
    lock.unlock();
    try {
      const Asking guard;
      freed = callback(request.size);
    } catch (const std::exception& raised) {
      error += (error.empty() ? "" : "; ") + std::string(raised.what());
    }
    lock.lock();
    if (!freed) continue;
    collect_freed();
    if (Block* block = attempt(request, Effort::kNormal, lock)) return block;
    if (Block* block = wait_for_streams(request, lock)) return block;
    if (capturing()) continue;
    release_cached(lock, {}, *request.context);
    if (Block* block = attempt(request, Effort::kScavenge, lock)) return block;
  }
  return nullptr;
}

void CachingAllocator::fail(const Request& request, Lock& lock, const std::string& callback_error) {
  ++heap_.stats.num_ooms;
  const Device::Memory memory = device_->memory();
  heap_.history.add(Action::kOutOfMemory, memory.free, request.requested, request.stream,
                    request.pool ? request.pool->group.id : PoolId{}, *request.context);
  const Bytes limit = malloc_->limit();
  std::string text = explain({request, device_->name(), memory, limit, capturing(), refused_, callback_error}, heap_);
  const auto observers = observers_;
  const bool refused = !refused_.empty();
  const Bytes requested = request.requested;
  lock.unlock();
  for (const auto& observer : observers) {
    try {
      observer(requested, std::min(limit, memory.total), memory.free);
    } catch (const std::exception& raised) {
      text += std::string(" An out-of-memory observer failed too: ") + raised.what() + '.';
    }
  }
  if (refused) throw DriverRefusal(text);
  throw OutOfMemory(text);
}

// ---- freeing ----

void CachingAllocator::free(Address address, Context context) {
  if (!try_free(address, std::move(context))) throw_unknown(address);
}

bool CachingAllocator::try_free(Address address, Context context) {
  const Lock lock(mutex_);
  Block* block = heap_.find_live(address);
  if (!block) return false;
  free_block(*block, context);
  return true;
}

void CachingAllocator::free_block(Block& block, const Context& context) {
  if (block.shared) end_sharing(block);
  if (block.pool().group.paused) pausing_.forget(block);
  if (block.uses.empty()) {
    if (!captured_.empty()) captured_.erase(&block);
    heap_.request_free(&block, context);
    heap_.release(&block, context);
  } else if (capturing()) {
    auto marks = marks_of_free(block);
    heap_.request_free(&block, context);
    deferred_.push_back({&block, std::move(marks)});
  } else {
    bool pending = true;
    try {
      order_.add_pending(&block);
    } catch (const DeviceError&) {
      pending = false;  // a stream that was destroyed: the block is free after the next wait for the device
    }
    heap_.request_free(&block, context);
    if (!pending) unordered_.push_back(&block);
  }
}

void CachingAllocator::empty_cache(PoolId pool, Context context) {
  Lock lock(mutex_);
  if (!capturing()) release_cached(lock, pool, context);
}

Serial CachingAllocator::finish_device(Lock& lock) {
  collect_freed();  // records the events of frees deferred by a capture
  const Serial now = heap_.clock();
  lock.unlock();
  std::exception_ptr error;
  try {
    device_->synchronize();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  if (error) std::rethrow_exception(error);
  if (capturing()) return now;  // another thread began a capture
  ++heap_.stats.num_sync_all_streams;
  order_.all_passed(now);
  const auto kept = std::stable_partition(unordered_.begin(), unordered_.end(),
                                          [&](const Block* block) { return block->freed > now; });
  const std::vector<Block*> ordered(kept, unordered_.end());
  unordered_.erase(kept, unordered_.end());
  for (Block* block : ordered) {
    block->uses.clear();
    heap_.release(block, {});
  }
  collect_freed();
  return now;
}

void CachingAllocator::release_cached(Lock& lock, PoolId only, const Context& context) {
  const Serial now = finish_device(lock);
  if (capturing()) return;
  std::vector<PoolId> idle;
  const auto release = [&](PoolGroup& group) {
    // Released after `now`: the synchronisation does not cover the last launch of the group's graphs.
    if (!group.is_releasable() || group.released > now || group.paused) return;
    supply_for(group).release_unused(group);
    if (group.is_private() && group.segments.empty()) idle.push_back(group.id);
  };
  {
    const Releasing guard(heap_, context);
    if (only.is_default()) {
      heap_.for_each_group(release);
    } else if (PoolGroup* group = heap_.find_group(only)) {
      release(*group);
    }
  }
  for (const PoolId id : idle) heap_.erase_group(id);
  return_segments(lock);
}

// ---- asking about addresses ----

bool CachingAllocator::owns(Address address) {
  const Lock lock(mutex_);
  return heap_.find_live(address) != nullptr;
}

void CachingAllocator::record_stream(Address address, Stream stream) {
  const Lock lock(mutex_);
  Block& block = live(address);
  if (stream == block.stream()) return;
  if (std::find(block.uses.begin(), block.uses.end(), stream) == block.uses.end()) block.uses.push_back(stream);
}

BaseAllocation CachingAllocator::base_allocation(Address address) {
  const Lock lock(mutex_);
  const Block& block = live(address);
  if (!block.segment->expandable) return {block.segment->address, block.segment->size};
  return {block.address, block.size};
}

BlockInfo CachingAllocator::block(Address address) {
  const Lock lock(mutex_);
  return describe(live(address));
}

// ---- settings ----

Config CachingAllocator::config() const {
  const Lock lock(mutex_);
  return heap_.config;
}

void CachingAllocator::configure(const Config& config) {
  const Config checked = supported(config, *device_);
  const Lock lock(mutex_);
  PAC_CHECK(checked.growth == heap_.config.growth, "growth cannot change while an allocator runs; it is ",
            to_string(heap_.config).empty() ? "growth:vmm" : to_string(heap_.config));
  heap_.config = checked;
}

}  // namespace pac::alloc
