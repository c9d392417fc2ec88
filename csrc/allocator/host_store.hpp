// Pinned host memory for the contents of paused memory, in chunks that later pauses use again.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/device.hpp"

namespace pac::alloc {

class HostStore {
 public:
  /// Pinned memory; returns to the store when the last user is gone.
  struct Chunk {
    Address address = 0;
    Bytes size = 0;
  };
  using Chunks = std::vector<std::shared_ptr<const Chunk>>;

  explicit HostStore(std::shared_ptr<Device> device);
  /// Gives idle chunks back to the host.
  ~HostStore();
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;

  /// Chunks with at least `size` bytes together, idle ones first. Throws PauseError, and changes nothing, if the host
  /// has too little memory.
  Chunks take(Bytes size);
  /// Gives idle chunks back to the host.
  void trim();
  /// Bytes of all chunks, in use or idle.
  Bytes pinned() const;

 private:
  /// Outlives the store while a chunk is in use.
  struct State {
    explicit State(std::shared_ptr<Device> on) : device(std::move(on)) {}
    void release_idle();

    std::shared_ptr<Device> device;
    std::mutex mutex;
    std::vector<Chunk> idle;
    Bytes pinned = 0;
  };

  std::shared_ptr<State> state_;
};

}  // namespace pac::alloc
