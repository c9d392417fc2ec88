// What the autograd functions of fused kernels share: what surrounds a call, what a write to an operand does, the
// recipe of the result, and the beginning of a backward that has no derivative.
#pragma once

#include <ATen/core/custom_class.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "functions/calls.hpp"
#include "functions/launches.hpp"

namespace pac::functions {

using MaybeTensor = std::optional<at::Tensor>;
using torch::autograd::AutogradContext, torch::autograd::variable_list;

/// What surrounds a call: whether writes to what it reads are checked, whether what it saves is dropped unread, as in
/// the first run of a checkpointed function, and whether a report records it.
struct Circumstances {
  bool checks = true, dropped = false, recorded = false;

  static Circumstances now() {
    const HooksOnTop top = hooks_on_top();
    if ((top.own || !top.any) && !observer::special()) {
      return {true, false, top.own && static_cast<bool>(engine::body<engine::Hooks>(top.own).recorder)};
    }
    const Ref found = engine::rare("circumstances", {});
    int checks = 0, dropped = 0, recorded = 0;
    if (!PyArg_ParseTuple(found.get(), "ppp", &checks, &dropped, &recorded)) throw engine::PythonError();
    return {checks != 0, dropped != 0, recorded != 0};
  }
};

/// One call of a function, and what its backward needs besides what is saved.
struct FusedCall : torch::CustomClassHolder {
  Circumstances now = Circumstances::now();
  Ref recipe;
  std::vector<std::pair<engine::Version, c10::SmallVector<std::int64_t, 5>>> read;

  /// Let a write to a tensor raise autograd's error in backward: torch's own function saves the tensor.
  void watch(const at::Tensor& tensor) {
    if (tensor.defined() && now.checks && observer::is_exact(tensor)) {
      read.emplace_back(engine::Version(tensor), tensor.sizes());
    }
  }

  /// Begin the recipe of the result, before what it reads is saved: what is saved may leave the device, and what reads
  /// it then lets go. Return null where what is saved is dropped: the recipe stays empty.
  engine::Recipe* begin_recipe() {
    engine::Recipe& made = *engine::made<engine::Recipe>(engine::types().recipe);
    recipe = Ref(made.self);
    return now.dropped ? nullptr : &made;
  }

  /// Offer the recipe on the node of the result.
  void offer_recipe(const at::Tensor& out) {
    const Ref made = std::exchange(recipe, Ref());
    const auto node = out.grad_fn();
    if (!node) return;
    engine::body<engine::Recipe>(made.get()).describe(out);
    engine::offer(*node, made);
  }
};

/// Release what a recipe reads, as backward releases what is saved; stored forms of the recipe hold it themselves.
inline void withdraw() {
  const auto node = torch::autograd::get_current_node();
  if (!node || torch::autograd::get_current_graph_task_keep_graph() || !engine::recipe_on(*node)) return;
  if (PyDict_DelItem(engine::metadata_of(*node), engine::recipe_name()) != 0) throw engine::PythonError();
}

/// Return whether training is distributed: then a parameter may be freed between the forward and the backward of its
/// module.
inline bool is_distributed() {
  PyObject* const default_group = engine::constant("DEFAULT_GROUP");
  return default_group != Py_None && checked(PyObject_CallNoArgs(default_group)).get() != Py_None;
}

/// Return a parameter as it stays valid until backward ends.
inline at::Tensor lasting(const at::Tensor& parameter) {
  if (!parameter.defined()) return parameter;
  const at::Tensor bare = observer::bare_tensor(parameter);
  return is_distributed() ? bare.clone() : bare;
}

/// Return a gradient with memory: of one that a collective still computes, the result.
inline at::Tensor waited(const at::Tensor& grad) {
  const Ref object(THPVariable_Wrap(grad));
  if (THPVariable_CheckExact(object.get())) return grad;
  return engine::tensor_in(engine::rare("waited", {object.get()}).get());
}

/// Run a backward without a derivative: of the call and the incoming gradient, into the gradients of `inputs` inputs.
template <class Call, class Function>
variable_list once_differentiable(AutogradContext* context, const variable_list& grads, size_t inputs,
                                  const Function& backward) {
  const engine::WithGil held;
  try {
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const Call&>(*capsule);
    withdraw();
    variable_list found(inputs);
    if (!grads[0].defined()) return found;
    for (const auto& [seen, sizes] : call.read) seen.check(sizes);
    if (at::GradMode::is_enabled()) engine::rare("refuse_second_derivative", {});
    backward(call, waited(grads[0]), found);
    return found;
  } catch (const engine::PythonError&) {
    python_error error;
    error.persist();
    throw error;
  }
}

inline at::Tensor given_tensor(PyObject* object) {
  return object == Py_None ? at::Tensor() : engine::tensor_in(object);
}
inline std::optional<at::ScalarType> given_dtype(PyObject* object) {
  return object == Py_None ? std::nullopt : std::make_optional(engine::dtype_in(object));
}
inline MaybeTensor maybe(const at::Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; }

/// The Python object of the kernels of a function.
template <class Kind>
struct KernelsBody {
  PyObject* self = nullptr;
  std::shared_ptr<Kind> kernels;
};

/// Add the class of such objects to the module.
template <class Body>
void add_kernels(PyObject* module, const char* name, const char* doc, initproc init, PyMethodDef* methods) {
  if (PyModule_AddType(module, engine::class_of<Body>(name, doc, nullptr, init, methods, nullptr)) != 0) {
    throw engine::PythonError();
  }
}

}  // namespace pac::functions
