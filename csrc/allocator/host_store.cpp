#include "allocator/host_store.hpp"

#include <algorithm>
#include <utility>

#include "allocator/config.hpp"

namespace pac::alloc {

namespace {

// Large enough that copies run at the link's rate, small enough that a pause of one tag pins little that it leaves
// empty.
constexpr Bytes kChunk = 256_MiB;
constexpr Bytes kStep = 2_MiB;
// What the rest of the program may need meanwhile.
constexpr Bytes kLeftFree = 256_MiB;

}  // namespace

HostStore::HostStore(std::shared_ptr<Device> device) : state_(std::make_shared<State>(std::move(device))) {}

HostStore::~HostStore() {
  try {
    trim();
  } catch (const std::exception&) {
    // The device is gone, and a destructor must not throw.
    return;
  }
}

HostStore::Chunks HostStore::take(Bytes size) {
  const std::lock_guard lock(state_->mutex);
  std::vector<Chunk>& idle = state_->idle;
  Bytes reused = 0;
  std::sort(idle.begin(), idle.end(), [](const Chunk& a, const Chunk& b) { return a.size < b.size; });
  std::vector<Chunk> taken;
  while (!idle.empty() && reused < size) {
    taken.push_back(idle.back());
    idle.pop_back();
    reused += taken.back().size;
  }
  const std::size_t reused_chunks = taken.size();
  Bytes missing = size - std::min(size, reused);
  const Bytes available = state_->device->host_available();
  const auto put_back = [&] {
    for (std::size_t i = 0; i < taken.size(); ++i) {
      if (i < reused_chunks) {
        idle.push_back(taken[i]);
      } else {
        state_->device->release_host(taken[i].address, taken[i].size);
      }
    }
  };
  bool enough = missing == 0 || (available > kLeftFree && missing <= available - kLeftFree);
  try {
    while (enough && missing > 0) {
      const Bytes next = round_up(std::min(missing, kChunk), kStep);
      const auto address = state_->device->acquire_host(next);
      enough = address.has_value();
      if (!enough) break;
      taken.push_back({*address, next});
      missing -= std::min(missing, next);
    }
  } catch (...) {
    put_back();
    throw;
  }
  if (!enough) {
    put_back();
    throw PauseError("too little host memory to keep " + format_bytes(size) + ": " + format_bytes(size - reused) +
                     " must be pinned and " + format_bytes(available) +
                     " are available; pause with keep=\"drop\" what need not be kept, or free host memory");
  }
  Chunks chunks;
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (i >= reused_chunks) state_->pinned += taken[i].size;
    chunks.emplace_back(std::make_unique<const Chunk>(taken[i]).release(), [state = state_](const Chunk* chunk) {
      const std::unique_ptr<const Chunk> owner(chunk);
      const std::lock_guard guard(state->mutex);
      state->idle.push_back(*chunk);
    });
  }
  return chunks;
}

void HostStore::State::release_idle() {
  const std::lock_guard lock(mutex);
  while (!idle.empty()) {
    const Chunk chunk = idle.back();
    idle.pop_back();
    pinned -= chunk.size;
    device->release_host(chunk.address, chunk.size);
  }
}

void HostStore::trim() { state_->release_idle(); }

Bytes HostStore::pinned() const {
  const std::lock_guard lock(state_->mutex);
  return state_->pinned;
}

}  // namespace pac::alloc
