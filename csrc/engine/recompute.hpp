// Which saved tensors backward can recompute from stored operands.
//
// A saved tensor's node names the operator and holds the operator's saved operands. If the tensor is cheap to recompute
// from them, and was provably not written to since, a recipe over the stored forms of the operands is stored instead.
//
// Longer than 400 lines: one look-up, and a builder for each operator.
#pragma once

#include <ATen/ops/add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/types.hpp"
#include "observer/facts.hpp"

namespace pac::engine {

namespace generated = torch::autograd::generated;
using Tensors = at::ArrayRef<at::Tensor>;
using torch::autograd::SavedVariable;

template <class Kind>
const Kind* node_as(const observer::Node& node) {
  return typeid(node) == typeid(Kind) ? static_cast<const Kind*>(&node) : nullptr;
}

/// An operand may itself be recomputed (SwiGLU's product reads SiLU's result), but a longer chain is stored.
constexpr int kDeepest = 2;

/// Return the stored form of a saved tensor; none if no hook of this package packed it.
inline Ref form_of(const SavedVariable& saved) {
  const auto packed = saved.retrieve_unpack_hook_data();
  if (!packed) return {};
  PyObject* const form = packed->second.ptr(getPyInterpreter());
  return form && PyObject_TypeCheck(form, types().stored) ? Ref::borrowed(form) : Ref();
}

/// Return the form that holds the values: what a `Same` or a decided `Pending` refers to.
inline Ref stored_form_of(Ref form) {
  if (!form) return form;
  if (Py_TYPE(form.get()) == types().same) return body<Same>(form.get()).stored;
  if (reinterpret_cast<PyObject*>(Py_TYPE(form.get())) != constant("PENDING")) return form;
  return checked(PyObject_GetAttrString(form.get(), "stored"));
}

/// Return the region or recomputed output that a form is a view of, or the form itself.
inline PyObject* whole_of(PyObject* form) {
  return Py_TYPE(form) == types().view ? body<View>(form).region.get() : form;
}

inline const Recipe* recipe_in(PyObject* form) {
  PyObject* const whole = whole_of(form);
  return Py_TYPE(whole) == types().from_recipe ? &body<Recipe>(body<FromRecipe>(whole).recipe.get()) : nullptr;
}

inline const Region* region_in(PyObject* form) {
  PyObject* const whole = whole_of(form);
  return Py_TYPE(whole) == types().region ? &body<Region>(whole) : nullptr;
}

inline int depth_of(PyObject* form) {
  const Recipe* const recipe = recipe_in(form);
  return recipe ? recipe->depth : 0;
}

/// Return whether a stored form restores the tensor to the bit.
inline bool is_exact_form(PyObject* form) {
  if (const Recipe* const recipe = recipe_in(form)) return recipe->exact;
  const Region* const region = region_in(form);
  return !region || region->form.get() == constants().itself;
}

inline Operand memory_of_leaf(const at::Tensor& tensor) {
  Kept& kept = *made<Kept>(types().kept);
  Operand operand{Ref(kept.self), true};
  kept.hold(tensor);
  return operand;
}

/// Return a saved operand as a recipe may read it, or none.
inline Operand operand_of(const SavedVariable& saved) {
  Ref form = stored_form_of(form_of(saved));
  if (!form) return {};
  const PyTypeObject* const type = Py_TYPE(form.get());
  if (type == types().kept) {
    Kept& kept = body<Kept>(form.get());
    if (!kept.leaf) return {form};
    const at::Tensor leaf = kept.buffer.tensor();
    return kept.unchanged() && kept.memory.is_of(leaf) ? memory_of_leaf(observer::bare_tensor(leaf)) : Operand();
  }
  const bool known = type == types().region || type == types().view || type == types().from_recipe;
  return known && depth_of(form.get()) < kDeepest ? Operand{std::move(form)} : Operand();
}

/// Return the stored form of a statistic, or of an input without a gradient: a leaf, but no parameter.
inline Operand constant_of(const SavedVariable& saved) {
  Ref form = form_of(saved);
  if (!form || Py_TYPE(form.get()) != types().kept) return {};
  const Buffer& buffer = body<Kept>(form.get()).buffer;
  if (buffer.may_be_away()) return {std::move(form)};  // nor is it a parameter
  const at::Tensor tensor = buffer.tensor();
  return tensor.requires_grad() || is_parameter(tensor) ? Operand() : Operand{std::move(form)};
}

/// Return the stored result of an operator that saves its result, while the result has not been written to.
inline Ref stored_result(const observer::Node& node) {
  const SavedVariable* saved = nullptr;
  if (const auto* const softmax = node_as<generated::SoftmaxBackward0>(node)) saved = &softmax->result_;
  if (const auto* const logarithm = node_as<generated::LogSoftmaxBackward0>(node)) saved = &logarithm->result_;
  if (const auto* const relu = node_as<generated::ReluBackward0>(node)) saved = &relu->result_;
  if (const auto* const tanh = node_as<generated::TanhBackward0>(node)) saved = &tanh->result_;
  if (const auto* const sigmoid = node_as<generated::SigmoidBackward0>(node)) saved = &sigmoid->result_;
  Ref form = saved ? form_of(*saved) : Ref();
  if (!form) return {};
  if (Py_TYPE(form.get()) == types().kept) return body<Kept>(form.get()).unchanged() ? form : Ref();
  return Py_TYPE(form.get()) == types().region && !body<Region>(form.get()).seen.moved() ? form : Ref();
}

inline Layout layout_of_result(PyObject* form) {
  return Py_TYPE(form) == types().kept ? body<Kept>(form).layout() : body<Region>(form).layout;
}

inline Ref recipe_for(const at::Tensor& out, Compute compute, const std::vector<Operand>& operands, bool exact) {
  Recipe& recipe = *made<Recipe>(types().recipe);
  Ref object(recipe.self);
  recipe.describe(out);
  recipe.native = std::move(compute);
  recipe.exact = exact;
  for (const Operand& each : operands) {
    recipe.depth = std::max(recipe.depth, depth_of(each.form.get()) + 1);
    recipe.read_stored(each);
  }
  return object;
}

/// An operator's result and node, to find a recipe for. Where `may_be_freed`, FSDP or ZeRO may free a parameter once
/// its module has run, and gather the parameter again only for the backward of its module.
template <class Kind>
struct Result {
  const at::Tensor& out;
  const Kind& node;
  bool may_be_freed;

  /// Return a factor that stays valid until backward ends: a leaf is copied, if the result is so many times larger that
  /// the copy costs no more than 1.6 % of the saved bytes.
  Operand lasting(Operand operand) const {
    if (!operand.leaf || !may_be_freed) return operand;
    constexpr std::int64_t kCopied = 64;
    const at::Tensor leaf = body<Kept>(operand.form.get()).buffer.tensor();
    const bool copied = leaf.storage().nbytes() > 0 && leaf.numel() * kCopied <= out.numel();
    return copied ? memory_of_leaf(leaf.clone()) : Operand();
  }

  /// Return a parameter's memory as it stays valid until backward ends.
  at::Tensor stable(const at::Tensor& parameter) const {
    const at::Tensor bare = parameter.defined() ? observer::bare_tensor(parameter) : parameter;
    return bare.defined() && may_be_freed ? bare.clone() : bare;
  }
};

inline Ref recipe_of_gelu(const Result<generated::GeluBackward0>& of) {
  const Operand x = operand_of(of.node.self_);
  if (!x) return {};
  const auto compute = [how = of.node.approximate](at::ScalarType, Tensors given) { return at::gelu(given[0], how); };
  return recipe_for(of.out, compute, {x}, is_exact_form(x.form.get()));
}

inline Ref recipe_of_silu(const Result<generated::SiluBackward0>& of) {
  const Operand x = operand_of(of.node.self_);
  if (!x) return {};
  const auto compute = [](at::ScalarType, Tensors given) { return at::silu(given[0]); };
  return recipe_for(of.out, compute, {x}, is_exact_form(x.form.get()));
}

inline Ref recipe_of_product(const Result<generated::MulBackward0>& of) {
  const Operand a = of.lasting(operand_of(of.node.self_)), b = of.lasting(operand_of(of.node.other_));
  if (!a || !b) return {};
  const auto compute = [](at::ScalarType, Tensors given) { return given[0] * given[1]; };
  return recipe_for(of.out, compute, {a, b}, is_exact_form(a.form.get()) && is_exact_form(b.form.get()));
}

/// Return the scale of kept elements in dropout's forward; backward rounds once, and differently.
inline double scale_of_dropout(double probability, bool narrow) {
  if (probability == 1) return 0;
  if (!narrow) return 1 / (1 - probability);
  return 1 / static_cast<float>(1 - probability);  // CUDA computes difference and reciprocal in float32
}

/// Recompute the dropout of a stored result, such as attention probabilities or a ReLU's.
inline Ref recipe_of_dropout(const Result<generated::NativeDropoutBackward0>& of) {
  const Operand mask = operand_of(of.node.result1_);
  const auto [producer, number] = observer::source_of(of.node);
  const Ref stored = producer ? stored_result(*producer) : Ref();
  // Only a drawn mask is packed as a region. The node does not tell `train`.
  if (!mask || Py_TYPE(mask.form.get()) != types().region || !stored) return {};
  if (!layout_of_result(stored.get()).fits(of.out)) return {};
  // In 16-bit dtypes the CPU's forward rounds the scale too, but the backward does not.
  if (!of.out.is_cuda() && of.out.element_size() < 4) return {};
  const double scale = scale_of_dropout(of.node.p, of.out.is_cuda() && of.out.scalar_type() != at::kDouble);
  // Given the forward's scale, dropout's backward does the same to a gradient as the forward to the input.
  const auto compute = [scale](at::ScalarType, Tensors given) {
    return at::native_dropout_backward(given[0], given[1], scale);
  };
  return recipe_for(of.out, compute, {Operand{stored}, mask}, is_exact_form(stored.get()));
}

/// Return the recomputed output that an operator reads and another one saved, while it is provably unchanged.
inline Operand recomputed_source(const observer::Node& node) {
  const auto [producer, number] = observer::source_of(node);
  const Ref offered = producer && offers(*producer) ? recipe_on(*producer) : Ref();
  if (!offered) return {};
  const Recipe& recipe = body<Recipe>(offered.get());
  const at::Tensor out = recipe.output();
  const bool good = out.defined() && out.output_nr() == number && recipe.serves(out) && out.is_contiguous();
  if (!good || !recipe.latest || recipe.latest->dtype != recipe.dtype || recipe.depth >= kDeepest) return {};
  return recipe.latest->stream == stream_of(out) ? Operand{Ref::borrowed(recipe.latest->self)} : Operand();
}

/// Gather rows again, as a router gives each expert some tokens: the rows are copies of what is stored anyway.
inline Ref recipe_of_rows_taken(const Result<generated::IndexBackward0>& of) {
  const auto& indices = of.node.indices_;
  const Operand rows = indices.size() == 1 ? constant_of(indices[0]) : Operand();
  const Operand source = rows ? recomputed_source(of.node) : Operand();
  if (!source || body<Kept>(rows.form.get()).buffer.scalar_type() != at::kLong) return {};
  std::vector<std::int64_t> sizes;
  for (const c10::SymInt& size : of.node.self_sym_sizes) sizes.push_back(size.expect_int());
  const auto compute = [sizes](at::ScalarType, Tensors given) {
    return at::index(given[0].reshape(sizes), {given[1]});
  };
  return recipe_for(of.out, compute, {source, rows}, is_exact_form(source.form.get()));
}

inline at::Tensor like(const at::Tensor& x, at::ScalarType dtype) {
  return at::empty_like(x, x.options().dtype(dtype));
}

/// Write x * scale + shift to `out` in one pass, computed in the widest dtype; what is undefined is left out.
inline at::Tensor multiplied(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift, at::Tensor out) {
  if (!scale.defined()) return at::add_out(out, x, shift);
  return shift.defined() ? at::addcmul_out(out, shift, x, scale) : at::mul_out(out, x, scale);
}

/// Return whether a norm's forward read its means before it rounded them to 16 bits, as the CPU's does: take them from
/// the input then. CUDA's norms of rows save float32, and its group norm reads the rounded ones.
///
/// A deviation that is off by a rounding scales rows by as much, but a mean that is off by a rounding moves rows by as
/// much as they are far from zero.
inline bool is_rounded(const at::Tensor& means) { return means.is_cpu() && means.itemsize() < sizeof(float); }

/// Recompute a norm of rows from its input and the saved statistics.
///
/// A few gains may be a hundred times the others: codes of the output would round all channels of a group in steps of
/// the largest. A norm's input is coded before the gains. A layer norm has saved means and reciprocal deviations, an
/// RMS norm the latter alone, which are `deviations` here.
template <class Kind>
Ref recipe_of_rows(const Result<Kind>& of, const SavedVariable* means, const SavedVariable& deviations,
                   const SavedVariable* bias) {
  std::vector<Operand> operands;
  const auto reads = [&](const SavedVariable* saved) {
    if (!saved || !saved->has_hooks()) return false;
    Operand operand = constant_of(*saved);
    if (!operand) operand = operand_of(*saved);
    operands.push_back(of.lasting(std::move(operand)));
    return true;
  };
  if (!reads(&of.node.input_) || !reads(&deviations)) return {};
  const bool centred = reads(means), scaled = reads(&of.node.weight_), moved = reads(bias);
  for (const Operand& each : operands) {
    if (!each) return {};
  }
  const auto compute = [=, dims = static_cast<std::int64_t>(of.node.normalized_shape.size())](at::ScalarType wanted,
                                                                                              Tensors given) {
    const at::Tensor& x = given[0];
    const at::ScalarType wide = c10::promoteTypes(x.scalar_type(), at::kFloat);
    const at::Tensor deviation = given[1].to(wide);
    size_t next = 2;
    at::Tensor shift, gain, offset;
    if (centred) {
      shift = given[next++];
      if (is_rounded(shift)) shift = x.flatten(-dims).mean(-1, false, wide).view(deviation.sizes());
      shift = shift.mul(deviation).neg_();
    }
    if (scaled) gain = given[next++];
    if (moved) offset = given[next];
    if (!scaled && !moved) return multiplied(x, deviation, shift, like(x, wanted));
    const at::Tensor rows = multiplied(x, deviation, shift, like(x, wide));
    return multiplied(rows, gain, offset, wanted == wide ? rows : like(rows, wanted));
  };
  return recipe_for(of.out, compute, operands, false);
}

inline Ref recipe_of_layer_norm(const Result<generated::NativeLayerNormBackward0>& of) {
  return recipe_of_rows(of, &of.node.result1_, of.node.result2_, &of.node.bias_);
}

inline Ref recipe_of_rms_norm(const Result<generated::FusedRmsNormBackward0>& of) {
  return recipe_of_rows(of, nullptr, of.node.result1_, nullptr);
}

/// Return a norm's stored input, from which the output follows as exactly as from codes of its own.
inline Operand input_of_norm(const SavedVariable& saved) {
  Operand x = operand_of(saved);
  if (!x || is_exact_form(x.form.get())) return x;
  // Sixteen bits of values far from zero leave fewer of their deviation. Codes have a minimum in each group.
  const Region* const region = region_in(x.form.get());
  return region && region->form.get() == constants().as_codes ? x : Operand();
}

/// Return gain and bias of a norm, as its forward read them; nothing unless both are leaves that get gradients, or
/// repeated ones: an instance norm is a batch norm of each sample's channels, with both repeated for each sample.
///
/// The node saves no bias. A bias without a gradient is unknown: it may be missing or frozen.
template <class Kind>
std::optional<std::pair<at::Tensor, at::Tensor>> affine_of(const Result<Kind>& of) {
  at::Tensor leaves[2];
  bool repeated = false;
  for (size_t input = 0; input < 2; ++input) {
    const auto* producer = observer::input_of(of.node, input + 1);
    if (producer && node_as<generated::RepeatBackward0>(*producer)) {
      repeated = true;
      producer = observer::input_of(*producer, 0);
    }
    const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(producer);
    if (!leaf || !observer::is_exact(leaf->variable)) return std::nullopt;
    leaves[input] = leaf->variable;
    // ZeRO and FSDP may have freed or replaced the parameters once their module had run.
    if (leaves[input].storage().nbytes() == 0) return std::nullopt;
  }
  const Operand gain = operand_of(of.node.weight_);
  if (!gain || leaves[0].sizes() != leaves[1].sizes()) return std::nullopt;
  if (repeated && Py_TYPE(gain.form.get()) == types().kept) {
    const at::Tensor gains = body<Kept>(gain.form.get()).buffer.tensor();
    return std::make_pair(gains, observer::bare_tensor(leaves[1]).repeat({gains.numel() / leaves[1].numel()}));
  }
  if (!gain.leaf) return std::nullopt;
  return std::make_pair(of.stable(leaves[0]), of.stable(leaves[1]));
}

/// Return a recipe that also reads the gain and bias.
inline Ref with_affine(Ref recipe, const std::pair<at::Tensor, at::Tensor>& affine) {
  for (const at::Tensor& each : {affine.first, affine.second}) {
    if (each.defined()) body<Recipe>(recipe.get()).read_unpacked(each);
  }
  return recipe;
}

/// Normalise channels by the statistics of a forward.
inline at::Tensor normalised(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias,
                             const at::Tensor& mean, const at::Tensor& inverse) {
  // CUDA's kernel for contiguous images starts one block for each channel of an image, whatever the image's size. On an
  // H200 one image of 64 channels of 128^3 elements takes 1.64 ms, and 0.37 by the kernel for other layouts, which each
  // image has in some order of its dimensions; with 512 channels of 16^3 neither is quicker.
  constexpr std::int64_t kFewBlocks = 512;
  if (x.is_cuda() && x.dim() > 2 && x.is_contiguous() && x.size(0) * x.size(1) < kFewBlocks) {
    const at::Tensor turned = x.flatten(2).permute({2, 1, 0});
    return at::batch_norm_elemt(turned, gain, bias, mean, inverse, 0).permute({2, 1, 0}).view(x.sizes());
  }
  // With the forward's statistics in place of running ones, evaluation computes what training did.
  return std::get<0>(at::native_batch_norm(x, gain, bias, mean, inverse.pow(-2), false, 0, 0));
}

template <class Kind>
Ref recipe_of_batch_norm(const Result<Kind>& of) {
  const Operand x = input_of_norm(of.node.input_), mean = constant_of(of.node.result1_);
  const Operand inverse = constant_of(of.node.result2_);
  const auto affine = affine_of(of);
  if (!x || !mean || !inverse || !affine || !of.node.training) return {};
  const auto compute = [affine = *affine](at::ScalarType, Tensors given) {
    return normalised(given[0], affine.first, affine.second, given[1], given[2]);
  };
  return with_affine(recipe_for(of.out, compute, {x, mean, inverse}, false), *affine);
}

inline Ref recipe_of_group_norm(const Result<generated::NativeGroupNormBackward0>& of) {
  const Operand x = input_of_norm(of.node.input_), mean = constant_of(of.node.result1_);
  const Operand inverse = constant_of(of.node.result2_);
  const auto affine = affine_of(of);
  const auto n = of.node.N.expect_int(), c = of.node.C.expect_int(), groups = of.node.group;
  if (!x || !mean || !inverse || !affine || of.out.dim() < 2 || of.out.size(0) != n || of.out.size(1) != c) return {};
  const auto compute = [=, affine = *affine](at::ScalarType wanted, Tensors given) {
    const at::Tensor& image = given[0];
    const at::ScalarType wide = c10::promoteTypes(image.scalar_type(), at::kFloat);
    const at::Tensor means = is_rounded(given[1]) ? image.reshape({n, groups, -1}).mean(2, false, wide) : given[1];
    // A factor and an offset of each channel of each image.
    const at::Tensor scale = given[2].view({n, groups, 1}) * affine.first.view({1, groups, -1}).to(wide);
    const at::Tensor shift = affine.second.view({1, groups, -1}) - means.view({n, groups, 1}) * scale;
    std::vector<std::int64_t> channels(image.dim(), 1);
    channels[0] = n, channels[1] = c;
    return multiplied(image, scale.view(channels), shift.view(channels), like(image, wanted));
  };
  return with_affine(recipe_for(of.out, compute, {x, mean, inverse}, false), *affine);
}

/// Return a recipe for a layer norm's output to the bit: the node does not tell `eps`, and the module does.
inline Ref recipe_of_exact_layer_norm(const Result<generated::NativeLayerNormBackward0>& of, double eps,
                                      const at::Tensor& weight, const at::Tensor& bias) {
  const Operand x = operand_of(of.node.input_);
  // To restore an input stored in a narrower dtype and normalise moves 14 bytes an element to save 4.
  if (!x || (region_in(x.form.get()) && region_in(x.form.get())->narrowed())) return {};
  std::vector<std::int64_t> shape;
  for (const c10::SymInt& size : of.node.normalized_shape) shape.push_back(size.expect_int());
  const auto affine = std::make_pair(of.stable(weight), of.stable(bias));
  const auto compute = [=](at::ScalarType, Tensors given) {
    return std::get<0>(at::native_layer_norm(given[0], shape, affine.first, affine.second, eps));
  };
  Ref recipe = with_affine(recipe_for(of.out, compute, {x}, is_exact_form(x.form.get())), affine);
  // To normalise in float32 and cast moves 14 bytes an element to save 2: equal casts are stored once instead.
  body<Recipe>(recipe.get()).casts = false;
  return recipe;
}

/// How the result of a class of nodes is recomputed. What rounds otherwise than the forward serves no lossless mode.
struct Builder {
  Ref (*build)(const at::Tensor& out, const observer::Node& node, bool may_be_freed);
  bool bitwise;
  std::uint32_t writes;  ///< to the result's memory since its first values: one by an operator in place
};

template <class Kind, Ref (*function)(const Result<Kind>&)>
std::pair<const std::type_index, Builder> builder(bool bitwise, std::uint32_t writes = 0) {
  return {typeid(Kind),
          {[](const at::Tensor& out, const observer::Node& node, bool may_be_freed) {
             return function({out, static_cast<const Kind&>(node), may_be_freed});
           },
           bitwise, writes}};
}

inline const std::unordered_map<std::type_index, Builder>& builders();

/// Return a recipe for an operator's result as if the node before the operator had made it; none if nothing recomputes
/// that node's result.
template <class Kind>
Ref recipe_of_source_for(const Result<Kind>& of, const observer::Node* producer, std::uint32_t number) {
  const auto known = producer && number == 0 ? builders().find(typeid(*producer)) : builders().end();
  if (known == builders().end() || known->second.writes != 0) return {};
  return known->second.build(of.out, *producer, of.may_be_freed);
}

/// Recompute the leaky ReLU of a result that has a recipe, such as a norm's: the operator itself keeps one bit for each
/// element.
template <class Kind>
Ref leaky(const Result<Kind>& of, const observer::Node* producer, std::uint32_t number, const at::Scalar& slope) {
  Ref recipe = recipe_of_source_for(of, producer, number);
  if (!recipe) return {};
  Recipe& how = body<Recipe>(recipe.get());
  how.native = [before = std::move(how.native), slope, shape = of.out.sizes().vec()](at::ScalarType dtype,
                                                                                     Tensors given) {
    return at::leaky_relu(before(dtype, given), slope).reshape(shape);
  };
  return recipe;
}

inline Ref recipe_of_leaky_relu(const Result<generated::LeakyReluBackward0>& of) {
  // The version noted with the stored bits tells whether the operator's input was written to.
  const Ref bits = stored_form_of(form_of(of.node.self_));
  const Region* const region = bits ? region_in(bits.get()) : nullptr;
  if (!region || region->seen.saved != 0 || region->seen.moved()) return {};
  const auto [producer, number] = observer::source_of(of.node);
  return leaky(of, producer, number, of.node.negative_slope);
}

inline Ref recipe_of_leaky_relu_in_place(const Result<generated::LeakyReluBackward1>& of) {
  const auto& edge = of.node.next_edge(0);
  return leaky(of, edge.function.get(), edge.input_nr, of.node.negative_slope);
}

/// In place through a view of all elements, as after an instance norm.
inline Ref recipe_of_leaky_relu_of_view(const Result<torch::autograd::CopySlices>& of) {
  const auto* const node = node_as<generated::LeakyReluBackward1>(*of.node.fn);
  if (!node || of.node.view.numel() != of.out.numel() || !of.node.view.is_contiguous()) return {};
  const auto& edge = of.node.next_edge(0);
  return leaky(of, edge.function.get(), edge.input_nr, node->negative_slope);
}

/// Return whether a node is autograd's copy of what the running operator is about to write over, as the first to write.
///
/// The graph tells of no write without autograd; the version of what is about to be written does.
inline bool copies_for_write(const observer::Node& node) {
  if (!node_as<generated::CloneBackward0>(node)) return false;
  const auto [producer, number] = observer::source_of(node);
  const at::Tensor written = observer::written();
  const bool fresh = written.defined() && !written.is_view() && version_of(written) == 0;
  return fresh && producer && number == 0 && written.grad_fn().get() == producer;
}

/// Recompute what an activation in place writes over.
inline Ref recipe_of_copy(const Result<generated::CloneBackward0>& of) {
  if (!copies_for_write(of.node)) return {};
  const auto [producer, number] = observer::source_of(of.node);
  return recipe_of_source_for(of, producer, number);
}

/// Return whether a node has written its result over its operand, once and as nobody else.
inline bool wrote_over(const observer::Node& node, std::uint32_t writes) {
  const auto* const silu = node_as<generated::SiluBackward0>(node);
  const Ref operand = silu && writes == 1 ? form_of(silu->self_) : Ref();
  const Stored* const own = operand ? stored_in(operand.get()) : nullptr;  // null for a form of a class in Python
  return own && own->written_over;
}

inline const std::unordered_map<std::type_index, Builder>& builders() {
  using namespace torch::autograd::generated;
  static const std::unordered_map<std::type_index, Builder> all = {
      builder<GeluBackward0, recipe_of_gelu>(true),
      builder<SiluBackward0, recipe_of_silu>(true),
      builder<MulBackward0, recipe_of_product>(true),
      builder<NativeDropoutBackward0, recipe_of_dropout>(true),
      builder<IndexBackward0, recipe_of_rows_taken>(true),
      builder<CloneBackward0, recipe_of_copy>(false),
      builder<NativeLayerNormBackward0, recipe_of_layer_norm>(false),
      builder<FusedRmsNormBackward0, recipe_of_rms_norm>(false),
      builder<NativeBatchNormBackward0, recipe_of_batch_norm<NativeBatchNormBackward0>>(false),
      builder<CudnnBatchNormBackward0, recipe_of_batch_norm<CudnnBatchNormBackward0>>(false),
      builder<NativeGroupNormBackward0, recipe_of_group_norm>(false),
      builder<LeakyReluBackward0, recipe_of_leaky_relu>(false),
      builder<LeakyReluBackward1, recipe_of_leaky_relu_in_place>(false, 1),
      builder<torch::autograd::CopySlices, recipe_of_leaky_relu_of_view>(false, 1),
  };
  return all;
}

/// Return the recipe that a node offers for its result, or one made and offered now; none if there is no way.
inline Ref recipe_of_result(const at::Tensor& out, observer::Node& node, bool bitwise, bool may_be_freed) {
  const auto known = builders().find(typeid(node));
  const bool builds = known != builders().end() && (known->second.bitwise || !bitwise);
  if (!builds && !offers(node)) return {};
  if (Ref offered = recipe_on(node)) return offered;
  // No write but the node's, and the node's own output: it holds what the node made and owns its memory. A norm saves
  // its other outputs, the statistics, too.
  if (!builds || out.is_nested() || out.output_nr() != 0) return {};
  const std::uint32_t writes = version_of(out);
  if (writes != known->second.writes && !wrote_over(node, writes)) return {};
  Ref made = known->second.build(out, node, may_be_freed);
  if (made) offer(node, made);
  return made;
}

/// Return the recipe for a tensor whose maker is no cast, dense or a view; none if nothing recomputes it.
inline Ref recipe_of(const at::Tensor& tensor, bool bitwise, bool may_be_freed) {
  const at::Tensor out = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  const auto node = out.grad_fn();
  if (!node || out.scalar_type() != tensor.scalar_type()) return {};
  Ref recipe = recipe_of_result(out, *node, bitwise, may_be_freed);
  const bool good = recipe && body<Recipe>(recipe.get()).serves(tensor) && body<Recipe>(recipe.get()).computes();
  return good ? recipe : Ref();
}

/// Return the recipe offered by the source of a cast, while the source is alive and provably unchanged.
inline Ref recipe_of_source(const at::Tensor& copy, const observer::Node& cast) {
  if (copy.grad_fn().get() != &cast || version_of(copy) != 0 || !copy.is_contiguous()) return {};
  const auto [producer, number] = observer::source_of(cast);
  Ref recipe = producer && offers(*producer) ? recipe_on(*producer) : Ref();
  // From a cast's node the graph leads to the producer's node only; the recipe leads on to the live output.
  const at::Tensor out = recipe ? body<Recipe>(recipe.get()).output() : at::Tensor();
  if (!out.defined() || out.output_nr() != number || out.numel() != copy.numel() || out.device() != copy.device()) {
    return {};
  }
  return body<Recipe>(recipe.get()).serves(out) && out.is_contiguous() ? recipe : Ref();
}

/// Return a recipe for a cast of a result that its operator has saved, such as softmax's; none if there is no such.
inline Ref recipe_of_stored_source(const at::Tensor& copy, const observer::Node& cast) {
  if (copy.grad_fn().get() != &cast || version_of(copy) != 0) return {};
  const auto [producer, number] = observer::source_of(cast);
  const Ref stored = producer ? stored_result(*producer) : Ref();
  if (!stored || number != 0 || !layout_of_result(stored.get()).fits(copy)) return {};
  const auto compute = [](at::ScalarType, Tensors given) { return given[0]; };
  return recipe_for(copy, compute, {Operand{stored}}, is_exact_form(stored.get()));
}

}  // namespace pac::engine
