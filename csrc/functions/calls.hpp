// What each call of a fused module asks before it calls its function, without a frame of Python.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>

#include <cstdlib>
#include <string_view>

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

/// is_ordinary(): see `methods`.
inline PyObject* is_ordinary(PyObject*, PyObject*) {
  return engine::guarded([] {
    return engine::truth(at::GradMode::is_enabled() && !observer::special() && !is_disabled() && has_own_hooks());
  });
}

/// takes(tensor, min_bytes, constant): see `methods`.
inline PyObject* takes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return engine::guarded([&] {
    if (count != 3) {
      PyErr_Format(PyExc_TypeError, "takes expects a tensor, bytes and a truth, got %zd arguments", count);
      throw engine::PythonError();
    }
    if (!THPVariable_CheckExact(arguments[0])) return engine::truth(false);
    const at::Tensor& x = engine::tensor_in(arguments[0]);
    const auto min_bytes = static_cast<size_t>(engine::integer(arguments[1]));
    const bool recorded = arguments[2] == Py_True || x.requires_grad();
    return engine::truth(recorded && x.layout() == at::kStrided && !x.is_meta() && !x.is_nested() &&
                         at::isFloatingType(x.scalar_type()) && x.nbytes() >= min_bytes);
  });
}

}  // namespace pac::functions
