// Concatenations, as of a U-Net's skips: a part that backward restores or recomputes anyway is not stored again.
#pragma once

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/hooks.hpp"

namespace pac::engine {

/// Return what restores a node's first result, which another operator saved, while it is provably unchanged; or none.
inline Operand saved_result(const observer::Node& node, std::int64_t stream) {
  if (Ref stored = stored_result(node)) {
    const Region* const region = region_in(stored.get());
    if (region && region->stream != stream) return {};
    // What saturates serves its own reader alone.
    const bool narrow = region && region->storing;
    if (narrow && !body<StoringBody>(region->storing.get()).serves_form(constants().as_codes)) return {};
    return {std::move(stored)};
  }
  const Ref offered = offers(node) ? recipe_on(node) : Ref();
  if (!offered) return {};
  const Recipe& recipe = body<Recipe>(offered.get());
  const FromRecipe* const latest = recipe.depth < kDeepest ? recipe.latest : nullptr;
  // The counter tells of writes, also once the tensor is freed.
  if (!latest || !latest->checks || latest->seen.moved() || latest->stream != stream) return {};
  return {Ref::borrowed(latest->self)};
}

inline Ref Hooks::join(const Given& given, const Form& form) {
  using Sizes = std::vector<std::int64_t>;
  const at::Tensor& whole = given.tensor;
  if (lossless || form.object.get() != constants().as_codes || whole.is_view()) return {};
  const auto node = whole.grad_fn();
  const auto* const cat = node ? node_as<generated::CatBackward0>(*node) : nullptr;
  if (!cat) return {};
  if (version_of(whole) != 0 || !whole.is_contiguous() || is_held(whole)) return {};
  const std::int64_t dim = at::maybe_wrap_dim(cat->dim, whole.dim());
  if (dim == whole.dim() - 1) return {};  // a part has shorter rows, which a group may span
  constexpr std::int64_t kFew = 256;      // elements of the longest group
  const at::Tensor bare = observer::bare_tensor(whole);
  std::vector<Operand> parts;
  std::vector<Sizes> shapes;
  std::vector<at::Tensor> stored;
  std::int64_t start = 0;
  for (size_t i = 0; i < cat->tensors_size_; ++i) {
    const auto& sizes = cat->tensors_args_sizes_symint[i];
    if (cat->tensors_args_scalartypes[i] != whole.scalar_type() ||
        static_cast<std::int64_t>(sizes.size()) != whole.dim())
      return {};
    Sizes shape;
    for (const c10::SymInt& size : sizes) shape.push_back(size.expect_int());
    const auto [producer, number] = observer::source_of(*cat, i);
    parts.push_back(producer && number == 0 ? saved_result(*producer, stream_of(whole)) : Operand());
    stored.push_back(parts.back() ? at::Tensor() : bare.narrow(dim, start, shape[static_cast<size_t>(dim)]));
    if (stored.back().defined() && stored.back().numel() < kFew) return {};
    start += shape[static_cast<size_t>(dim)];
    shapes.push_back(std::move(shape));
  }
  std::int64_t added = 0;
  if (std::none_of(parts.begin(), parts.end(), [](const Operand& part) { return bool(part); })) return {};
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i]) continue;
    const at::Tensor part = stored[i].contiguous();
    const Ref how = body<Decisions>(decisions.get()).storing(packing.get(), "storing", part, form.object.get());
    if (!how) return {};
    parts[i] = {region(part, how, added)};
  }
  const auto compute = [shapes, dim](at::ScalarType, Tensors restored) {
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < shapes.size(); ++i) all.push_back(restored[i].reshape(shapes[i]));
    return at::cat(all, dim);
  };
  const Ref recipe = recipe_for(whole, compute, parts, false);
  offer(*node, recipe);
  return recomputed(given, recipe, whole.scalar_type(), added);
}

}  // namespace pac::engine
