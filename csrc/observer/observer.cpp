// The module pyactcomp._observer: finds the operator running in this thread, and the operand that a saved tensor is.
//
// Torch calls `begin` and `end` around every operator in an observing thread (at::RecordFunction). A saved-tensor hook
// runs inside the saving operator, so the innermost call is the reader. `begin` runs without the GIL, so all work with
// Python objects waits for `reader`. The module is compiled for one release of torch, as _torch_allocator is.
//
// Longer than 400 lines: the calls of a thread, the table's readings and the match share one thread-local state.
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "observer/nodes.hpp"
#include "observer/operators.hpp"
#include "observer/tensors.hpp"

namespace pac::observer {
namespace {

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

thread_local Thread thread;

// Given by `configure`.
Object resolve_operator, resolve_function, weakest_need;

/// Return whether this thread has no other callbacks, such as a profiler's.
bool observes_alone() {
  return !at::hasGlobalCallbacks() && at::get_record_function_tls_().sorted_tls_callbacks_.size() == 1;
}

Operator* find(Thread& here, const char* name, const char* overload) {
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

void capture(Thread& here, const c10::IValue& value, size_t index, bool values) {
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
std::int64_t distinct(const c10::TensorImpl& tensor) {
  std::int64_t count = 1;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) != 0) count *= tensor.size(dim);
  }
  return count;
}

bool is_floating(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_floating_point();
}

/// Return whether the innermost call turns values into a decision.
bool is_decision(const Thread& here, const Operator& op, c10::ArrayRef<const c10::IValue> inputs) {
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

/// Note the size of a divisor; a positive whole power, or any from 1 on, divides by nothing.
void note_divisor(Thread& here, const Operator& op, c10::ArrayRef<const c10::IValue> inputs) {
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

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
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

void end(const at::RecordFunction&, at::ObserverContext*) {
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

bool read(PyObject* object, Reading& reading) {
  PyObject* form = PyObject_GetAttrString(object, "form");
  if (!form) return false;
  reading.form = Object::borrowed(form);
  Py_DECREF(form);
  PyObject* need = PyObject_GetAttrString(object, "need");
  if (!need) return false;
  reading.need = PyLong_AsLong(need);
  Py_DECREF(need);
  reading.object = Object::borrowed(object);
  return !PyErr_Occurred();
}

/// Look an operator up in the table: (readings of arguments or None, result, unclear, statistic or None, by_scalars).
bool resolve(Operator& op) {
  PyObject* row = PyObject_CallFunction(resolve_operator.get(), "ss", op.name.c_str(), op.overload.c_str());
  if (!row) return false;
  PyObject *arguments = nullptr, *result = nullptr, *unclear = nullptr, *statistic = nullptr;
  int by_scalars = 0;
  bool good = PyArg_ParseTuple(row, "OOOOp", &arguments, &result, &unclear, &statistic, &by_scalars) != 0;
  std::vector<Reading> readings;
  if (good && arguments != Py_None) {
    for (Py_ssize_t index = 0; good && index < PyTuple_GET_SIZE(arguments); ++index) {
      good = read(PyTuple_GET_ITEM(arguments, index), readings.emplace_back());
    }
  }
  good = good && read(result, op.result) && read(unclear, op.unclear);
  if (good && statistic != Py_None) good = read(statistic, op.statistic);
  if (good) {
    op.captures = arguments != Py_None;
    op.elementwise = statistic != Py_None;
    op.by_scalars = by_scalars != 0;
    op.arguments = std::move(readings);
    op.resolved = true;
  }
  Py_DECREF(row);
  return good;
}

bool same_memory(const c10::TensorImpl& a, const c10::TensorImpl& b) {
  return a.has_storage() && b.has_storage() && a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

bool same_view(const c10::TensorImpl& a, const c10::TensorImpl& b) {
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

/// Return the scalar arguments of a call as a dict by index, for the table's decision.
PyObject* values_of(const Call& call) {
  PyObject* values = PyDict_New();
  for (size_t i = call.first_value; values && i < thread.values.size(); ++i) {
    const c10::IValue& value = thread.values[i].value;
    PyObject* converted = nullptr;
    if (value.isInt()) {
      converted = PyLong_FromLongLong(value.toInt());
    } else if (value.isDouble()) {
      converted = PyFloat_FromDouble(value.toDouble());
    } else if (value.isBool()) {
      converted = PyBool_FromLong(value.toBool());
    } else if (value.isString()) {
      converted = PyUnicode_FromString(value.toStringRef().c_str());
    } else if (value.isNone()) {
      converted = Py_NewRef(Py_None);
    } else {
      continue;  // a complex or symbolic number: the table treats a missing value as unclear
    }
    PyObject* key = PyLong_FromSize_t(thread.values[i].index);
    if (!converted || !key || PyDict_SetItem(values, key, converted) != 0) Py_CLEAR(values);
    Py_XDECREF(key);
    Py_XDECREF(converted);
  }
  return values;
}

/// An elementwise operand with this many times fewer elements than another has one number for many of the other's.
constexpr std::int64_t kFewer = 8;

struct Found {
  const Reading* reading;
  size_t index;
  bool is_argument;
};

/// Return the operand of a call that a tensor is: an argument by identity, else by the same view, else the result.
Found match(const Call& call, const c10::TensorImpl& tensor) {
  const Operator& op = *call.op;
  Found found{&op.result, 0, false};
  std::int64_t largest = 0;
  bool aliased = false;
  for (const bool by_identity : {true, false}) {
    for (size_t i = call.first_argument; i < thread.arguments.size(); ++i) {
      const Argument& argument = thread.arguments[i];
      if (by_identity) largest = std::max(largest, argument.tensor->numel());
      if (by_identity ? argument.tensor != &tensor : !same_memory(*argument.tensor, tensor)) continue;
      if (!by_identity && !same_view(*argument.tensor, tensor)) {
        aliased = true;
        continue;
      }
      const Reading& reading = argument.index < op.arguments.size() ? op.arguments[argument.index] : op.unclear;
      if (found.is_argument && reading.need == found.reading->need && reading.form.get() != found.reading->form.get()) {
        found.reading = &op.unclear;
      } else if (!found.is_argument || reading.need > found.reading->need) {
        found = {&reading, argument.index, true};
      }
    }
    if (found.is_argument) break;
  }
  if (!found.is_argument && aliased) found.reading = &op.unclear;
  // An operand with one number for many elements of the other is a statistic or a scale, and costs next to nothing.
  if (found.is_argument && op.elementwise && distinct(tensor) * kFewer <= largest) found.reading = &op.statistic;
  return found;
}

PyObject* may_be_transformed(PyObject*, PyObject*) { return PyBool_FromLong(special()); }

/// saving(tensor, min_bytes): count a tensor saved by the running operator; return how much there is to decide.
PyObject* saving(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_Format(PyExc_TypeError, "saving expects a tensor and a number of bytes, got %zd arguments", count);
    return nullptr;
  }
  const at::Tensor* const tensor = tensor_of(arguments[0]);
  const long long min_bytes = tensor ? PyLong_AsLongLong(arguments[1]) : -1;
  if (PyErr_Occurred()) return nullptr;
  if (!thread.calls.empty()) ++thread.calls.back().saves;
  try {
    return PyLong_FromLong(saving_of(arguments[0], *tensor, min_bytes));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

/// Return how the running operator reads a tensor; None outside of operators.
PyObject* reading_of(const at::Tensor& tensor) {
  if (thread.calls.empty() || !thread.calls.back().op) Py_RETURN_NONE;
  Operator& op = *thread.calls.back().op;
  if (op.is_function) {
    const long position = std::max(thread.calls.back().saves - 1, 0L);
    return PyObject_CallFunction(resolve_function.get(), "sl", op.name.c_str(), position);
  }
  if (!op.resolved && !resolve(op)) return nullptr;
  const Call& call = thread.calls.back();
  const Found found = match(call, *tensor.unsafeGetTensorImpl());
  if (!op.by_scalars) return found.reading->object.new_reference();
  PyObject* values = values_of(call);
  if (!values) return nullptr;
  return PyObject_CallMethod(found.reading->object.get(), "given", "N", values);
}

Partner partner_made_by(Maker maker) {
  if (is_gate(maker)) return Partner::kGate;
  if (is_of_layer(maker)) return Partner::kLayer;
  return maker == Maker::kLogarithm ? Partner::kLogarithm : Partner::kOther;
}

/// Return what the running operator multiplies a tensor by: the other operand that codes could serve.
Partner partner_of(const at::Tensor& tensor) {
  if (thread.calls.empty() || !thread.calls.back().op || thread.calls.back().op->is_function) return Partner::kNothing;
  constexpr long kCodes = 2;
  const Call& call = thread.calls.back();
  const c10::TensorImpl& own = *tensor.unsafeGetTensorImpl();
  const auto made = node_of(tensor);
  Partner found = Partner::kNothing;
  bool seen = false;
  for (size_t i = call.first_argument; i < thread.arguments.size(); ++i) {
    const auto& [given, index] = thread.arguments[i];
    if (index >= call.op->arguments.size() || call.op->arguments[index].need != kCodes) continue;
    // A transposed view is the tensor itself too; a part of the same memory is not.
    const bool same = given == &own || (same_memory(*given, own) && given->storage_offset() == own.storage_offset() &&
                                        given->numel() == own.numel());
    if (same && seen) return Partner::kItself;
    seen = seen || same;
    if (same) continue;
    const at::Tensor other(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
        const_cast<c10::TensorImpl*>(given)));
    if (!other.requires_grad()) continue;
    const auto node = node_of(other);
    if (same_source(made.get(), node.get(), tensor)) return Partner::kItself;
    const bool fewer = call.op->elementwise && distinct(*given) * kFewer <= distinct(own);
    found = std::max(found, !node || is_parameter(node.get()) ? (fewer ? Partner::kGain : Partner::kParameter)
                            : fewer                           ? Partner::kStatistic
                                                              : partner_made_by(maker_of(node.get())));
  }
  return found;
}

/// facts(tensor): return (reading or None, maker, partner, origin) of a tensor that the running operator saves.
PyObject* facts(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  PyObject* const reading = reading_of(*tensor);
  if (!reading) return nullptr;
  try {
    const auto node = node_of(*tensor);
    const auto maker = static_cast<size_t>(maker_of(node.get()));
    const auto partner = static_cast<size_t>(partner_of(*tensor));
    return Py_BuildValue("(NOON)", reading, nodes().makers[maker], nodes().partners[partner], name_of(node.get()));
  } catch (...) {
    Py_DECREF(reading);
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* start(PyObject*, PyObject*) {
  if (thread.observers++ == 0) {
    at::RecordFunctionCallback callback(&begin, &end);
    callback.needsInputs(true).scopes({at::RecordScope::FUNCTION});
    thread.handle = at::addThreadLocalCallback(callback);
  }
  Py_RETURN_NONE;
}

/// Look up the operators seen so far: `begin` records no arguments of an operator that keeps all of them exact.
void resolve_seen() {
  std::vector<Operator*> seen;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    seen.swap(registry().unresolved);
  }
  for (Operator* const op : seen) {
    // An operator without a schema stays unresolved; a save by the operator raises the error.
    if (!op->resolved && !resolve(*op)) PyErr_Clear();
  }
}

PyObject* stop(PyObject*, PyObject*) {
  if (thread.observers == 0 || --thread.observers > 0) Py_RETURN_NONE;
  at::removeCallback(thread.handle);
  if (!PyErr_Occurred()) resolve_seen();
  Py_RETURN_NONE;
}

/// Return (calls so far, decisions so far, decisions before the running call) of this thread.
PyObject* progress(PyObject*, PyObject*) {
  const std::uint64_t before = thread.calls.empty() ? thread.decisions : thread.calls.back().decisions;
  return Py_BuildValue("KKK", static_cast<unsigned long long>(thread.serial),
                       static_cast<unsigned long long>(thread.decisions), static_cast<unsigned long long>(before));
}

/// The weakest need of each node type; guarded by the GIL.
std::unordered_map<std::type_index, long>& weakest_needs() {
  static auto& instance = *std::make_unique<std::unordered_map<std::type_index, long>>().release();
  return instance;
}

/// Return the name of the node running in backward if the table gives the node a need above `need`, else None.
PyObject* contradiction(PyObject*, PyObject* argument) {
  auto& needs = weakest_needs();
  const long need = PyLong_AsLong(argument);
  if (need == -1 && PyErr_Occurred()) return nullptr;
  const auto node = torch::autograd::get_current_node();
  if (!node) Py_RETURN_NONE;
  const torch::autograd::Node& running = *node;
  const std::type_index type(typeid(running));
  auto known = needs.find(type);
  if (known == needs.end()) {
    PyObject* weakest = PyObject_CallFunction(weakest_need.get(), "s", running.name().c_str());
    if (!weakest) return nullptr;
    known = needs.emplace(type, PyLong_AsLong(weakest)).first;
    Py_DECREF(weakest);
  }
  if (known->second <= need) Py_RETURN_NONE;
  return PyUnicode_FromString(running.name().c_str());
}

/// Return of each input of the running node whether this backward computes its gradient; None if it computes all.
PyObject* asked(PyObject*, PyObject*) {
  const auto* const tasks = torch::autograd::get_current_graph_task_exec_info();
  if (!tasks || tasks->empty()) Py_RETURN_NONE;
  const auto node = torch::autograd::get_current_node();
  if (!node) Py_RETURN_NONE;
  const auto count = static_cast<Py_ssize_t>(node->num_outputs());
  PyObject* const answers = PyTuple_New(count);
  for (Py_ssize_t index = 0; answers && index < count; ++index) {
    const bool computed = node->task_should_compute_output(static_cast<size_t>(index));
    PyTuple_SET_ITEM(answers, index, PyBool_FromLong(computed));
  }
  return answers;
}

/// Return the elements of the largest divisor in this thread since the last call of this function.
PyObject* take_divisor(PyObject*, PyObject*) { return PyLong_FromLongLong(std::exchange(thread.largest_divisor, 0)); }

/// Replace the contents of a set by names from Python; return false with an error set.
bool read_names(PyObject* given, std::unordered_set<std::string>& names) {
  PyObject* sequence = PySequence_Fast(given, "a sequence of names was expected");
  if (!sequence) return false;
  names.clear();
  bool good = true;
  for (Py_ssize_t index = 0; good && index < PySequence_Fast_GET_SIZE(sequence); ++index) {
    const char* name = PyUnicode_AsUTF8(PySequence_Fast_GET_ITEM(sequence, index));
    good = name != nullptr;
    if (good) names.emplace(name);
  }
  Py_DECREF(sequence);
  return good;
}

/// Replace the contents of a list by objects from Python, which are never released.
void read_members(PyObject* given, std::vector<PyObject*>& members) {
  members.clear();
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(given); ++index) {
    members.push_back(Py_NewRef(PyTuple_GET_ITEM(given, index)));
  }
}

/// configure(resolve_operator, resolve_function, weakest_need, kind_of, deciding, choosing, dividing, makers,
/// partners): set the look-ups in the tables of readers and of nodes, the names of operators, and the enumerations of
/// the rule.
PyObject* configure(PyObject*, PyObject* arguments) {
  PyObject *of_operator = nullptr, *of_function = nullptr, *weakest = nullptr, *kind = nullptr, *deciding = nullptr;
  PyObject *choosing = nullptr, *dividing = nullptr, *makers = nullptr, *partners = nullptr;
  if (!PyArg_ParseTuple(arguments, "OOOOOO!O!O!O!", &of_operator, &of_function, &weakest, &kind, &deciding,
                        &PyDict_Type, &choosing, &PyDict_Type, &dividing, &PyTuple_Type, &makers, &PyTuple_Type,
                        &partners)) {
    return nullptr;
  }
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (!read_names(deciding, all.deciding)) return nullptr;
  nodes().kind_of = Object::borrowed(kind);
  read_members(makers, nodes().makers);
  read_members(partners, nodes().partners);
  all.choosing.clear();
  all.dividing.clear();
  PyObject *name = nullptr, *index = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(dividing, &position, &name, &index);) {
    const char* text = PyUnicode_AsUTF8(name);
    const long operand = PyLong_AsLong(index);
    if (!text || (operand == -1 && PyErr_Occurred())) return nullptr;
    all.dividing[text] = static_cast<int>(operand);
  }
  for (Py_ssize_t position = 0; PyDict_Next(choosing, &position, &name, &index);) {
    const char* text = PyUnicode_AsUTF8(name);
    int operand = 0;
    double choice = 0;
    if (!text || !PyArg_ParseTuple(index, "id", &operand, &choice)) return nullptr;
    all.choosing[text] = {operand, choice};
  }
  resolve_operator = Object::borrowed(of_operator);
  resolve_function = Object::borrowed(of_function);
  weakest_need = Object::borrowed(weakest);
  Py_RETURN_NONE;
}

/// Forget all look-ups, after a change of the table.
PyObject* forget(PyObject*, PyObject*) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (auto& entry : registry().operators) {
    entry.second->resolved = false;
    entry.second->captures = true;
    if (!entry.second->is_function) registry().unresolved.push_back(entry.second.get());
  }
  weakest_needs().clear();
  nodes().kinds.clear();
  nodes().functions.clear();
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, "Set the look-ups in the table of readers."},
    {"forget", forget, METH_NOARGS, "Forget all look-ups, after a change of the table."},
    {"start", start, METH_NOARGS, "Observe the operators of this thread; calls nest."},
    {"stop", stop, METH_NOARGS, "Undo one start of this thread."},
    {"may_be_transformed", may_be_transformed, METH_NOARGS, "Return whether operators may be transformed or replaced."},
    {"saving", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(saving)), METH_FASTCALL,
     "Count a tensor that the running operator saves; return how much there is to decide about it."},
    {"origin", origin, METH_O, "Return the name of the operator behind a tensor, views aside."},
    {"facts", facts, METH_O,
     "Return how the running operator reads a tensor it saves, None outside operators; the tensor's maker, partner and "
     "origin."},
    {"layout_key", layout_key, METH_O, "Return bytes that are equal for tensors of equal layout, dtype and device."},
    {"bare", bare, METH_O, "Return a tensor's memory and version counter without its graph."},
    {"buffer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(buffer)), METH_FASTCALL,
     "Return uninitialised bytes on the device of a tensor."},
    {"empty_as", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(empty_as)), METH_FASTCALL,
     "Return uninitialised memory with the layout and dtype of one tensor on the device of another."},
    {"version", version, METH_O, "Return the version of a tensor, with its counter, without the tensor."},
    {"progress", progress, METH_NOARGS,
     "Return the number of calls in this thread, of decisions, and of decisions before the running call."},
    {"take_divisor", take_divisor, METH_NOARGS,
     "Return the elements of the largest divisor in this thread since the last call of this function."},
    {"contradiction", contradiction, METH_O, "Return the name of the running node if the node needs more than `need`."},
    {"asked", asked, METH_NOARGS,
     "Return of each input of the running node whether this backward computes its gradient; None if it computes all."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_observer",
    "Finds the operator that saves a tensor; compiled for the release of torch in BUILT_FOR.",
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace
}  // namespace pac::observer

PyMODINIT_FUNC PyInit__observer() {
  using namespace pac::observer;
  version_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&version_spec));
  if (!version_type) return nullptr;
  PyObject* module = PyModule_Create(&definition);
  if (module && PyModule_AddStringConstant(module, "BUILT_FOR", PAC_BUILT_FOR) != 0) Py_CLEAR(module);
  return module;
}
