// The memory of phantom tensors: addresses that no other allocation has had, and a list of what was taken and given
// back.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pac::phantom {

/// The columns of a recording (csrc/snapshots/event_columns.hpp), and the label of the code that asked for each block.
struct Columns {
  std::vector<std::uint8_t> action;
  std::vector<std::int64_t> address, size;
  std::vector<std::int32_t> label;
};

enum Action : std::uint8_t { kAllocated, kFreeRequested, kFreeCompleted };

/// What torch's allocator rounds a request to.
constexpr std::int64_t kRounding = 512;
inline std::int64_t rounded(std::int64_t size) { return (size + kRounding - 1) / kRounding * kRounding; }

/// All blocks taken so far in this process. Backward runs in a thread of its own, so each call takes the lock.
class Ledger {
 public:
  std::int64_t take(std::int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t address = next_;
    next_ += rounded(size) + kRounding;
    add(kAllocated, address, size);
    live_ += rounded(size);
    peak_ = std::max(peak_, live_);
    return address;
  }

  void give(std::int64_t address, std::int64_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    add(kFreeRequested, address, size);
    add(kFreeCompleted, address, size);
    live_ -= rounded(size);
  }

  std::int64_t live() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return live_;
  }

  /// Return the highest `live` since the last call that resets it.
  std::int64_t peak(bool reset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t found = peak_;
    if (reset) peak_ = live_;
    return found;
  }

  std::int64_t count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<std::int64_t>(columns_.action.size());
  }

  Columns columns() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return columns_;
  }

  /// The label of what this thread takes from now on.
  static std::int32_t& label() {
    thread_local std::int32_t current = -1;
    return current;
  }

 private:
  void add(Action action, std::int64_t address, std::int64_t size) {
    columns_.action.push_back(action);
    columns_.address.push_back(address);
    columns_.size.push_back(size);
    columns_.label.push_back(label());
  }

  std::mutex mutex_;
  Columns columns_;
  // Above what the host's allocator gives out, so that no address is also a host tensor's.
  std::int64_t next_ = std::int64_t{1} << 44, live_ = 0, peak_ = 0;
};

/// Never destroyed: tensors outlive the module at the interpreter's exit.
inline Ledger& ledger() {
  static auto* const only = std::make_unique<Ledger>().release();
  return *only;
}

inline c10::Device device() { return {c10::DeviceType::CUDA, 0}; }

/// A block of the ledger. The pointer of a storage owns it.
class Block {
 public:
  explicit Block(std::int64_t size) : address_(ledger().take(size)), size_(size) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { ledger().give(address_, size_); }
  std::int64_t address() const { return address_; }

 private:
  std::int64_t address_, size_;
};

/// Gives torch addresses in place of memory.
class Allocator final : public c10::Allocator {
 public:
  // NOLINTNEXTLINE(readability-identifier-naming): torch's name
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, device()};
    auto block = std::make_unique<Block>(static_cast<std::int64_t>(size));
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    auto* const address = reinterpret_cast<void*>(block->address());
    return {address, block.release(), &Allocator::free, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  static void free(void* block) { std::unique_ptr<Block>(static_cast<Block*>(block)); }
};

inline Allocator& allocator() {
  static auto* const only = std::make_unique<Allocator>().release();
  return *only;
}

/// Return a tensor over a storage, with this layout; elements of any dtype.
inline at::Tensor over(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                       std::int64_t offset) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return out;
}

/// Return a tensor with memory of its own of so many bytes.
inline at::Tensor fresh(std::int64_t nbytes, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::int64_t offset) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, allocator().allocate(static_cast<size_t>(nbytes)),
                       &allocator(), true);
  return over(std::move(storage), dtype, sizes, strides, offset);
}

}  // namespace pac::phantom
