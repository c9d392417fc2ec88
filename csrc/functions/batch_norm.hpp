// Batch norm, a residual block's addition and ReLU as one autograd function that stores codes.
//
// A function of Python takes 660 us of the host for a call, forward and backward.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <utility>

#include "functions/batch_norm_kernels.hpp"

namespace pac::functions {

/// One call of a batch norm.
struct BatchNormCall : FusedCall {
  std::shared_ptr<BatchNormKernels> kernels;
  BatchNormKernels::Operands of;  ///< in forward
  at::Tensor weight, bias;        ///< as they stay valid until backward ends
  engine::Layout layout;          ///< of x
  at::ScalarType dtype = at::kFloat;
  bool summed = false, relu = false;  ///< whether there is a residual, and a ReLU
};

/// The autograd function. Its backward has no derivative.
struct BatchNorm : torch::autograd::Function<BatchNorm> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor&, const MaybeTensor&, const MaybeTensor&,
                            const MaybeTensor&, const c10::intrusive_ptr<BatchNormCall>& call) {
    context->set_materialize_grads(false);
    const auto saved = call->kernels->forward(call->of, call->now);
    call->of = {};
    if (engine::Recipe* const recipe = call->begin_recipe()) describe(*recipe, *call, saved);
    context->save_for_backward({saved.packed, saved.rstd, saved.signs});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return saved.out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return once_differentiable<BatchNormCall>(
        context, grads, 5, [&](const BatchNormCall& call, const at::Tensor& grad, variable_list& found) {
          const auto saved = context->get_saved_variables();
          size_t edge = 0;
          const auto needs = [&](bool present) { return present && context->needs_input_grad(edge++); };
          const bool needs_x = needs(true), needs_weight = needs(call.weight.defined());
          const bool needs_bias = needs(call.bias.defined()), needs_residual = needs(call.summed);
          // Without a ReLU the residual has the incoming gradient.
          auto all = call.kernels->backward(saved[0], saved[1], call.weight, saved[2], grad, call.layout, call.dtype,
                                            needs_residual && call.relu);
          if (needs_x) found[0] = all.x;
          if (needs_weight) found[1] = all.weight.to(call.weight.scalar_type());
          if (needs_bias) found[2] = all.bias.to(call.bias.scalar_type());
          if (needs_residual) found[3] = call.relu ? all.residual : grad.to(call.dtype);
        });
  }

 private:
  /// Describe how backward recomputes the output: of a sum from the sum's codes.
  static void describe(engine::Recipe& recipe, const BatchNormCall& call, const BatchNormKernels::Saved& saved) {
    if (call.summed) {
      recipe.read_stored(saved.packed_out);
      recipe.native = [kernels = call.kernels, layout = call.layout](at::ScalarType wanted, engine::Tensors given) {
        const engine::WithGil held;
        return kernels->restored(given[0], layout, wanted);
      };
      return;
    }
    recipe.read_stored(saved.packed);
    if (call.relu) recipe.read_stored(saved.signs);
    for (const at::Tensor& each : {call.weight, call.bias}) {
      if (each.defined()) recipe.read_unpacked(each);
    }
    recipe.native = [kernels = call.kernels, weight = call.weight, bias = call.bias, layout = call.layout](
                        at::ScalarType wanted, engine::Tensors given) {
      const engine::WithGil held;
      return kernels->recompute(given[0], weight, bias, given.size() > 1 ? given[1] : at::Tensor(), layout, wanted);
    };
  }
};

using BatchNormBody = KernelsBody<BatchNormKernels>;

/// BatchNorm(planner, runs_on, restore, channels, element_size, (width, blocks, rows), keys, stochastic): see
/// `BatchNormKernels`.
inline int batch_norm_init(PyObject* self, PyObject* arguments, PyObject*) {
  return engine::guarded_status([&] {
    PyObject *planner = nullptr, *runs_on = nullptr, *restore = nullptr;
    int stochastic = 0;
    auto kernels = std::make_shared<BatchNormKernels>();
    auto& keys = kernels->keys;
    if (!PyArg_ParseTuple(arguments, "OOOLL(LLL)(LLLL)p", &planner, &runs_on, &restore, &kernels->channels,
                          &kernels->element_size, &kernels->width, &kernels->blocks, &kernels->rows, &keys[0], &keys[1],
                          &keys[2], &keys[3], &stochastic)) {
      throw engine::PythonError();
    }
    kernels->planner = Ref::borrowed(planner);
    kernels->runs_on = Ref::borrowed(runs_on);
    kernels->restore = Ref::borrowed(restore);
    kernels->stochastic = stochastic != 0;
    engine::body<BatchNormBody>(self).kernels = std::move(kernels);
  });
}

/// Return the operands of a call, or none where one is no tensor of torch's own class.
inline std::optional<BatchNormKernels::Operands> batch_norm_operands(PyObject* arguments) {
  std::array<PyObject*, 6> objects{};
  BatchNormKernels::Operands of;
  int relu = 0;
  if (!PyArg_ParseTuple(arguments, "OOOOOOddp", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4],
                        &objects[5], &of.momentum, &of.eps, &relu)) {
    throw engine::PythonError();
  }
  for (PyObject* const object : objects) {
    if (object != Py_None && !THPVariable_CheckExact(object)) return std::nullopt;
  }
  of.x = engine::tensor_in(objects[0]);
  of.residual = given_tensor(objects[1]);
  of.weight = given_tensor(objects[2]);
  of.bias = given_tensor(objects[3]);
  of.running_mean = given_tensor(objects[4]);
  of.running_var = given_tensor(objects[5]);
  of.relu = relu != 0;
  return of;
}

/// serves(x, residual, weight, bias, running_mean, running_var, momentum, eps, relu): return whether kernels serve.
inline PyObject* batch_norm_serves(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    const auto of = batch_norm_operands(arguments);
    return engine::truth(of && engine::body<BatchNormBody>(self).kernels->serve(*of));
  });
}

/// apply_where_served(x, residual, weight, bias, running_mean, running_var, momentum, eps, relu): return the norm, in
/// the graph; None where the kernels serve it not.
inline PyObject* batch_norm_apply_where_served(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    const auto& kernels = engine::body<BatchNormBody>(self).kernels;
    auto of = batch_norm_operands(arguments);
    if (!of || !kernels->serve(*of)) return Py_NewRef(Py_None);
    const auto call = c10::make_intrusive<BatchNormCall>();
    call->kernels = kernels;
    call->weight = lasting(of->weight);
    call->bias = lasting(of->bias);
    call->layout = engine::Layout::of(of->x);
    call->dtype = of->x.scalar_type();
    call->summed = of->residual.defined();
    call->relu = of->relu;
    call->watch(of->x);
    call->watch(of->weight);
    const at::Tensor x = of->x, residual = of->residual, weight = of->weight, bias = of->bias;
    call->of = std::move(*of);
    at::Tensor out;
    {
      // So that what is saved has a reader, in the table's namespace for operators of this package.
      RECORD_FUNCTION("pyactcomp::batch_norm", c10::ArrayRef<const c10::IValue>());
      out = BatchNorm::apply(x, maybe(weight), maybe(bias), maybe(residual), call);
    }
    if (call->relu) call->watch(out);  // torch's ReLU saves its result
    call->offer_recipe(out);
    return THPVariable_Wrap(out);
  });
}

inline PyMethodDef batch_norm_methods[] = {
    {"serves", batch_norm_serves, METH_VARARGS, "Return whether the kernels serve a norm."},
    {"apply_where_served", batch_norm_apply_where_served, METH_VARARGS,
     "Return the norm, or None where the kernels do not serve it."},
    {nullptr, nullptr, 0, nullptr},
};

inline void add_batch_norm(PyObject* module) {
  add_kernels<BatchNormBody>(module, "pyactcomp._observer.BatchNorm",
                             "The kernels of a batch norm, and its autograd function.", batch_norm_init,
                             batch_norm_methods);
}

}  // namespace pac::functions
