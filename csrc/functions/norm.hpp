// Layer norm and RMS norm as one autograd function that stores codes.
//
// A function of Python takes 100 us of the host for a norm, which is what a step waits for where kernels are short.
#pragma once

#include <ATen/core/custom_class.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "functions/norm_kernels.hpp"

namespace pac::functions {

using MaybeTensor = std::optional<at::Tensor>;

/// One call of a norm, and what its backward needs besides what is saved.
struct NormCall : torch::CustomClassHolder {
  std::shared_ptr<NormKernels> kernels;
  at::Tensor rows, total, result, weight, bias;  ///< the parameters as they stay valid until backward ends
  at::ScalarType dtype = at::kFloat, of_x = at::kFloat, of_residual = at::kFloat;
  bool summed = false;  ///< whether there is a residual
  Noise noise;
  Circumstances now;
  Ref recipe;
  std::vector<std::pair<engine::Version, c10::SmallVector<std::int64_t, 5>>> read;
};

/// Release what a recipe reads, as backward releases what is saved; stored forms of the recipe hold it themselves.
inline void withdraw() {
  const auto node = torch::autograd::get_current_node();
  if (!node || torch::autograd::get_current_graph_task_keep_graph() || !engine::recipe_on(*node)) return;
  if (PyDict_DelItem(engine::metadata_of(*node), engine::recipe_name()) != 0) throw engine::PythonError();
}

/// Return a gradient with memory: of one that a collective still computes, the result.
inline at::Tensor waited(const at::Tensor& grad) {
  const Ref object(THPVariable_Wrap(grad));
  if (THPVariable_CheckExact(object.get())) return grad;
  return engine::tensor_in(engine::rare("waited", {object.get()}).get());
}

/// The autograd function. Its backward has no derivative.
struct Norm : torch::autograd::Function<Norm> {
  // Autograd takes the parameters from the arguments; the kernels read the call's, which last until backward ends.
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const MaybeTensor& residual,
                            const MaybeTensor&, const MaybeTensor&, const c10::intrusive_ptr<NormCall>& call) {
    context->set_materialize_grads(false);
    NormKernels& kernels = *call->kernels;
    auto [out, packed, rstd] = kernels.forward(x, residual.value_or(at::Tensor()), call->weight, call->bias, call->rows,
                                               call->dtype, call->total, call->noise, call->now);
    if (call->result.defined()) out = call->result;
    engine::Recipe& recipe = *engine::made<engine::Recipe>(engine::types().recipe);
    call->recipe = Ref(recipe.self);
    if (!call->now.dropped) {
      // Before they are saved: what is saved may leave the device, and what reads it then lets go.
      recipe.read_stored(packed);
      recipe.read_stored(rstd);
      for (const at::Tensor& each : {call->weight, call->bias}) {
        if (each.defined()) recipe.read_unpacked(each);
      }
      recipe.native = [kernels = call->kernels, weight = call->weight, bias = call->bias, sizes = out.sizes().vec()](
                          at::ScalarType wanted, engine::Tensors given) {
        const engine::WithGil held;
        return kernels->recompute(given[0], given[1], weight, bias, sizes, wanted);
      };
    }
    context->save_for_backward({packed, rstd, call->rows});
    call->rows = call->total = call->result = at::Tensor();
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const engine::WithGil held;
    try {
      const auto capsule = context->saved_data["call"].toCapsule();
      const auto& call = static_cast<const NormCall&>(*capsule);
      withdraw();
      torch::autograd::variable_list found(5);
      if (!grads[0].defined()) return found;
      for (const auto& [seen, sizes] : call.read) seen.check(sizes);
      if (at::GradMode::is_enabled()) engine::rare("refuse_second_derivative", {});
      const auto saved = context->get_saved_variables();
      NormKernels::Wanted wanted;
      size_t edge = 0;
      const auto asked = [&](bool present) { return present && context->needs_input_grad(edge++); };
      if (asked(true)) wanted.x = call.of_x;
      if (asked(call.summed)) wanted.residual = call.of_residual;
      wanted.weight = asked(call.weight.defined());
      wanted.bias = asked(call.bias.defined());
      auto all =
          call.kernels->backward(saved[0], saved[1], call.weight, saved[2], waited(grads[0]), wanted, {}, call.noise);
      std::move(all.begin(), all.end(), found.begin());
      return found;
    } catch (const engine::PythonError&) {
      python_error error;
      error.persist();
      throw error;
    }
  }
};

inline at::Tensor given_tensor(PyObject* object) {
  return object == Py_None ? at::Tensor() : engine::tensor_in(object);
}
inline std::optional<at::ScalarType> given_dtype(PyObject* object) {
  return object == Py_None ? std::nullopt : std::make_optional(engine::dtype_in(object));
}
inline MaybeTensor maybe(const at::Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; }

/// The Python object of the kernels.
struct NormBody {
  PyObject* self = nullptr;
  std::shared_ptr<NormKernels> kernels;
};

/// Norm(plan, shape, eps, keys, copied): see `NormKernels`.
inline int norm_init(PyObject* self, PyObject* arguments, PyObject*) {
  return engine::guarded_status([&] {
    PyObject *plan = nullptr, *shape = nullptr, *copied = nullptr;
    auto kernels = std::make_shared<NormKernels>();
    if (!PyArg_ParseTuple(arguments, "OO!d(LL)O", &plan, &PyTuple_Type, &shape, &kernels->eps, &kernels->keys[0],
                          &kernels->keys[1], &copied)) {
      throw engine::PythonError();
    }
    kernels->plan = Ref::borrowed(plan);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
      kernels->shape.push_back(engine::integer(PyTuple_GET_ITEM(shape, i)));
      kernels->length *= kernels->shape.back();
    }
    kernels->copied = given_dtype(copied);
    engine::body<NormBody>(self).kernels = std::move(kernels);
  });
}

/// apply(x, residual, weight, bias, rows, dtype, total, noise, result, watches_x, watches_bias): return the norm.
///
/// `result` is what another function has computed in place of the kernels. A write to a tensor that is watched raises
/// autograd's error in backward, as torch's own norm saves it; so does a write to the weight, which is read.
inline PyObject* norm_apply(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    PyObject *x = nullptr, *residual = nullptr, *weight = nullptr, *bias = nullptr, *rows = nullptr, *dtype = nullptr;
    PyObject *total = nullptr, *noise = nullptr, *result = nullptr;
    int watches_x = 0, watches_bias = 0;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOpp", &x, &residual, &weight, &bias, &rows, &dtype, &total, &noise,
                          &result, &watches_x, &watches_bias)) {
      throw engine::PythonError();
    }
    const at::Tensor& given = engine::tensor_in(x);
    const at::Tensor added = given_tensor(residual), gain = given_tensor(weight), offset = given_tensor(bias);
    auto call = c10::make_intrusive<NormCall>();
    call->kernels = engine::body<NormBody>(self).kernels;
    call->now = Circumstances::now();
    call->noise = Noise::of(noise);
    call->rows = given_tensor(rows);
    call->total = given_tensor(total);
    call->result = given_tensor(result);
    call->dtype = engine::dtype_in(dtype);
    call->of_x = given.scalar_type();
    call->summed = added.defined();
    if (call->summed) call->of_residual = added.scalar_type();
    const bool copies = PyObject_IsTrue(engine::rare("may_be_freed", {}).get()) != 0;
    const auto lasting = [&](const at::Tensor& parameter) {
      const at::Tensor bare = parameter.defined() ? observer::bare_tensor(parameter) : parameter;
      return bare.defined() && copies ? bare.clone() : bare;
    };
    call->weight = lasting(gain);
    call->bias = lasting(offset);
    const auto watch = [&](PyObject* object, bool wanted) {
      if (!wanted || !call->now.checks || !THPVariable_CheckExact(object)) return;
      const at::Tensor& tensor = engine::tensor_in(object);
      call->read.emplace_back(engine::Version(tensor), tensor.sizes());
    };
    watch(weight, weight != Py_None);
    watch(x, watches_x != 0);
    watch(bias, watches_bias != 0 && bias != Py_None);
    at::Tensor out;
    {
      // So that what is saved has a reader, in the table's namespace for operators of this package.
      RECORD_FUNCTION("pyactcomp::norm", c10::ArrayRef<const c10::IValue>());
      out = Norm::apply(given, maybe(added), maybe(gain), maybe(offset), call);
    }
    const Ref recipe = std::exchange(call->recipe, Ref());
    if (const auto node = out.grad_fn()) {
      engine::body<engine::Recipe>(recipe.get()).describe(out);
      engine::offer(*node, recipe);
    }
    return THPVariable_Wrap(out);
  });
}

/// forward(x, residual, weight, bias, rows, dtype, total, noise): return the norm, codes and reciprocal deviations.
inline PyObject* norm_forward(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    PyObject *x = nullptr, *residual = nullptr, *weight = nullptr, *bias = nullptr, *rows = nullptr, *dtype = nullptr;
    PyObject *total = nullptr, *noise = nullptr;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOO", &x, &residual, &weight, &bias, &rows, &dtype, &total, &noise)) {
      throw engine::PythonError();
    }
    const auto saved = engine::body<NormBody>(self).kernels->forward(
        engine::tensor_in(x), given_tensor(residual), given_tensor(weight), given_tensor(bias), given_tensor(rows),
        engine::dtype_in(dtype), given_tensor(total), Noise::of(noise), Circumstances::now());
    return Py_BuildValue("(NNN)", THPVariable_Wrap(saved.out), THPVariable_Wrap(saved.packed),
                         THPVariable_Wrap(saved.rstd));
  });
}

/// recompute(packed, rstd, weight, bias, shape, dtype): return the norm again.
inline PyObject* norm_recompute(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    PyObject *packed = nullptr, *rstd = nullptr, *weight = nullptr, *bias = nullptr, *shape = nullptr, *dtype = nullptr;
    if (!PyArg_ParseTuple(arguments, "OOOOO!O", &packed, &rstd, &weight, &bias, &PyTuple_Type, &shape, &dtype)) {
      throw engine::PythonError();
    }
    c10::SmallVector<std::int64_t, 5> sizes;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
      sizes.push_back(engine::integer(PyTuple_GET_ITEM(shape, i)));
    }
    return THPVariable_Wrap(engine::body<NormBody>(self).kernels->recompute(
        engine::tensor_in(packed), engine::tensor_in(rstd), given_tensor(weight), given_tensor(bias), sizes,
        engine::dtype_in(dtype)));
  });
}

/// backward(packed, rstd, weight, rows, grad, dtypes, needs, beside, noise): return four gradients, None for each that
/// is not wanted: `dtypes` are those of the gradients of x and residual or None, `needs` are of weight and bias.
inline PyObject* norm_backward(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    PyObject *packed = nullptr, *rstd = nullptr, *weight = nullptr, *rows = nullptr, *grad = nullptr, *of_x = nullptr;
    PyObject *of_residual = nullptr, *beside = nullptr, *noise = nullptr;
    int of_weight = 0, of_bias = 0;
    if (!PyArg_ParseTuple(arguments, "OOOOO(OO)(pp)OO", &packed, &rstd, &weight, &rows, &grad, &of_x, &of_residual,
                          &of_weight, &of_bias, &beside, &noise)) {
      throw engine::PythonError();
    }
    const auto grads = engine::body<NormBody>(self).kernels->backward(
        engine::tensor_in(packed), engine::tensor_in(rstd), given_tensor(weight), given_tensor(rows),
        engine::tensor_in(grad), {given_dtype(of_x), given_dtype(of_residual), of_weight != 0, of_bias != 0},
        given_tensor(beside), Noise::of(noise));
    Arguments all(4);
    for (const at::Tensor& each : grads) all.add(each);
    return Py_NewRef(all.get());
  });
}

inline PyMethodDef norm_methods[] = {
    {"apply", norm_apply, METH_VARARGS, "Return the norm, in the graph."},
    {"forward", norm_forward, METH_VARARGS, "Return the norm, codes and reciprocal deviations."},
    {"recompute", norm_recompute, METH_VARARGS, "Return the norm from codes and reciprocal deviations."},
    {"backward", norm_backward, METH_VARARGS, "Return the gradients of x, residual, weight and bias."},
    {nullptr, nullptr, 0, nullptr},
};

/// Add the class to the module.
inline void add_norm(PyObject* module) {
  PyTypeObject* const type = engine::class_of<NormBody>("pyactcomp._observer.Norm",
                                                        "The kernels of a norm of rows, and its autograd function.",
                                                        nullptr, norm_init, norm_methods, nullptr);
  if (PyModule_AddType(module, type) != 0) throw engine::PythonError();
}

}  // namespace pac::functions
