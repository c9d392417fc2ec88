// Operators as the table of readers knows them: what they decide and divide by, and how they read their operands.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace pac::observer {

/// A Python reference that is never released: at exit the interpreter may end before static objects do.
class Object {
 public:
  Object() = default;
  static Object borrowed(PyObject* object) {
    Object held;
    held.object_ = Py_XNewRef(object);
    return held;
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

/// The table's entry for one operand: the form backward needs; `need` orders entries by strictness.
struct Reading {
  Object object, form;
  long need = 0;
};

/// An operator in the table of readers, named by schema, or by class for a Python autograd function.
struct Operator {
  std::string name, overload;
  bool is_function = false;  ///< a Python autograd function
  bool decides = false;      ///< the result is a decision: a comparison, an index, a route
  bool casts = false;        ///< decides only in a cast to integers
  bool draws = false;        ///< decides only with a tensor of probabilities, not with one number
  bool asks = false;         ///< decides only in a call by the program, not by another operator
  int choosing = -1;         ///< decides only if this argument has the magnitude `choice`
  double choice = 0;
  bool innermost = false;                ///< no operator called inside saves a tensor for backward
  std::atomic<std::uint64_t> inside{0};  ///< most operators called inside
  int divisor = -1;                      ///< the argument by which the operator or its derivative divides
  // Filled by `resolve`, with the GIL, on the first save or at the end of the first observation.
  bool resolved = false;
  bool captures = true;     ///< whether the reading depends on the argument
  bool by_scalars = false;  ///< whether the reading depends on scalar arguments: an exponent, the name of a reduction
  std::vector<Reading> arguments;
  Reading result, unclear, statistic;
  bool elementwise = false;
};

/// Operators seen by any thread. Never freed: calls in flight point to operators.
struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<Operator>> operators;
  std::unordered_set<std::string> deciding;
  std::unordered_map<std::string, std::pair<int, double>> choosing;
  std::unordered_map<std::string, int> dividing;
  std::vector<Operator*> unresolved;  ///< seen, and not yet looked up in the table
  std::uint64_t generation = 1;
};

inline Registry& registry() {
  static Registry& instance = *std::make_unique<Registry>().release();
  return instance;
}

/// Return whether an operator of torch has a derivative of its own: the operators called inside then run below
/// autograd. A composite operator has the derivatives of the operators called inside.
inline bool is_innermost(const Operator& op) {
  if (op.name.rfind("aten::", 0) != 0 || op.name == "aten::_backward") return false;
  const auto handle = c10::Dispatcher::singleton().findOp({op.name, op.overload});
  return handle && handle->hasKernelForDispatchKey(c10::DispatchKey::Autograd) &&
         !handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// Return an operator with the facts that the registry's names give, its readings unresolved.
inline std::unique_ptr<Operator> new_operator(const Registry& all, const char* name, const char* overload) {
  auto entry = std::make_unique<Operator>();
  entry->name = name;
  entry->overload = overload;
  entry->is_function = entry->name.find("::") == std::string::npos;
  // The table names no in-place variants here: they decide and divide as the others do.
  const bool in_place = !entry->name.empty() && entry->name.back() == '_';
  const std::string plain = entry->name.substr(0, entry->name.size() - (in_place ? 1 : 0));
  entry->decides = all.deciding.count(plain) != 0;
  const auto choosing = all.choosing.find(plain);
  if (choosing != all.choosing.end()) {
    std::tie(entry->choosing, entry->choice) = choosing->second;
    entry->decides = true;
  }
  const auto divisor = all.dividing.find(plain);
  if (divisor != all.dividing.end()) entry->divisor = divisor->second;
  entry->casts = entry->name == "aten::_to_copy";
  entry->draws = plain == "aten::bernoulli";
  entry->asks = entry->name == "aten::item" || entry->name == "aten::is_nonzero";
  entry->innermost = is_innermost(*entry);
  return entry;
}

}  // namespace pac::observer
