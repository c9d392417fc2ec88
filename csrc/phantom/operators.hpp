// What operators do on phantom tensors.
//
// An operator for CUDA either only writes into its arguments, and then does nothing here; or it returns new tensors,
// and is handed on to a backend that nobody uses. There PyTorch's own composite kernels serve it where they exist - a
// structured operator allocates its result by its meta function, and calls the operator that writes - and Python the
// rest, by the shapes that PyTorch knows of each operator (estimate/operators.py).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "phantom/memory.hpp"

namespace pac::phantom {

/// The backend without kernels of its own, to which composite kernels and Python's fallback belong.
constexpr auto kNeutral = c10::DispatchKey::PrivateUse3;

/// Values that the program read on the host, which are zero here.
inline std::atomic<std::int64_t>& reads() {
  static std::atomic<std::int64_t> count{0};
  return count;
}

/// Booleans that the program read on the host, in order: true, but for those after which it raised in an earlier run.
struct Answers {
  std::atomic<std::int64_t> given{0};
  std::set<std::int64_t> denied;
  std::atomic<bool> waiting{false};  ///< whether a loop seemed to wait for another answer

  bool next() { return denied.count(given++) == 0; }
};
inline Answers& answers() {
  static Answers instance;
  return instance;
}

/// Bytes that the first matrix product of a thread takes for good, for each handle and stream: cuBLAS's workspace, and
/// cuBLASLt's beside it for a product with a bias.
inline std::array<std::atomic<std::int64_t>, 2>& workspace_bytes() {
  static std::array<std::atomic<std::int64_t>, 2> sizes{};
  return sizes;
}

constexpr std::int32_t kWorkspace = -2;  ///< the label of workspaces

inline void take_workspace(bool biased) {
  thread_local std::array<bool, 2> taken{};
  for (size_t kind = 0; kind < (biased ? 2 : 1); ++kind) {
    const auto size = workspace_bytes()[kind].load();
    if (taken[kind] || size == 0) continue;
    taken[kind] = true;
    const auto label = std::exchange(Ledger::label(), kWorkspace);
    ledger().take(size);
    Ledger::label() = label;
  }
}

inline at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::Tensor(at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                              c10::dtype_or_default(dtype), format));
}

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype)));
}

inline const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto wanted =
      at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), static_cast<size_t>(self.storage_offset()));
  auto* const storage = self.storage().unsafeGetStorageImpl();
  if (wanted > storage->nbytes()) {
    storage->set_data_ptr_noswap(allocator().allocate(wanted));
    storage->set_nbytes(wanted);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

/// Zero, or true: programs ask booleans whether all is well. A few steps read far fewer values than the limit, and a
/// loop that waits for another answer would never end.
inline at::Scalar value(const at::Tensor& self) {
  constexpr std::int64_t kMost = 100'000;
  static std::atomic<std::int64_t> count{0};
  if (++count > kMost) {
    answers().waiting = true;
    TORCH_CHECK(false, "a loop seems to wait for a value that never comes");
  }
  ++reads();
  if (self.scalar_type() == at::kBool) return answers().next();
  return at::isIntegralType(self.scalar_type(), false) ? at::Scalar(std::int64_t{0}) : at::Scalar(0.0);
}

/// A copy moves nothing. One to the host reads values: zeros, or as value() answers.
inline at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool) {
  if (!self.is_cpu()) return self;
  if (!from.is_cpu()) reads() += from.numel();
  if (self.scalar_type() != at::kBool) return self.zero_();
  return self.fill_(self.numel() != 1 || answers().next());
}

inline void record_stream(at::Tensor&, c10::Stream) {}

/// Return the arguments that an operator writes and returns, and do nothing else.
inline void return_written(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  std::vector<c10::IValue> written;
  for (const auto& returned : schema.returns()) {
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* const info = schema.arguments()[i].alias_info();
      if (info && info->isWrite() && *info == *returned.alias_info()) {
        written.push_back((*stack)[first + i]);
        break;
      }
    }
  }
  stack->resize(first);
  for (auto& each : written) stack->push_back(std::move(each));
}

/// Return whether a tensor to be written has no elements yet: its operator would give it its size.
inline bool sizes_results(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const info = arguments[i].alias_info();
    const auto& given = stack[first + i];
    if (info && info->isWrite() && arguments[i].is_out() && given.isTensor() && given.toTensor().numel() == 0) {
      return true;
    }
  }
  return false;
}

/// An operator that writes into its arguments.
class Writing final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (sizes_results(op, *stack)) {
      op.callBoxedForDispatchKey(kNeutral, *stack);
    } else {
      return_written(op, stack);
    }
  }
};

/// A matrix product that writes into its arguments.
class Product final : public c10::OperatorKernel {
 public:
  explicit Product(bool biased) : biased_(biased) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    take_workspace(biased_);
    if (sizes_results(op, *stack)) {
      op.callBoxedForDispatchKey(kNeutral, *stack);
    } else {
      return_written(op, stack);
    }
  }

 private:
  bool biased_;
};

/// An operator that returns new tensors.
inline void hand_on(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(kNeutral, *stack);
}

/// Registrations last as long as the process: a phantom process runs nothing else.
inline std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto* const all = std::make_unique<std::vector<c10::RegistrationHandleRAII>>().release();
  return *all;
}

enum class Kind { kWriting, kProduct, kBiasedProduct, kHandingOn };

/// Serve operators, by names with overloads as the dispatcher has them.
inline void serve(const std::vector<std::pair<std::string, std::string>>& names, Kind kind) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& [name, overload] : names) {
    const bool biased = kind == Kind::kBiasedProduct;
    auto kernel = kind == Kind::kWriting ? c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Writing>())
                  : kind == Kind::kHandingOn
                      ? c10::KernelFunction::makeFromBoxedFunction<&hand_on>()
                      : c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Product>(biased));
    registrations().push_back(dispatcher.registerImpl({name, overload}, c10::DispatchKey::CUDA, std::move(kernel),
                                                      std::nullopt, nullptr, "pyactcomp's phantom tensors"));
  }
}

/// Serve what allocates, what views memory, and what reads a value; and any operator without a kernel for CUDA.
inline void serve_memory() {
  static auto* const library =
      std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__)
          .release();
  library->impl("empty.memory_format", TORCH_FN(empty));
  library->impl("empty_strided", TORCH_FN(empty_strided));
  library->impl("resize_", TORCH_FN(resize));
  library->impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library->impl("view", TORCH_FN(at::native::view));
  library->impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library->impl("_local_scalar_dense", TORCH_FN(value));
  library->impl("copy_", TORCH_FN(copy));
  library->impl("record_stream", TORCH_FN(record_stream));
  registrations().push_back(c10::Dispatcher::singleton().registerFallback(
      c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&hand_on>(), "pyactcomp's phantom tensors"));
}

}  // namespace pac::phantom
