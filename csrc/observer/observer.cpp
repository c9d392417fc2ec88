// The module pyactcomp._observer: finds the operator running in this thread, and the operand that a saved tensor is,
// and packs saved tensors (csrc/engine).
//
// A saved-tensor hook runs inside the saving operator, so the innermost call is the reader. The module is compiled for
// one release of torch, as _torch_allocator is.
//
// Longer than 400 lines: the table's readings, the match and the module's functions share the calls of a thread.
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
#include <sstream>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/module.hpp"
#include "functions/batch_norm.hpp"
#include "functions/calls.hpp"
#include "functions/dropout.hpp"
#include "functions/gelu.hpp"
#include "functions/norm.hpp"
#include "observer/calls.hpp"
#include "observer/facts.hpp"
#include "observer/nodes.hpp"
#include "observer/operators.hpp"
#include "observer/tensors.hpp"

namespace pac::observer {
namespace {

// Given by `configure`.
Object resolve_operator, resolve_function, weakest_need;

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

/// Find which operand of a call a tensor is: the argument that is this tensor, else one that views the same elements,
/// else the result.
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

/// The readings that depend on scalar arguments, by the reading without them and the scalars as text; with the GIL.
std::unordered_map<std::string, Object>& given_readings() {
  static auto& instance = *std::make_unique<std::unordered_map<std::string, Object>>().release();
  return instance;
}

/// Return a text that is equal for equal scalar arguments of a call.
std::string text_of(const Call& call, const PyObject* reading) {
  std::ostringstream text;
  text << reading;
  for (size_t i = call.first_value; i < thread.values.size(); ++i) {
    const auto& [index, value] = thread.values[i];
    text << '|' << index << value.tagKind();
    if (value.isInt() || value.isBool()) text << (value.isInt() ? value.toInt() : value.toBool());
    if (value.isDouble()) text << std::hexfloat << value.toDouble();
    if (value.isString()) text << value.toStringRef();
  }
  return text.str();
}

/// Return how the running operator reads a tensor; nothing outside of operators.
engine::Ref reading_of(const at::Tensor& tensor) {
  using engine::checked, engine::Ref;
  if (thread.calls.empty() || !thread.calls.back().op) return {};
  Operator& op = *thread.calls.back().op;
  if (op.is_function) {
    const long position = std::max(thread.calls.back().saves - 1, 0L);
    return checked(PyObject_CallFunction(resolve_function.get(), "sl", op.name.c_str(), position));
  }
  if (!op.resolved && !resolve(op)) throw engine::PythonError();
  const Call& call = thread.calls.back();
  PyObject* const reading = match(call, *tensor.unsafeGetTensorImpl()).reading->object.get();
  if (!op.by_scalars) return Ref::borrowed(reading);
  Object& given = given_readings()[text_of(call, reading)];
  if (!given) {
    const Ref made = checked(PyObject_CallMethod(reading, "given", "N", checked(values_of(call)).release()));
    given = Object::borrowed(made.get());
  }
  return Ref::borrowed(given.get());
}

Partner partner_made_by(Maker maker) {
  if (is_gate(maker)) return Partner::kGate;
  if (is_of_layer(maker)) return Partner::kLayer;
  return maker == Maker::kLogarithm ? Partner::kLogarithm : Partner::kOther;
}

/// Return a tensor that a call reads.
at::Tensor tensor_of(const Argument& argument) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
      const_cast<c10::TensorImpl*>(argument.tensor)));
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
    const at::Tensor other = tensor_of(thread.arguments[i]);
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

/// configure_engine(names): see `methods`.
PyObject* configure_engine(PyObject*, PyObject* names) {
  if (!PyDict_Check(names)) return PyErr_Format(PyExc_TypeError, "a dict was expected, got %R", names);
  engine::names() = engine::Ref::borrowed(names);
  Py_RETURN_NONE;
}

PyObject* note_save_of(PyObject*, PyObject*) {
  note_save();
  Py_RETURN_NONE;
}

/// facts(tensor): return (reading or None, maker, partner, origin) of a tensor that the running operator saves.
PyObject* facts(PyObject*, PyObject* object) {
  return engine::guarded([object] {
    const at::Tensor& tensor = engine::tensor_in(object);
    const Facts found = facts_of(tensor);
    PyObject* const reading = found.reading ? found.reading.get() : Py_None;
    const auto node = node_of(tensor);
    return Py_BuildValue("(OOON)", reading, found.maker, found.partner, name_of(node.get()));
  });
}

/// counts(): return the stored forms and recipes that are alive, the regions decoded and the recipes run so far.
PyObject* counts_of(PyObject*, PyObject*) {
  const engine::Counts& now = engine::counts();
  return Py_BuildValue("(lll)", now.alive, now.decoded, now.recomputed);
}

PyObject* stored_forms(PyObject*, PyObject*) {
  return engine::guarded([] { return engine::Stored::all().release(); });
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
  given_readings().clear();
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
    {"bare", bare, METH_O, "Return a tensor's memory and version counter without its graph."},
    {"empty_like", empty_like, METH_O, "Return uninitialised memory with the layout and dtype of a dense tensor."},
    {"buffer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(buffer)), METH_FASTCALL,
     "Return uninitialised bytes on the device of a tensor."},
    {"progress", progress, METH_NOARGS,
     "Return the number of calls in this thread, of decisions, and of decisions before the running call."},
    {"take_divisor", take_divisor, METH_NOARGS,
     "Return the elements of the largest divisor in this thread since the last call of this function."},
    {"asked", asked, METH_NOARGS,
     "Return of each input of the running node whether this backward computes its gradient; None if it computes all."},
    {"note_save", note_save_of, METH_NOARGS, "Count a tensor that the running operator saves."},
    {"facts", facts, METH_O,
     "Return how the running operator reads a tensor it saves, None outside operators; the tensor's maker, partner and "
     "origin."},
    {"configure_engine", configure_engine, METH_O, "Set the functions for what is rare and the constants, by name."},
    {"counts", counts_of, METH_NOARGS,
     "Return the stored forms and recipes alive, the regions decoded and the recipes run so far in this process."},
    {"stored_forms", stored_forms, METH_NOARGS, "Return the stored forms alive."},
    {"unpack", engine::unpack, METH_O, "Restore a saved tensor: the unpack hook."},
    {"is_ordinary", functions::is_ordinary, METH_NOARGS,
     "Return whether gradients are recorded, operators only run, nothing is disabled, and no function is "
     "checkpointed."},
    {"takes", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(functions::takes)), METH_FASTCALL,
     "Return whether a fused call may take a tensor: plain, floating, of so many bytes, with a gradient or constant."},
    {"ordinary_codes", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(functions::ordinary_codes)),
     METH_FASTCALL, "Return the codes of a fused module's call with nothing unusual around it, or None: ask Python."},
    {"dropout", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(functions::dropout)), METH_FASTCALL,
     "Drop elements of a tensor on the CPU, by a function of autograd that saves a mask."},
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

void note_save() {
  if (!thread.calls.empty()) ++thread.calls.back().saves;
}

at::Tensor written() {
  if (thread.calls.empty() || !thread.calls.back().op || thread.calls.back().op->name.back() != '_') return {};
  const size_t first = thread.calls.back().first_argument;
  const bool given = first < thread.arguments.size() && thread.arguments[first].index == 0;
  return given ? tensor_of(thread.arguments[first]) : at::Tensor();
}

Facts facts_of(const at::Tensor& tensor) {
  Facts facts;
  facts.reading = reading_of(tensor);
  facts.repeats = facts.reading && !thread.calls.back().op->is_function;
  const auto node = node_of(tensor);
  facts.maker = nodes().makers[static_cast<size_t>(maker_of_operand(node.get()))];
  facts.partner = nodes().partners[static_cast<size_t>(partner_of(tensor))];
  return facts;
}

engine::Ref contradiction_of(long need) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return {};
  const Node& running = *node;
  auto& needs = weakest_needs();
  auto known = needs.find(std::type_index(typeid(running)));
  if (known == needs.end()) {
    const engine::Ref weakest = engine::checked(PyObject_CallFunction(weakest_need.get(), "s", running.name().c_str()));
    known = needs.emplace(typeid(running), static_cast<long>(engine::integer(weakest.get()))).first;
  }
  return known->second <= need ? engine::Ref() : engine::Ref(PyUnicode_FromString(running.name().c_str()));
}

}  // namespace pac::observer

PyMODINIT_FUNC PyInit__observer() {
  using namespace pac;
  PyObject* module = PyModule_Create(&observer::definition);
  if (!module) return nullptr;
  const int status = engine::guarded_status([module] {
    engine::add_classes(module);
    functions::add_batch_norm(module);
    functions::add_gelu(module);
    functions::add_norm(module);
  });
  if (status != 0 || PyModule_AddStringConstant(module, "BUILT_FOR", PAC_BUILT_FOR) != 0) Py_CLEAR(module);
  return module;
}
