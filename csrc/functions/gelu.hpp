// GELU as an autograd function that stores codes: a function of Python takes 290 us of the host, forward and backward.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <memory>
#include <utility>

#include "functions/fused.hpp"

namespace pac::functions {

/// The kernels of GELU of dense operands: results and gradients have the layout of the operand. With the GIL.
class GeluKernels : public Kernels {
 public:
  std::array<long long, 2> keys{};  ///< of stochastic rounding

  /// Return the result for a dense x, and codes of x.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const Circumstances& now) {
    const Plan& how = plan_of("gelu_forward_kernel", x, {}, now.dropped);
    const at::Tensor out = empty(engine::Layout::of(x), x.scalar_type(), x);
    const at::Tensor packed = empty({how.nbytes}, at::kByte, x);
    if (now.recorded) mark_as_packed(packed, x);
    Arguments tensors(3), scalars(3);
    tensors.add(x).add(out).add(packed);
    launch(how, tensors, scalars.add(how.stored).add(keys[0]).add(keys[1]));
    return {out, packed};
  }

  /// Return the gradient.
  at::Tensor backward(const at::Tensor& packed, const engine::Layout& layout, const at::Tensor& grad) {
    const bool same = grad.strides().equals(layout.strides);
    const at::Tensor given = same ? grad : empty(layout, grad.scalar_type(), grad).copy_(grad);
    const at::Tensor grad_x = empty(layout, grad.scalar_type(), grad);
    Arguments tensors(3);
    launch_over("gelu_backward_kernel", tensors.add(packed).add(given).add(grad_x), grad_x);
    if (same) return grad_x;
    const Ref found(THPVariable_Wrap(grad_x)), incoming(THPVariable_Wrap(grad));
    return engine::tensor_in(engine::rare("arranged_as_torch", {found.get(), incoming.get()}).get());
  }

  /// Recompute the result from codes.
  at::Tensor recompute(const at::Tensor& packed, const engine::Layout& layout, at::ScalarType dtype) {
    const at::Tensor out = empty(layout, dtype, packed);
    Arguments tensors(2);
    launch_over("gelu_recompute_kernel", tensors.add(packed).add(out), out);
    return out;
  }

  /// Return the gradient and the result, for a contiguous gradient.
  std::pair<at::Tensor, at::Tensor> backward_and_recompute(const at::Tensor& packed, const at::Tensor& grad) {
    const at::Tensor grad_x = empty(grad.sizes(), grad.scalar_type(), grad);
    const at::Tensor out = empty(grad.sizes(), grad.scalar_type(), grad);
    Arguments tensors(4);
    launch_over("gelu_backward_recompute_kernel", tensors.add(packed).add(grad).add(grad_x).add(out), out);
    return {grad_x, out};
  }

 private:
  void launch_over(const char* kernel, const Arguments& tensors, const at::Tensor& of) {
    const Plan& how = plan_of(kernel, of, {}, false);
    Arguments scalars(1);
    launch(how, tensors, scalars.add(how.stored));
  }
};

struct GeluCall : FusedCall {
  std::shared_ptr<GeluKernels> kernels;
  engine::Layout layout;
};

/// The autograd function. Its backward has no derivative.
struct Gelu : torch::autograd::Function<Gelu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const c10::intrusive_ptr<GeluCall>& call) {
    context->set_materialize_grads(false);
    const at::Tensor given = engine::is_dense(x) ? x : x.clone();
    call->layout = engine::Layout::of(given);
    const auto [out, packed] = call->kernels->forward(given, call->now);
    if (engine::Recipe* const recipe = call->begin_recipe()) {
      recipe->read_stored(packed);
      recipe->native = [kernels = call->kernels, layout = call->layout](at::ScalarType wanted, engine::Tensors stored) {
        const engine::WithGil held;
        return kernels->recompute(stored[0], layout, wanted);
      };
    }
    context->save_for_backward({packed});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return once_differentiable<GeluCall>(
        context, grads, 2, [&](const GeluCall& call, const at::Tensor& grad, variable_list& found) {
          found[0] = call.kernels->backward(context->get_saved_variables()[0], call.layout, grad);
        });
  }
};

using GeluBody = KernelsBody<GeluKernels>;

/// Gelu(planner, runs_on, keys): see `GeluKernels`.
inline int gelu_init(PyObject* self, PyObject* arguments, PyObject*) {
  return engine::guarded_status([&] {
    PyObject *planner = nullptr, *runs_on = nullptr;
    auto kernels = std::make_shared<GeluKernels>();
    if (!PyArg_ParseTuple(arguments, "OO(LL)", &planner, &runs_on, &kernels->keys[0], &kernels->keys[1])) {
      throw engine::PythonError();
    }
    kernels->planner = Ref::borrowed(planner);
    kernels->runs_on = Ref::borrowed(runs_on);
    engine::body<GeluBody>(self).kernels = std::move(kernels);
  });
}

inline PyObject* applied(const std::shared_ptr<GeluKernels>& kernels, const at::Tensor& x) {
  const auto call = c10::make_intrusive<GeluCall>();
  call->kernels = kernels;
  call->watch(x);
  at::Tensor out;
  {
    // So that what is saved has a reader, in the table's namespace for operators of this package.
    RECORD_FUNCTION("pyactcomp::gelu", c10::ArrayRef<const c10::IValue>());
    out = Gelu::apply(x, call);
  }
  call->offer_recipe(out);
  return THPVariable_Wrap(out);
}

/// apply(x): return GELU, in the graph.
inline PyObject* gelu_apply(PyObject* self, PyObject* x) {
  return engine::guarded([&] { return applied(engine::body<GeluBody>(self).kernels, engine::tensor_in(x)); });
}

/// apply_where_served(x): as `apply`, of a tensor that `ordinary_codes` let through; None where the kernels serve it
/// not.
inline PyObject* gelu_apply_where_served(PyObject* self, PyObject* object) {
  return engine::guarded([&] {
    const auto& kernels = engine::body<GeluBody>(self).kernels;
    const at::Tensor& x = engine::tensor_in(object);
    return kernels->serves(x) ? applied(kernels, x) : Py_NewRef(Py_None);
  });
}

inline PyObject* pair(const std::pair<at::Tensor, at::Tensor>& both) {
  return Py_BuildValue("(NN)", THPVariable_Wrap(both.first), THPVariable_Wrap(both.second));
}

/// forward(x): return GELU of a dense tensor, and codes of the tensor.
inline PyObject* gelu_forward(PyObject* self, PyObject* x) {
  return engine::guarded(
      [&] { return pair(engine::body<GeluBody>(self).kernels->forward(engine::tensor_in(x), Circumstances::now())); });
}

/// backward_and_recompute(packed, grad): return the gradient and GELU, for a contiguous gradient.
inline PyObject* gelu_backward_and_recompute(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    PyObject *packed = nullptr, *grad = nullptr;
    if (!PyArg_ParseTuple(arguments, "OO", &packed, &grad)) throw engine::PythonError();
    return pair(engine::body<GeluBody>(self).kernels->backward_and_recompute(engine::tensor_in(packed),
                                                                             engine::tensor_in(grad)));
  });
}

inline PyMethodDef gelu_methods[] = {
    {"apply", gelu_apply, METH_O, "Return GELU, in the graph."},
    {"apply_where_served", gelu_apply_where_served, METH_O, "Return GELU, or None where the kernels do not serve it."},
    {"forward", gelu_forward, METH_O, "Return GELU and codes."},
    {"backward_and_recompute", gelu_backward_and_recompute, METH_VARARGS, "Return the gradient and GELU from codes."},
    {nullptr, nullptr, 0, nullptr},
};

inline void add_gelu(PyObject* module) {
  add_kernels<GeluBody>(module, "pyactcomp._observer.Gelu", "The kernels of GELU, and its autograd function.",
                        gelu_init, gelu_methods);
}

}  // namespace pac::functions
