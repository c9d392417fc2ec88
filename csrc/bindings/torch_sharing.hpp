// The first part of the text for shared memory, in the format of torch's native allocator, for processes without this
// allocator. This allocator reads the last part.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstddef>
#include <string>

#include "allocator/allocator.hpp"
#include "bindings/torch_headers.hpp"

namespace pac::bindings {

/// Releases of torch refuse a version above their own.
inline const std::string kOursAlone = "\xf0p";

/// Memory of cudaMalloc: a version accepted by releases since 2.11, the kind of memory, CUDA's handle.
inline std::string text_for_torch(const cudaIpcMemHandle_t& handle) {
  return "\2c" + std::string(handle.reserved, sizeof handle.reserved);
}

/// Mapped handles. The native allocator's expandable segments have handles of one size.
inline std::string text_for_torch([[maybe_unused]] const alloc::SharedMemory& memory) {
#if PAC_TORCH_AT_LEAST(2, 13)
  // The header has another layout since 2.13.
  return kOursAlone;
#else
  if (memory.piece_size == 0) return kOursAlone;
  struct Header {
    pid_t pid;
    int padding;
    std::size_t piece_size;
    std::size_t pieces;
  };
  const Header header{getpid(), 0, memory.piece_size, memory.descriptors.size()};
  std::string text = "\2e";
  text.append(reinterpret_cast<const char*>(&header), sizeof header);
  text.append(reinterpret_cast<const char*>(memory.descriptors.data()), memory.descriptors.size() * sizeof(int));
  return text;
#endif
}

}  // namespace pac::bindings
