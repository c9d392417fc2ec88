// The operators running in each thread: torch calls `begin` and `end` around each (at::RecordFunction).
//
// `begin` runs without the GIL, so all work with Python objects waits until a tensor is saved.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "observer/operators.hpp"

namespace pac::observer {

struct Argument {
  const c10::TensorImpl* tensor;
  size_t index;
};

struct Call {
  Operator* op;
  size_t first_argument, first_value;
  std::uint64_t serial, decisions;
  long saves;
  bool silences;  ///< operators called inside are not observed
  bool below;     ///< called by an operator with a derivative of its own
};

struct Value {
  size_t index;
  c10::IValue value;
};

struct Thread {
  std::vector<Call> calls;
  std::vector<Argument> arguments;
  std::vector<Value> values;
  std::unordered_map<const char*, Operator*> known;
  std::uint64_t serial = 0, decisions = 0, generation = 0;
  std::int64_t largest_divisor = 0;
  long observers = 0;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
};

inline thread_local Thread thread;

/// Return whether this thread has no other callbacks, such as a profiler's.
inline bool observes_alone() {
  return !at::hasGlobalCallbacks() && at::get_record_function_tls_().sorted_tls_callbacks_.size() == 1;
}

inline Operator* find(Thread& here, const char* name, const char* overload) {
  Registry& all = registry();
  if (here.generation != all.generation) {
    here.known.clear();
    here.generation = all.generation;
  }
  const auto known = here.known.find(name);
  // Compare the text: the class of an autograd function may be gone, and the memory of the name reused.
  if (known != here.known.end() && known->second->name == name) return known->second;
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& entry = all.operators[std::string(name) + '.' + overload];
  if (!entry) {
    entry = new_operator(all, name, overload);
    if (!entry->is_function) all.unresolved.push_back(entry.get());
  }
  here.known[name] = entry.get();
  return entry.get();
}

inline void capture(Thread& here, const c10::IValue& value, size_t index, bool values) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) here.arguments.push_back({tensor.unsafeGetTensorImpl(), index});
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      here.arguments.push_back({tensor.unsafeGetTensorImpl(), index});
    }
  } else if (values && (value.isScalar() || value.isString() || value.isNone())) {
    here.values.push_back({index, value});
  }
}

/// Return the number of elements of a tensor without repeats (stride 0).
inline std::int64_t distinct(const c10::TensorImpl& tensor) {
  std::int64_t count = 1;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0) count *= tensor.size(dim);
  }
  return count;
}

inline bool is_floating(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_floating_point();
}

/// Return whether the innermost call turns values into a decision.
inline bool is_decision(const Thread& here, const Operator& op, c10::ArrayRef<const c10::IValue> inputs) {
  if (!op.decides || here.calls.back().below || inputs.empty() || !is_floating(inputs[0])) return false;
  if (op.choosing >= 0) {
    const auto index = static_cast<size_t>(op.choosing);
    if (index >= inputs.size() || !inputs[index].isScalar()) return false;
    const at::Scalar value = inputs[index].toScalar();
    return !value.isSymbolic() && !value.isComplex() && std::abs(value.toDouble()) == op.choice;
  }
  if (op.casts) {
    return inputs.size() > 1 && inputs[1].isInt() &&
           c10::isIntegralType(static_cast<c10::ScalarType>(inputs[1].toInt()), /*includeBool=*/true);
  }
  if (op.draws && inputs.size() > 1 && inputs[1].isDouble()) return false;
  // Operators also call item() internally, to read a bound or a fill value.
  const size_t depth = here.calls.size();
  return !op.asks || depth < 2 || here.calls[depth - 2].op->name.rfind("aten::", 0) != 0;
}

/// Note the size of a divisor; a whole power from 0 on, or any power from 1 on, divides by nothing.
inline void note_divisor(Thread& here, const Operator& op, c10::ArrayRef<const c10::IValue> inputs) {
  const auto index = static_cast<size_t>(op.divisor);
  if (index >= inputs.size() || !is_floating(inputs[index])) return;
  if (op.name.rfind("aten::pow", 0) == 0 && inputs.size() > 1) {
    const c10::IValue& exponent = inputs[1];
    if ((exponent.isInt() && exponent.toInt() >= 0) || (exponent.isDouble() && exponent.toDouble() >= 1)) return;
  }
  const c10::TensorImpl& divisor = *inputs[index].toTensor().unsafeGetTensorImpl();
  // torch.compile is tracing, and reading the size would fix the size in the graph.
  if (divisor.has_symbolic_sizes_strides()) return;
  here.largest_divisor = std::max(here.largest_divisor, distinct(divisor));
}

inline std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  Thread& here = thread;  // each access to a thread_local calls a function
  // First, so every end() finds a call even if the rest throws.
  const bool below =
      !here.calls.empty() && here.calls.back().op && (here.calls.back().below || here.calls.back().op->innermost);
  here.calls.push_back(
      {nullptr, here.arguments.size(), here.values.size(), here.serial + 1, here.decisions, 0, false, below});
  ++here.serial;
  Operator* const op = find(here, function.name(), function.overload_name());
  here.calls.back().op = op;
  const auto inputs = function.inputs();
  if (is_decision(here, *op, inputs)) ++here.decisions;
  if (op->divisor >= 0) note_divisor(here, *op, inputs);
  if (op->captures) {
    for (size_t index = 0; index < inputs.size(); ++index)
      capture(here, inputs[index], index, !op->resolved || op->by_scalars);
  }
  // To silence the operators called inside takes as long as to observe two of them.
  constexpr std::uint64_t kMany = 3;
  if (op->innermost && op->inside.load(std::memory_order_relaxed) >= kMany && observes_alone()) {
    here.calls.back().silences = true;
    at::enableRecordFunction(false);
  }
  return nullptr;
}

inline void end(const at::RecordFunction&, at::ObserverContext*) {
  Thread& here = thread;
  if (here.calls.empty()) return;
  const Call& call = here.calls.back();
  if (call.silences) {
    at::enableRecordFunction(true);
  } else if (call.op && call.op->innermost) {
    const std::uint64_t inside = here.serial - call.serial;
    if (inside > call.op->inside.load(std::memory_order_relaxed))
      call.op->inside.store(inside, std::memory_order_relaxed);
  }
  here.arguments.resize(call.first_argument);
  if (here.values.size() > call.first_value) {
    here.values.erase(here.values.begin() + static_cast<std::ptrdiff_t>(call.first_value), here.values.end());
  }
  here.calls.pop_back();
}

}  // namespace pac::observer
