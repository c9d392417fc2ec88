// The unpack hook: restores a saved tensor, unless the running backward asks for no gradient that reads it.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include "engine/parts.hpp"

namespace pac::engine {

inline void check_reader(PyObject* form, long need, at::IntArrayRef shape) {
  const Ref node = observer::contradiction_of(need);
  if (node) rare("refuse_reader", {node.get(), form, integers(shape).get()});
  const bool coarse = need == kCodes || need == kRelative;
  if (coarse && at::GradMode::is_enabled() && torch::autograd::get_current_node()) {
    rare("warn_of_differentiated_gradients", {});
  }
}

/// Return whether this backward was started for some inputs only, as by torch.autograd.grad: nodes may skip gradients.
inline bool is_partial_backward() {
  const auto* const tasks = torch::autograd::get_current_graph_task_exec_info();
  return tasks && !tasks->empty() && torch::autograd::get_current_node();
}

/// Restore a saved tensor: the unpack hook.
inline PyObject* unpack(PyObject*, PyObject* saved) {
  return guarded([&] {
    if (Py_TYPE(saved) != types().kept && is_partial_backward()) {
      Ref unread = rare("unread", {saved});
      if (unread.get() != Py_None) {
        if (const Stored* const own = stored_in(saved)) own->check();  // as torch checks what it does not read
        return unread.release();
      }
    }
    return THPVariable_Wrap(restore(saved));
  });
}

}  // namespace pac::engine
