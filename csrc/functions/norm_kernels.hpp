// The launches of the Triton kernels of layer norm and RMS norm.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "functions/fused.hpp"

namespace pac::functions {

/// A dropout drawn by the kernels, as functional/masks/noise.py describes it; no quads mean none.
struct Noise {
  long long seed = 0, counter = 0, threads = 1, below = 0;
  int quads = 0;
  double forward = 1, backward = 1;

  static Noise of(PyObject* object) {
    Noise noise;
    if (object == Py_None) return noise;
    if (!PyArg_ParseTuple(object, "LLLiL(dd)", &noise.seed, &noise.counter, &noise.threads, &noise.quads, &noise.below,
                          &noise.forward, &noise.backward)) {
      throw engine::PythonError();
    }
    return noise;
  }
};

/// The kernels of a norm of rows of one length. With the GIL.
class NormKernels : public Kernels {
 public:
  std::vector<std::int64_t> shape;
  std::int64_t length = 1;
  double eps = 0;
  std::array<long long, 2> keys{};       ///< of stochastic rounding
  std::optional<at::ScalarType> copied;  ///< of rows that are saved as they are, in place of codes
  bool centred = false;                  ///< a layer norm; else rows are divided by their root mean square
  bool fits = false;                     ///< whether the kernels serve rows of this length

  /// Return whether the kernels serve rows that need a gradient, of a tensor of torch's own class.
  bool serves_rows(const at::Tensor& x) {
    // A row may not straddle a multiple of 2**32, where the high half of an element's index changes.
    constexpr std::int64_t kMost = std::int64_t{1} << 32;
    if (!fits || !x.requires_grad() || x.numel() > kMost || !(centred || x.is_contiguous())) return false;
    const auto dims = static_cast<std::int64_t>(shape.size());
    return x.dim() >= dims && x.sizes().slice(static_cast<size_t>(x.dim() - dims)) == at::IntArrayRef(shape) &&
           serves(x);
  }

  /// Return whether torch's norm of x takes a parameter as it is.
  bool fit(const at::Tensor& x, const at::Tensor& parameter) const {
    if (!parameter.defined()) return true;
    const at::ScalarType dtype = x.scalar_type();
    // Outside autocast, CUDA's layer norm refuses mixed dtypes.
    const bool mixed =
        centred && x.element_size() == 2 && (!x.is_cuda() || at::autocast::is_autocast_enabled(at::kCUDA));
    return parameter.sizes() == at::IntArrayRef(shape) && parameter.device() == x.device() &&
           (parameter.scalar_type() == dtype || (mixed && parameter.scalar_type() == at::kFloat));
  }

  struct Saved {
    at::Tensor out, packed, rstd;
  };

  /// Return normalised rows, their codes and reciprocal deviations: of x, x + residual, or x in the order of `rows`.
  /// `total`, if defined, is saved in place of codes: x itself, or memory for the sum.
  Saved forward(const at::Tensor& given, const at::Tensor& residual, const at::Tensor& weight, const at::Tensor& bias,
                const at::Tensor& rows, at::ScalarType dtype, const at::Tensor& total, const Noise& noise,
                const Circumstances& now) {
    // As torch's operator copies the rows of a permuted image, or of a sequence that convolutions made.
    const at::Tensor x = given.contiguous();
    const bool as_it_is = total.defined() && !residual.defined();  // nothing is written
    const Plan& how = plan_of("norm_forward_kernel", x,
                              {residual.defined(), weight.defined(), bias.defined(), rows.defined(), noise.quads},
                              as_it_is || (now.dropped && !total.defined()));
    Saved saved;
    saved.out = empty(x.sizes(), dtype, x);
    saved.packed =
        total.defined() ? observer::bare_tensor(total).view(-1).view(at::kByte) : empty({how.nbytes}, at::kByte, x);
    saved.rstd = empty({x.numel() / length}, at::kFloat, x);
    if (now.recorded) mark_as_packed(saved.packed, total.defined() ? total : given);
    Arguments tensors(8), scalars(9);
    tensors.add(x).add(or_else(residual, x)).add(or_else(weight, x)).add(or_else(bias, x)).add(or_else(rows, x));
    tensors.add(saved.out).add(elements(saved.packed)).add(saved.rstd);
    scalars.add(how.stored).add(eps).add(keys[0]).add(keys[1]);
    scalars.add(noise.seed).add(noise.counter).add(noise.threads).add(noise.below).add(noise.forward);
    launch(how, tensors, scalars);
    return saved;
  }

  /// Recompute the output from what `forward` saved.
  at::Tensor recompute(const at::Tensor& packed, const at::Tensor& rstd, const at::Tensor& weight,
                       const at::Tensor& bias, at::IntArrayRef sizes, at::ScalarType dtype) {
    const at::Tensor out = empty(sizes, dtype, packed);
    const Plan& how = plan_of("norm_recompute_kernel", out, {weight.defined(), bias.defined()}, false);
    Arguments tensors(5), scalars(1);
    tensors.add(elements(packed)).add(rstd).add(or_else(weight, rstd)).add(or_else(bias, rstd)).add(out);
    launch(how, tensors, scalars.add(how.stored));
    return out;
  }

  /// What a backward is asked for.
  struct Wanted {
    std::optional<at::ScalarType> x, residual;  ///< dtypes of gradients
    bool weight = false, bias = false;
  };

  /// Return the gradients of x, residual, weight and bias that are wanted. `beside` is added to the first two.
  std::array<at::Tensor, 4> backward(const at::Tensor& packed, const at::Tensor& rstd, const at::Tensor& weight,
                                     const at::Tensor& rows, const at::Tensor& incoming, const Wanted& wanted,
                                     const at::Tensor& beside, const Noise& drawn) {
    const at::Tensor grad = incoming.contiguous();
    const Noise noise = wanted.x ? drawn : Noise();
    at::Tensor of_x, of_residual, sums;
    if (wanted.x) of_x = empty(grad.sizes(), *wanted.x, grad);
    // x and residual share a gradient if they have one dtype and x has no dropout.
    const bool shared = wanted.x == wanted.residual && noise.quads == 0;
    if (wanted.residual) of_residual = shared ? of_x : empty(grad.sizes(), *wanted.residual, grad);
    const at::Tensor first = of_x.defined() ? of_x : of_residual;
    const bool twice = of_residual.defined() && !of_residual.is_same(first);
    const Plan& how = plan_of("norm_backward_kernel", grad,
                              {weight.defined(), first.defined(), wanted.weight, wanted.bias, twice, rows.defined(),
                               beside.defined(), noise.quads},
                              false);
    // Sums of the weight are first, sums of the bias last; rstd stands in if neither is wanted.
    const std::int64_t count = int{wanted.weight} + int{wanted.bias};
    if (count != 0) sums = empty({count, how.programs(), length}, at::kFloat, grad);
    const auto part = [&](std::int64_t index) { return count != 0 ? sums.select(0, index) : rstd; };
    const at::Tensor to = or_else(first, grad);
    Arguments tensors(10), scalars(6);
    tensors.add(elements(packed)).add(rstd).add(or_else(weight, rstd)).add(grad).add(or_else(beside, grad));
    tensors.add(or_else(rows, rstd)).add(to).add(twice ? of_residual : to);
    tensors.add(part(0)).add(part(count - 1));
    scalars.add(how.stored).add(noise.seed).add(noise.counter).add(noise.threads).add(noise.below).add(noise.backward);
    launch(how, tensors, scalars);
    std::array<at::Tensor, 4> grads{of_x, of_residual, {}, {}};
    if (count != 0) {
      const at::Tensor found = sums.sum(1);
      if (wanted.weight) grads[2] = found.select(0, 0).view(shape);
      if (wanted.bias) grads[3] = found.select(0, count - 1).view(shape);
    }
    return grads;
  }

 private:
  at::Tensor elements(const at::Tensor& packed) const { return copied ? packed.view(*copied) : packed; }
};

}  // namespace pac::functions
