// Pairs of allocation and free from native threads, through whichever allocator torch has now. Compiled by
// bench/alloc_pairs.py against the torch that runs, and called without the interpreter's lock.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
namespace allocator = c10::cuda::CUDACachingAllocator;

struct Worker {
  cudaStream_t stream;
  Clock::time_point begin, end;
  std::string error;
};

void run_pairs(cudaStream_t stream, std::size_t size, std::uint64_t pairs) {
  for (std::uint64_t i = 0; i < pairs; ++i) {
    allocator::get()->raw_delete(allocator::get()->raw_alloc_with_stream(size, stream));
  }
}

/// The first pair acquires what the timed ones find cached; all start together once each has done so.
void work(Worker& worker, std::atomic<int>& not_ready, std::size_t size, std::uint64_t pairs) {
  try {
    // As a thread that launches kernels does. Without a context, each look at the current device takes a microsecond.
    C10_CUDA_CHECK(cudaSetDevice(0));
    run_pairs(worker.stream, size, 1000);
  } catch (const std::exception& problem) {
    worker.error = problem.what();
  }
  not_ready.fetch_sub(1);
  while (not_ready.load() > 0) {
  }
  if (!worker.error.empty()) return;
  try {
    worker.begin = Clock::now();
    run_pairs(worker.stream, size, pairs);
    worker.end = Clock::now();
  } catch (const std::exception& problem) {
    worker.error = problem.what();
  }
}

double nanoseconds(Clock::duration duration) { return std::chrono::duration<double, std::nano>(duration).count(); }

}  // namespace

/// `ns_per_pair`: of each thread, on a stream of its own; `wall_ns`: from the first thread's start to the last one's
/// end. Returns 0, or 1 with the reason in `error`.
extern "C" int bench_alloc_pairs(int threads, std::size_t size, std::uint64_t pairs, double* ns_per_pair,
                                 double* wall_ns, char* error, std::size_t error_size) {
  std::string reason;
  try {
    std::vector<Worker> workers(static_cast<std::size_t>(threads));
    for (auto& worker : workers) worker.stream = c10::cuda::getStreamFromPool(false, 0).stream();
    std::atomic<int> not_ready{threads};
    std::vector<std::thread> running;
    for (auto& worker : workers) running.emplace_back([&] { work(worker, not_ready, size, pairs); });
    for (auto& thread : running) thread.join();

    auto begin = Clock::time_point::max();
    auto end = Clock::time_point::min();
    for (std::size_t i = 0; i < workers.size(); ++i) {
      if (!workers[i].error.empty()) reason = workers[i].error;
      ns_per_pair[i] = nanoseconds(workers[i].end - workers[i].begin) / static_cast<double>(pairs);
      begin = std::min(begin, workers[i].begin);
      end = std::max(end, workers[i].end);
    }
    *wall_ns = nanoseconds(end - begin);
  } catch (const std::exception& problem) {
    reason = problem.what();
  }
  if (reason.empty()) return 0;
  error[reason.copy(error, error_size - 1)] = '\0';
  return 1;
}
