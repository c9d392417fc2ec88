// The kernels of all stored forms as one table of plain functions: no torch, no Python, no exceptions.
//
// The module pyactcomp._core hands the table over in the capsule `pyactcomp._core.kernels`, so a library that includes
// torch, and so fits one release alone, packs and restores without Python. Compare `version` before anything else:
//
//   const auto* table = static_cast<const KernelTable*>(PyCapsule_Import(kKernelCapsule, 0));
//   if (table->version != kKernelVersion) ...
//   const Kernel* kernel = table->find(format, Target::kCuda);
//   Status status = kernel->encode(format, source, packed, numel, keys, {device, stream, 0});
#pragma once

#include <cstdint>

#include "codec/format.hpp"

namespace pac {

inline constexpr const char* kKernelCapsule = "pyactcomp._core.kernels";

/// Raised by every change of what this file declares, the types of format.hpp in it included.
inline constexpr std::int32_t kKernelVersion = 1;

enum class Target : std::int32_t {
  kCpu,          ///< with the best instruction set of this machine
  kCpuBaseline,  ///< with the instruction set of every machine: the same bytes
  kCuda,         ///< where nvcc built the kernels
};

/// Where a kernel runs.
struct Place {
  std::int32_t device;   ///< index of the CUDA device; unused on the CPU
  void* stream;          ///< the CUDA stream, a cudaStream_t of the device; unused on the CPU
  std::int32_t threads;  ///< at most this many; unused on CUDA
};

/// Rows apart in memory: their length, and elements between the end of one and the next; the length 0 stands for no
/// gaps.
struct Rows {
  std::int64_t length = 0;
  std::int64_t gap = 0;
};

/// 0 for success, a cudaError_t, or kHostFailed. The error of a launch is cleared from CUDA's runtime.
using Status = std::int32_t;
inline constexpr Status kHostFailed = -1;

/// The kernel of one encoding on one target. A call on CUDA launches on the stream and returns: it neither waits nor
/// allocates, and the caller's device stays current. Lengths are in elements, of a dense tensor in storage order. The
/// tensor may start at any address of a whole element, and the stored form at any address of a whole stored element
/// (codes and bits: any byte).
struct Kernel {
  /// Returns the size of the stored form in bytes.
  std::int64_t (*packed_nbytes)(const Format& format, std::int64_t numel) noexcept;
  /// Packs the tensor at `source` into `packed`. Only stochastic rounding reads `keys`, of `random_keys`.
  Status (*encode)(const Format& format, const void* source, void* packed, std::int64_t numel, Keys keys,
                   const Place& place) noexcept;
  /// As encode, of rows apart in memory; null where a kernel reads dense tensors alone. Served are codes of 8 bits to
  /// nearest, lengths and gaps that 8 divides, and less than 2^35 elements.
  Status (*encode_rows)(const Format& format, const void* source, Rows rows, void* packed, std::int64_t numel,
                        const Place& place) noexcept;
  /// Restores the tensor at `out` from `packed`.
  Status (*decode)(const Format& format, const void* packed, void* out, std::int64_t numel,
                   const Place& place) noexcept;
};

/// A kernel with all but the addresses: what `Kernel.bound` in Python, a capsule named kBoundCapsule, points to.
struct Bound {
  const Kernel* kernel;
  Format format;
  Target target;
  std::int32_t device;
};

inline constexpr const char* kBoundCapsule = "pyactcomp._core.Kernel.bound";

struct KernelTable {
  std::int32_t version;
  /// Returns the kernel of a format, which lives as long as the process, or null where the target has none.
  const Kernel* (*find)(const Format& format, Target target) noexcept;
  /// Spreads a seed over the two halves of the generator's key.
  Keys (*random_keys)(std::uint64_t seed) noexcept;
  /// Writes the text of a failed status, at most `capacity` bytes with the zero that ends it.
  void (*describe)(Status status, char* text, std::int64_t capacity) noexcept;
};

/// The table of this build; see bindings/kernels.cpp.
[[nodiscard]] const KernelTable& kernel_table() noexcept;

}  // namespace pac
