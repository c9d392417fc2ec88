// The launches of the Triton kernels of layer norm and RMS norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/hooks.hpp"
#include "functions/calls.hpp"

namespace pac::functions {

using engine::checked, engine::Ref;

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

/// A tuple of what a kernel is given.
class Arguments {
 public:
  explicit Arguments(Py_ssize_t size) : tuple_(checked(PyTuple_New(size))) {}
  Arguments& add(const at::Tensor& tensor) { return add_object(THPVariable_Wrap(tensor)); }
  Arguments& add(long long number) { return add_object(PyLong_FromLongLong(number)); }
  Arguments& add(double number) { return add_object(PyFloat_FromDouble(number)); }
  PyObject* get() const { return tuple_.get(); }

 private:
  Ref tuple_;
  Py_ssize_t next_ = 0;
  Arguments& add_object(PyObject* object) {
    if (!object) throw engine::PythonError();
    PyTuple_SET_ITEM(tuple_.get(), next_++, object);
    return *this;
  }
};

/// The kernels of a norm of rows of one length. With the GIL.
class NormKernels {
 public:
  Ref plan;  ///< maps a kernel, elements, flags, whether codes are dropped and a device to (launch, programs, ...)
  std::vector<std::int64_t> shape;
  std::int64_t length = 1;
  double eps = 0;
  std::array<long long, 2> keys{};       ///< of stochastic rounding
  std::optional<at::ScalarType> copied;  ///< of rows that are saved as they are, in place of codes

  NormKernels() = default;
  NormKernels(const NormKernels&) = delete;
  NormKernels& operator=(const NormKernels&) = delete;
  ~NormKernels() {
    const engine::WithGil held;  // the last may be a node that is freed by a thread of autograd's
    plans_.clear();
    plan = Ref();
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
    if (now.recorded) {
      const Ref codes(THPVariable_Wrap(saved.packed)), source(THPVariable_Wrap(total.defined() ? total : given));
      engine::rare("mark_as_packed", {codes.get(), source.get()});
    }
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
    if (count != 0) sums = empty({count, how.programs, length}, at::kFloat, grad);
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
  struct Plan {
    Ref launch;
    long long programs = 0, stored = 0, nbytes = 0;  ///< elements and bytes of codes, rows padded
  };
  struct Key {
    const char* kernel;
    std::int64_t numel;
    unsigned flags;
    bool drops;
    int device;
    bool operator<(const Key& other) const {
      return std::tie(kernel, numel, flags, drops, device) <
             std::tie(other.kernel, other.numel, other.flags, other.drops, other.device);
    }
  };
  std::map<Key, Plan> plans_;

  const Plan& plan_of(const char* kernel, const at::Tensor& of, std::initializer_list<int> flags, bool drops) {
    constexpr size_t kMost = 256;  // sizes may differ from step to step
    unsigned all = 0;
    for (const int flag : flags) all = all * 4 + static_cast<unsigned>(flag);
    const Key key{kernel, of.numel(), all, drops, of.is_cuda() ? of.get_device() : -1};
    const auto known = plans_.find(key);
    if (known != plans_.end()) return known->second;
    if (plans_.size() >= kMost) plans_.clear();
    Arguments given(static_cast<Py_ssize_t>(flags.size()));
    for (const int flag : flags) given.add(static_cast<long long>(flag));
    const Ref device = checked(THPDevice_New(of.device()));
    const Ref made = checked(PyObject_CallFunction(plan.get(), "sLOOO", kernel, static_cast<long long>(of.numel()),
                                                   given.get(), drops ? Py_True : Py_False, device.get()));
    PyObject* start = nullptr;
    Plan found;
    if (!PyArg_ParseTuple(made.get(), "OLLL", &start, &found.programs, &found.stored, &found.nbytes)) {
      throw engine::PythonError();
    }
    found.launch = Ref::borrowed(start);
    return plans_.emplace(key, std::move(found)).first->second;
  }

  static void launch(const Plan& how, const Arguments& tensors, const Arguments& scalars) {
    const Ref programs = checked(PyLong_FromLongLong(how.programs));
    PyObject* const all[] = {programs.get(), tensors.get(), scalars.get()};
    checked(PyObject_Vectorcall(how.launch.get(), all, 3, nullptr));
  }

  static at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& beside) {
    const engine::Layout layout = engine::Layout::contiguous(sizes);
    return observer::empty(layout.sizes, layout.strides, dtype, beside);
  }

  /// Return a contiguous tensor for a kernel, or what stands in for none and is not read.
  static at::Tensor or_else(const at::Tensor& tensor, const at::Tensor& stand_in) {
    return tensor.defined() ? tensor.contiguous() : stand_in;
  }

  at::Tensor elements(const at::Tensor& packed) const { return copied ? packed.view(*copied) : packed; }
};

}  // namespace pac::functions
