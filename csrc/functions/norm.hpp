// Layer norm and RMS norm as one autograd function that stores codes.
//
// A function of Python takes 100 us of the host for a norm, which is what a step waits for where kernels are short.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <utility>

#include "functions/norm_kernels.hpp"

namespace pac::functions {

/// One call of a norm.
struct NormCall : FusedCall {
  std::shared_ptr<NormKernels> kernels;
  at::Tensor rows, total, result, weight, bias;  ///< the parameters as they stay valid until backward ends
  at::ScalarType dtype = at::kFloat, of_x = at::kFloat, of_residual = at::kFloat;
  bool summed = false;  ///< whether there is a residual
  Noise noise;
};

/// The autograd function. Its backward has no derivative.
struct Norm : torch::autograd::Function<Norm> {
  // Autograd takes the parameters from the arguments; the kernels read the call's, which last until backward ends.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const MaybeTensor& residual,
                            const MaybeTensor&, const MaybeTensor&, const c10::intrusive_ptr<NormCall>& call) {
    context->set_materialize_grads(false);
    NormKernels& kernels = *call->kernels;
    auto [out, packed, rstd] = kernels.forward(x, residual.value_or(at::Tensor()), call->weight, call->bias, call->rows,
                                               call->dtype, call->total, call->noise, call->now);
    if (call->result.defined()) out = call->result;
    if (engine::Recipe* const recipe = call->begin_recipe()) {
      recipe->read_stored(packed);
      recipe->read_stored(rstd);
      for (const at::Tensor& each : {call->weight, call->bias}) {
        if (each.defined()) recipe->read_unpacked(each);
      }
      recipe->native = [kernels = call->kernels, weight = call->weight, bias = call->bias, sizes = out.sizes().vec()](
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

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return once_differentiable<NormCall>(
        context, grads, 5, [&](const NormCall& call, const at::Tensor& grad, variable_list& found) {
          const auto saved = context->get_saved_variables();
          NormKernels::Wanted wanted;
          size_t edge = 0;
          const auto needs = [&](bool present) { return present && context->needs_input_grad(edge++); };
          if (needs(true)) wanted.x = call.of_x;
          if (needs(call.summed)) wanted.residual = call.of_residual;
          wanted.weight = needs(call.weight.defined());
          wanted.bias = needs(call.bias.defined());
          auto all = call.kernels->backward(saved[0], saved[1], call.weight, saved[2], grad, wanted, {}, call.noise);
          std::move(all.begin(), all.end(), found.begin());
        });
  }
};

using NormBody = KernelsBody<NormKernels>;

/// Norm(planner, runs_on, shape, centred, eps, keys, copied, fits): see `NormKernels`.
inline int norm_init(PyObject* self, PyObject* arguments, PyObject*) {
  return engine::guarded_status([&] {
    PyObject *planner = nullptr, *runs_on = nullptr, *shape = nullptr, *copied = nullptr;
    int centred = 0, fits = 0;
    auto kernels = std::make_shared<NormKernels>();
    if (!PyArg_ParseTuple(arguments, "OOO!pd(LL)Op", &planner, &runs_on, &PyTuple_Type, &shape, &centred, &kernels->eps,
                          &kernels->keys[0], &kernels->keys[1], &copied, &fits)) {
      throw engine::PythonError();
    }
    kernels->planner = Ref::borrowed(planner);
    kernels->runs_on = Ref::borrowed(runs_on);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
      kernels->shape.push_back(engine::integer(PyTuple_GET_ITEM(shape, i)));
      kernels->length *= kernels->shape.back();
    }
    kernels->centred = centred != 0;
    kernels->copied = given_dtype(copied);
    kernels->fits = fits != 0;
    engine::body<NormBody>(self).kernels = std::move(kernels);
  });
}

/// The tensors that a norm reads.
struct NormOperands {
  at::Tensor x, residual, weight, bias;
};

/// Return the norm, recorded by autograd. A later write to x or to the bias, if watched, raises autograd's error in
/// backward, as torch's own norm saves them. So does a write to the weight, except in an RMS norm whose input needs no
/// gradient: there torch does not save the weight.
inline PyObject* applied(const c10::intrusive_ptr<NormCall>& call, const NormOperands& of, bool watches_x,
                         bool watches_bias) {
  call->of_x = of.x.scalar_type();
  call->summed = of.residual.defined();
  if (call->summed) call->of_residual = of.residual.scalar_type();
  call->weight = lasting(of.weight);
  call->bias = lasting(of.bias);
  if (call->kernels->centred || of.x.requires_grad() || call->summed) call->watch(of.weight);
  if (watches_x) call->watch(of.x);
  if (watches_bias) call->watch(of.bias);
  at::Tensor out;
  {
    // So that what is saved has a reader, in the table's namespace for operators of this package.
    RECORD_FUNCTION("pyactcomp::norm", c10::ArrayRef<const c10::IValue>());
    out = Norm::apply(of.x, maybe(of.residual), maybe(of.weight), maybe(of.bias), call);
  }
  call->offer_recipe(out);
  return THPVariable_Wrap(out);
}

/// apply(x, residual, weight, bias, rows, dtype, total, noise, result, watches_x, watches_bias): return the norm.
///
/// `result` is what another function has computed in place of the kernels.
inline PyObject* norm_apply(PyObject* self, PyObject* arguments) {
  return engine::guarded([&] {
    PyObject *x = nullptr, *residual = nullptr, *weight = nullptr, *bias = nullptr, *rows = nullptr, *dtype = nullptr;
    PyObject *total = nullptr, *noise = nullptr, *result = nullptr;
    int watches_x = 0, watches_bias = 0;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOpp", &x, &residual, &weight, &bias, &rows, &dtype, &total, &noise,
                          &result, &watches_x, &watches_bias)) {
      throw engine::PythonError();
    }
    const auto call = c10::make_intrusive<NormCall>();
    call->kernels = engine::body<NormBody>(self).kernels;
    call->noise = Noise::of(noise);
    call->rows = given_tensor(rows);
    call->total = given_tensor(total);
    call->result = given_tensor(result);
    call->dtype = engine::dtype_in(dtype);
    const NormOperands of{engine::tensor_in(x), given_tensor(residual), given_tensor(weight), given_tensor(bias)};
    return applied(call, of, watches_x != 0, watches_bias != 0);
  });
}

/// apply_where_served(x, weight, bias, dtype): as `apply`, of a tensor that `ordinary_codes` let through; None where
/// the kernels serve it not, or more is to be asked. `dtype` is the result's, or None for that of torch's function.
inline PyObject* norm_apply_where_served(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return engine::guarded([&] {
    if (count != 4) {
      PyErr_Format(PyExc_TypeError, "apply_where_served expects 4 arguments, got %zd", count);
      throw engine::PythonError();
    }
    const auto plain = [](PyObject* object) { return object == Py_None || THPVariable_CheckExact(object); };
    if (!plain(arguments[1]) || !plain(arguments[2])) return Py_NewRef(Py_None);
    const NormOperands of{engine::tensor_in(arguments[0]), {}, given_tensor(arguments[1]), given_tensor(arguments[2])};
    NormKernels& kernels = *engine::body<NormBody>(self).kernels;
    if (!kernels.serves_rows(of.x) || !kernels.fit(of.x, of.weight) || !kernels.fit(of.x, of.bias)) {
      return Py_NewRef(Py_None);
    }
    const auto call = c10::make_intrusive<NormCall>();
    call->kernels = engine::body<NormBody>(self).kernels;
    const bool autocast = at::autocast::is_autocast_enabled(of.x.device().type());
    if (autocast && !kernels.centred) return Py_NewRef(Py_None);
    const bool casts = autocast && of.x.is_cuda();
    const auto given = given_dtype(arguments[3]);
    call->dtype = given ? *given : casts ? at::kFloat : of.x.scalar_type();
    if (call->dtype == at::kDouble) return Py_NewRef(Py_None);
    // Nobody writes to what autocast makes, and torch's chain of operators for an RMS norm saves a float32 cast of x.
    const auto reads = [&](const at::Tensor& each) {
      return each.defined() && (each.scalar_type() == at::kFloat || (kernels.centred && !casts));
    };
    return applied(call, of, reads(of.x), reads(of.bias));
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
    {"apply_where_served", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(norm_apply_where_served)),
     METH_FASTCALL, "Return the norm, or None where the kernels do not serve it."},
    {"forward", norm_forward, METH_VARARGS, "Return the norm, codes and reciprocal deviations."},
    {"recompute", norm_recompute, METH_VARARGS, "Return the norm from codes and reciprocal deviations."},
    {"backward", norm_backward, METH_VARARGS, "Return the gradients of x, residual, weight and bias."},
    {nullptr, nullptr, 0, nullptr},
};

inline void add_norm(PyObject* module) {
  add_kernels<NormBody>(module, "pyactcomp._observer.Norm", "The kernels of a norm of rows, and its autograd function.",
                        norm_init, norm_methods);
}

}  // namespace pac::functions
