// What each call of a fused module asks before it calls its function, without a frame of Python.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>

#include <cstdlib>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/types.hpp"

namespace pac::functions {

/// The saved-tensor hooks on top.
struct HooksOnTop {
  bool any = false;
  PyObject* own = nullptr;  ///< the engine's
};

inline HooksOnTop hooks_on_top() {
  const auto top = at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true);
  if (!top) return {};
  PyObject* const pack = top->first.ptr(getPyInterpreter());
  PyObject* const self = PyCFunction_Check(pack) ? PyCFunction_GET_SELF(pack) : nullptr;
  return {true, self && Py_TYPE(self) == engine::types().hooks ? self : nullptr};
}

/// Return whether the saved-tensor hooks on top are the engine's, or there are none: nothing reruns a function then.
inline bool has_own_hooks() {
  const HooksOnTop top = hooks_on_top();
  return !top.any || top.own;
}

/// Return whether PYACTCOMP_DISABLE=1 is set; os.environ writes to the process's own environment.
inline bool is_disabled() {
  const char* const value = std::getenv("PYACTCOMP_DISABLE");
  return value && std::string_view(value) == "1";
}

/// Return whether gradients are recorded, and nothing transforms, disables or may rerun the running function.
inline bool is_ordinary_call() {
  return at::GradMode::is_enabled() && !observer::special() && !is_disabled() && has_own_hooks();
}

/// Return whether a fused call may take a tensor of torch's own class.
inline bool may_take(const at::Tensor& x, long long min_bytes, bool constant) {
  return (constant || x.requires_grad()) && x.layout() == at::kStrided && !x.is_meta() && !x.is_nested() &&
         at::isFloatingType(x.scalar_type()) && x.nbytes() >= static_cast<size_t>(min_bytes);
}

/// is_ordinary(): see `methods`.
inline PyObject* is_ordinary(PyObject*, PyObject*) {
  return engine::guarded([] { return engine::truth(is_ordinary_call()); });
}

/// takes(tensor, min_bytes, constant): see `methods`.
inline PyObject* takes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return engine::guarded([&] {
    if (count != 3) {
      PyErr_Format(PyExc_TypeError, "takes expects a tensor, bytes and a truth, got %zd arguments", count);
      throw engine::PythonError();
    }
    if (!THPVariable_CheckExact(arguments[0])) return engine::truth(false);
    return engine::truth(
        may_take(engine::tensor_in(arguments[0]), engine::integer(arguments[1]), arguments[2] == Py_True));
  });
}

/// An attribute's or a key's name, made once.
template <const char* text>
PyObject* name() {
  static PyObject* const made = PyUnicode_InternFromString(text);
  return made;
}

/// What a fused class stands for: functions of torch.nn.functional, and the forward of the module's own class.
///
/// A program may replace any of them, or give a module parametrizations: the module's own forward runs then.
struct StandsFor {
  std::vector<std::pair<engine::Ref, engine::Ref>> functions;  ///< by name, as they are when torch is imported
  engine::Ref own, forward;

  static const StandsFor& of(PyTypeObject* type) {
    // Never freed: the interpreter may end first. Holds a reference to each class.
    static auto& all = *std::make_unique<std::unordered_map<PyTypeObject*, StandsFor>>().release();
    const auto known = all.find(type);
    if (known != all.end()) return known->second;
    const engine::Ref found = engine::rare("stood_for", {reinterpret_cast<PyObject*>(type)});
    PyObject *functions = nullptr, *own = nullptr, *forward = nullptr;
    if (!PyArg_ParseTuple(found.get(), "O!OO", &PyDict_Type, &functions, &own, &forward)) throw engine::PythonError();
    StandsFor made;
    PyObject *key = nullptr, *function = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(functions, &position, &key, &function);) {
      made.functions.emplace_back(engine::Ref::borrowed(key), engine::Ref::borrowed(function));
    }
    made.own = engine::Ref::borrowed(own);
    made.forward = engine::Ref::borrowed(forward);
    Py_INCREF(type);
    return all.emplace(type, std::move(made)).first->second;
  }

  bool is_replaced() const {
    static PyObject* const now = engine::constant("FUNCTIONAL");
    for (const auto& [key, function] : functions) {
      if (PyDict_GetItemWithError(now, key.get()) != function.get()) return true;
    }
    static constexpr char kForward[] = "forward";
    return engine::checked(PyObject_GetAttr(own.get(), name<kForward>())).get() != forward.get();
  }
};

/// Return the codes of a call of a fused module where nothing unusual surrounds it, or none: then Python asks more
/// closely. As `codes_for` in fusions/fusion.py, for kernels that store codes rounded to the nearest.
inline engine::Ref codes_of_ordinary_call(PyObject* module, PyObject* object, bool constant) {
  static constexpr char kFusing[] = "_pyactcomp_fusing", kTraining[] = "training", kModules[] = "_modules";
  static constexpr char kParametrizations[] = "parametrizations", kPaused[] = "paused", kCodes[] = "fixed_codes";
  static constexpr char kConfig[] = "config", kMinBytes[] = "min_bytes", kImpl[] = "impl";
  using engine::checked, engine::Ref;
  if (!THPVariable_CheckExact(object) || !is_ordinary_call() || at::impl::PythonTorchFunctionTLS::stack_len() != 0) {
    return {};
  }
  const Ref members = checked(PyObject_GenericGetDict(module, nullptr));
  PyObject* const state = PyDict_GetItemWithError(members.get(), name<kFusing>());
  PyObject* const children = PyDict_GetItemWithError(members.get(), name<kModules>());
  if (!state || PyDict_GetItemWithError(members.get(), name<kTraining>()) != Py_True || !children ||
      !PyDict_Check(children) || PyDict_Contains(children, name<kParametrizations>()) != 0) {
    return {};
  }
  const Ref paused = checked(PyObject_GetAttr(state, name<kPaused>()));
  const Ref config = checked(PyObject_GetAttr(state, name<kConfig>()));
  const Ref min_bytes = checked(PyObject_GetAttr(config.get(), name<kMinBytes>()));
  const at::Tensor& x = engine::tensor_in(object);
  if (paused.get() != Py_False || !may_take(x, engine::integer(min_bytes.get()), constant)) return {};
  Ref codes = checked(PyObject_GetAttr(state, name<kCodes>()));
  if (codes.get() == Py_None) return {};
  if (!x.is_cuda()) {
    const Ref impl = checked(PyObject_GetAttr(codes.get(), name<kImpl>()));
    if (!PyUnicode_Check(impl.get()) || PyUnicode_CompareWithASCIIString(impl.get(), "triton") != 0) return {};
  }
  return StandsFor::of(Py_TYPE(module)).is_replaced() ? Ref() : codes;
}

/// ordinary_codes(module, x, constant): see `methods`.
inline PyObject* ordinary_codes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return engine::guarded([&] {
    if (count != 3) {
      PyErr_Format(PyExc_TypeError, "ordinary_codes expects a module, a tensor and a truth, got %zd arguments", count);
      throw engine::PythonError();
    }
    engine::Ref codes = codes_of_ordinary_call(arguments[0], arguments[1], arguments[2] == Py_True);
    return codes ? codes.release() : Py_NewRef(Py_None);
  });
}

}  // namespace pac::functions
