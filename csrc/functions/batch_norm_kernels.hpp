// The launches of the Triton kernels of batch norm over channels-last images.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>

#include <array>
#include <cstdint>
#include <utility>

#include "functions/fused.hpp"

namespace pac::functions {

/// The kernels of a batch norm of images with some number of channels and elements of some size. With the GIL.
class BatchNormKernels : public Kernels {
 public:
  long long channels = 0, element_size = 0;
  long long width = 1;              ///< groups of channels
  long long blocks = 1;             ///< blocks of channels, of which a program takes one
  long long rows = 1;               ///< rows of a tile
  std::array<long long, 4> keys{};  ///< of stochastic rounding: two for codes of inputs, two for codes of sums
  bool stochastic = false;
  Ref restore;  ///< maps codes of a sum, its layout and a dtype to a tensor

  ~BatchNormKernels() {
    const engine::WithGil held;
    restore = Ref();
  }

  /// What a norm is of.
  struct Operands {
    at::Tensor x, residual, weight, bias, running_mean, running_var;
    double momentum = 0, eps = 0;
    bool relu = false;
  };

  /// Return whether the kernels serve a norm of tensors of torch's own class, where no operator is transformed.
  bool serve(const Operands& of) {
    const at::Tensor& x = of.x;
    // A tile may not straddle a multiple of 2**32, where the high half of an element's index changes.
    constexpr std::int64_t kMost = std::int64_t{1} << 32;
    if (x.dim() != 4 || x.size(1) != channels || x.element_size() != element_size) return false;
    if ((stochastic && x.numel() > kMost) || !is_channels_last(x) || !serves(x)) return false;
    if (const at::Tensor& residual = of.residual; residual.defined()) {
      const bool alike = residual.scalar_type() == x.scalar_type() && residual.device() == x.device();
      if (!alike || residual.sizes() != x.sizes() || !is_channels_last(residual)) return false;
    }
    for (const at::Tensor& each : {of.weight, of.bias, of.running_mean, of.running_var}) {
      if (each.defined() && !fits(x, each)) return false;
    }
    // The running statistics are updated in place.
    return of.running_mean.defined() == of.running_var.defined() &&
           (!of.running_mean.defined() || (of.running_mean.is_contiguous() && of.running_var.is_contiguous()));
  }

  struct Saved {
    at::Tensor out, packed, rstd;
    at::Tensor signs;       ///< under ReLU: one bit per element of each tile, in 16-bit words
    at::Tensor packed_out;  ///< of a sum
  };

  /// Return the normalised images, and what is saved of them; update the running statistics.
  Saved forward(const Operands& of, const Circumstances& now) {
    const at::Tensor& x = of.x;
    const auto [mean, rstd] = statistics(of);
    const bool summed = of.residual.defined();
    const Plan& how =
        plan_of("batch_norm_apply_kernel", x, {of.weight.defined(), of.bias.defined(), summed, of.relu}, false);
    Saved saved;
    saved.rstd = rstd;
    saved.out = empty(engine::Layout::of(x), x.scalar_type(), x);
    saved.packed = empty({how.nbytes}, at::kByte, x);
    if (of.relu) saved.signs = empty({(x.numel() / channels + rows - 1) / rows * rows * channels / 16}, at::kShort, x);
    if (summed) saved.packed_out = empty({how.nbytes}, at::kByte, x);
    if (now.recorded) {
      mark_as_packed(saved.packed, x);
      if (summed) mark_as_packed(saved.packed_out, saved.out);
    }
    Arguments tensors(10), scalars(6);
    tensors.add(x).add(summed ? of.residual : x).add(mean).add(rstd);
    tensors.add(or_else(of.weight, mean)).add(or_else(of.bias, mean)).add(saved.out);
    tensors.add(or_else(saved.signs, mean)).add(saved.packed).add(or_else(saved.packed_out, mean));
    scalars.add(how.stored).add(width);
    for (const long long key : keys) scalars.add(key);
    launch(how, tensors, scalars);
    return saved;
  }

  /// Recompute the output of a norm without a residual.
  at::Tensor recompute(const at::Tensor& packed, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& signs, const engine::Layout& layout, at::ScalarType dtype) {
    const at::Tensor out = empty(layout, dtype, packed);
    const Plan& how =
        plan_of("batch_norm_recompute_kernel", out, {weight.defined(), bias.defined(), signs.defined()}, false);
    Arguments tensors(5), scalars(2);
    tensors.add(packed).add(or_else(weight, out)).add(or_else(bias, out)).add(out).add(or_else(signs, out));
    launch(how, tensors, scalars.add(how.stored).add(width));
    return out;
  }

  /// Restore the output of a norm with a residual from the codes of the sum.
  at::Tensor restored(const at::Tensor& packed_out, const engine::Layout& layout, at::ScalarType dtype) const {
    const Ref codes(THPVariable_Wrap(packed_out)), lies(engine::layout_object(layout));
    const Ref wanted(engine::dtype_object(dtype));
    PyObject* const all[] = {codes.get(), lies.get(), wanted.get()};
    return engine::tensor_in(checked(PyObject_Vectorcall(restore.get(), all, 3, nullptr)).get());
  }

  struct Gradients {
    at::Tensor x, weight, bias, residual;
  };

  /// Return the gradients of the input, weight and bias and, if `masked`, under ReLU that of the residual.
  Gradients backward(const at::Tensor& packed, const at::Tensor& rstd, const at::Tensor& weight,
                     const at::Tensor& signs, const at::Tensor& incoming, const engine::Layout& layout,
                     at::ScalarType dtype, bool masked) {
    const at::Tensor grad = incoming.contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor words = or_else(signs, rstd);
    const Plan& how_sums = plan_of("batch_norm_sums_kernel", grad, {signs.defined()}, false);
    const at::Tensor parts = partial(how_sums, grad);
    Arguments read(5), sizes(2);
    read.add(packed).add(grad).add(words).add(parts.select(0, 0)).add(parts.select(0, 1));
    launch(how_sums, read, sizes.add(how_sums.stored).add(width));
    const at::Tensor sums = parts.sum(1);
    Gradients found;
    found.x = empty(layout, dtype, grad);
    found.bias = sums.select(0, 0);
    found.weight = sums.select(0, 1);
    if (masked) found.residual = empty(layout, dtype, grad);
    const Plan& how = plan_of("batch_norm_backward_kernel", grad, {weight.defined(), masked, signs.defined()}, false);
    Arguments tensors(9), scalars(2);
    tensors.add(packed).add(grad).add(words).add(rstd).add(or_else(weight, rstd)).add(found.bias).add(found.weight);
    tensors.add(found.x).add(masked ? found.residual : found.x);
    launch(how, tensors, scalars.add(how.stored).add(width));
    return found;
  }

 private:
  static bool is_channels_last(const at::Tensor& x) {
    // A single pixel is also contiguous.
    const std::int64_t depth = x.size(1), pixels = x.size(2) * x.size(3);
    const std::array<std::int64_t, 4> strides{pixels * depth, 1, x.size(3) * depth, depth};
    return pixels > 1 && x.strides() == at::IntArrayRef(strides);
  }

  /// Return whether torch's norm of x takes a parameter, or a running statistic, as it is.
  bool fits(const at::Tensor& x, const at::Tensor& parameter) const {
    const bool mixed = x.element_size() == 2 && parameter.scalar_type() == at::kFloat;
    return parameter.dim() == 1 && parameter.size(0) == channels && parameter.device() == x.device() &&
           (mixed || parameter.scalar_type() == x.scalar_type());
  }

  /// Return memory for two partial results of each program and channel.
  at::Tensor partial(const Plan& how, const at::Tensor& beside) const {
    return empty({2, how.programs() / blocks, channels}, at::kFloat, beside);
  }

  /// Return the mean and the reciprocal deviation of each channel.
  std::pair<at::Tensor, at::Tensor> statistics(const Operands& of) {
    const Plan& how = plan_of("batch_norm_statistics_kernel", of.x, {}, false);
    const long long splits = how.programs() / blocks;
    const at::Tensor parts = partial(how, of.x);
    const at::Tensor first = parts.select(0, 0), second = parts.select(0, 1);
    Arguments read(3), sizes(2);
    read.add(of.x).add(first).add(second);
    launch(how, read, sizes.add(how.stored).add(width));
    const at::Tensor made = empty({2, channels}, at::kFloat, of.x);
    const at::Tensor mean = made.select(0, 0), rstd = made.select(0, 1);
    const Plan& finish = plan_of("batch_norm_finish_kernel", of.x, {of.running_mean.defined()}, false);
    Arguments tensors(6), scalars(5);
    tensors.add(first).add(second).add(or_else(of.running_mean, mean)).add(or_else(of.running_var, mean));
    tensors.add(mean).add(rstd);
    scalars.add(finish.stored).add(width).add(splits).add(of.momentum).add(of.eps);
    launch(finish, tensors, scalars);
    return {mean, rstd};
  }
};

}  // namespace pac::functions
