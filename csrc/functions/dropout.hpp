// Dropout on the CPU as one autograd function: torch's own multiplies by noise there, and saves the noise as floats.
#pragma once

#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "engine/python.hpp"

namespace pac::functions {

/// Return the factor of a kept element as torch's noise has it, rounded to the dtype.
inline double scale_of_kept(at::ScalarType dtype, double p) {
  if (dtype == at::kDouble) return 1.0 / (1.0 - p);
  const float scale = 1.0f / static_cast<float>(1.0 - p);
  if (dtype == at::kBFloat16) return static_cast<double>(static_cast<float>(c10::BFloat16(scale)));
  return static_cast<double>(dtype == at::kHalf ? static_cast<float>(c10::Half(scale)) : scale);
}

/// Zeroes elements with a probability, scales the others, and saves the mask: the engine stores a bit for an element.
///
/// Drawn as torch's noise is, from the same numbers. The backward is torch's operator, which has a derivative.
struct Dropout : torch::autograd::Function<Dropout> {
  static constexpr bool is_traceable = true;  ///< by compiled autograd: the backward reads what is saved alone

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double p, double scale) {
    context->set_materialize_grads(false);
    const at::Tensor mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1.0 - p);
    context->save_for_backward({mask});
    context->saved_data["scale"] = scale;
    return at::native_dropout_backward(x, mask, scale);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor(), at::Tensor()};
    const auto saved = context->get_saved_variables();
    const double scale = context->saved_data["scale"].toDouble();
    return {at::native_dropout_backward(grads[0], saved[0], scale), at::Tensor(), at::Tensor()};
  }
};

/// dropout(x, p): drop elements of a CPU tensor; None where 1 / (1 - p) is infinite in the dtype.
inline PyObject* dropout(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return engine::guarded([&] {
    if (count != 2) {
      PyErr_Format(PyExc_TypeError, "dropout expects a tensor and a probability, got %zd arguments", count);
      throw engine::PythonError();
    }
    const at::Tensor& x = engine::tensor_in(arguments[0]);
    const double p = PyFloat_AsDouble(arguments[1]);
    if (PyErr_Occurred()) throw engine::PythonError();
    const double scale = scale_of_kept(x.scalar_type(), p);
    if (!std::isfinite(scale)) return Py_NewRef(Py_None);
    at::Tensor out;
    {
      const observer::WithoutGil released;
      // So that what is saved has a reader, in the table's namespace for operators of this package.
      RECORD_FUNCTION("pyactcomp::dropout", c10::ArrayRef<const c10::IValue>());
      out = Dropout::apply(x, p, scale);
    }
    return THPVariable_Wrap(out);
  });
}

}  // namespace pac::functions
