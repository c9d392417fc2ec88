// Who routes allocations to a private pool of torch: a capture, or torch.cuda.use_mem_pool.
#pragma once

#include <exception>
#include <functional>

struct CUstream_st;

namespace pac::bindings {

/// Whether a pool's filter, asked as the routing begins, is a capture's. The filter of use_mem_pool accepts all streams
/// of its thread. A capture's filter accepts the streams being captured: none yet, and never the null stream.
inline bool is_capture(const std::function<bool(CUstream_st*)>& filter) {
  try {
    return !filter(nullptr);
  } catch (const std::exception&) {
    return true;  // CUDA refuses to tell of the null stream while it would wait for a stream under capture
  }
}

}  // namespace pac::bindings
