// The operator behind a tensor, read from the autograd graph without a Python object for each node.
//
// A Python object for a node lives as long as the graph, and to make one takes as long as the whole walk.
#pragma once

#include <torch/csrc/autograd/generated/Functions.h>

#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <unordered_set>

#include "observer/tensors.hpp"

namespace pac::observer {

using torch::autograd::Node;

/// Names of nodes, given by `configure`.
struct NodeNames {
  std::unordered_set<std::string> views;
  std::unordered_set<std::string> wide;        ///< results may span orders of magnitude
  std::unordered_set<std::string> growing;     ///< of these, the results that grow as an exponential
  std::unordered_set<std::string> range_kept;  ///< results have the range of the operands
  std::unordered_set<std::string> hinges;      ///< results are zero beyond a margin
  std::unordered_set<std::string> margins;     ///< differences that count below a hinge alone
  std::unordered_set<std::string> residuals;   ///< results are as small as a difference among the operands
  std::unordered_set<std::string> losses;      ///< results are as small as the difference of the operands
};

/// The ranges of readers/nodes.py.
enum Range { kNarrow, kDifference, kSpanning, kScaled };

/// A class of nodes. `origin[range]` is the tuple (name, range); functions written in Python share a class, not a name.
struct NodeKind {
  PyObject* origin[4] = {nullptr, nullptr, nullptr, nullptr};
  bool python = false;
  bool view = false, wide = false, growing = false, keeps_range = false;
  bool sum = false, difference = false, product = false, quotient = false, negative = false;
  bool hinge = false, margin = false, two_bounds = false, clamp = false, residual = false, loss = false;
};

inline NodeNames& node_names() {
  static NodeNames& instance = *std::make_unique<NodeNames>().release();
  return instance;
}

inline PyObject* origin_tuple(const std::string& name, Range range) {
  PyObject* text = PyUnicode_InternFromString(name.c_str());
  return text ? Py_BuildValue("(Ni)", text, static_cast<int>(range)) : nullptr;
}

/// Return the kind of a node's class. Kinds are never freed; guarded by the GIL.
inline const NodeKind& kind_of(const Node& node) {
  static auto& kinds = *std::make_unique<std::unordered_map<std::type_index, NodeKind>>().release();
  auto [known, added] = kinds.try_emplace(std::type_index(typeid(node)));
  if (added) {
    NodeKind& kind = known->second;
    // By name, since torch does not export the class.
    kind.python = c10::demangle(typeid(node).name()) == "torch::autograd::PyNode";
    if (kind.python) return kind;
    const std::string name = node.name();
    const NodeNames& names = node_names();
    kind.view = names.views.count(name) != 0;
    kind.wide = names.wide.count(name) != 0;
    kind.growing = names.growing.count(name) != 0;
    kind.keeps_range = names.range_kept.count(name) != 0;
    kind.hinge = names.hinges.count(name) != 0;
    kind.margin = names.margins.count(name) != 0;
    kind.residual = names.residuals.count(name) != 0;
    kind.loss = names.losses.count(name) != 0;
    kind.two_bounds = name == "HardtanhBackward0";
    kind.clamp = typeid(node) == typeid(torch::autograd::generated::ClampBackward1);
    kind.sum = typeid(node) == typeid(torch::autograd::generated::AddBackward0);
    kind.difference = typeid(node) == typeid(torch::autograd::generated::SubBackward0);
    kind.product = name == "MulBackward0";
    kind.quotient = name == "DivBackward0";
    kind.negative = name == "NegBackward0";
    for (const Range range : {kNarrow, kDifference, kSpanning, kScaled}) kind.origin[range] = origin_tuple(name, range);
  }
  return known->second;
}

inline const Node* first_input(const Node& node) {
  return node.num_outputs() == 0 ? nullptr : node.next_edge(0).function.get();
}

/// Return whether the constant operand of a sum or difference is a number: torch makes it a tensor of 64 bits.
inline bool adds_number(const Node& node, const NodeKind& kind) {
  const auto is_number = [](at::ScalarType type) { return type == at::kDouble || type == at::kLong; };
  using torch::autograd::generated::AddBackward0;
  using torch::autograd::generated::SubBackward0;
  if (kind.sum) return is_number(static_cast<const AddBackward0&>(node).other_scalar_type);
  return kind.difference && is_number(static_cast<const SubBackward0&>(node).other_scalar_type);
}

/// Return whether a hinge has no upper bound.
inline bool is_one_sided(const Node& node, const NodeKind& kind) {
  if (kind.clamp) return !static_cast<const torch::autograd::generated::ClampBackward1&>(node).max.has_value();
  return !kind.two_bounds;
}

inline bool is_residual(const Node& node) {
  const NodeKind& kind = kind_of(node);
  return kind.difference || kind.residual || kind.loss;
}

/// Return whether the result of a node is a difference, the multiple of one by a constant, or a hinge or residual of
/// either, as `_is_difference` in readers/nodes.py.
inline bool is_difference(const Node* node) {
  constexpr int kMultiples = 6;
  bool hinged = false, one_sided = false, residual = false;
  for (int step = 0; node && step < kMultiples; ++step) {
    const NodeKind& kind = kind_of(*node);
    if (kind.difference || kind.loss) return true;
    const auto is_constant = [node](size_t input) { return !node->next_edge(input).function; };
    if (kind.residual || (residual && kind.sum && (is_constant(0) || is_constant(1)))) {
      residual = true;
    } else if (kind.hinge) {
      hinged = true;
      one_sided = is_one_sided(*node, kind);
    } else if (hinged && (kind.margin || (one_sided && kind.sum && (is_constant(0) || is_constant(1))))) {
      return true;
    } else if (residual && (kind.product || kind.quotient)) {
      // A residual times a precision, in either order.
      const Node* second = node->next_edge(1).function.get();
      if (second && is_residual(*second) && !(first_input(*node) && is_residual(*first_input(*node)))) {
        node = second;
        continue;
      }
    } else if (!kind.negative && !((kind.product || kind.quotient) && is_constant(1))) {
      return false;
    }
    node = first_input(*node);
  }
  return node && kind_of(*node).difference;
}

/// Return the range of the result of a node, as `range_of` in readers/nodes.py.
inline Range range_of(const Node* start) {
  constexpr size_t kWalk = 12;
  struct Step {
    const Node* node;
    bool is_factor, is_quotient;
  };
  std::array<Step, kWalk> steps;
  steps[0] = {start, false, false};
  Range found = is_difference(start) ? kDifference : kNarrow;
  for (size_t step = 0, count = 1; step < count; ++step) {
    const Node& node = *steps[step].node;
    bool is_factor = steps[step].is_factor, is_quotient = steps[step].is_quotient;
    const NodeKind& kind = kind_of(node);
    if (kind.wide) {
      // A sum of exponentials divides a softmax back to moderate numbers.
      if (kind.growing && (is_factor || !is_quotient)) return kScaled;
      found = kSpanning;
      continue;
    }
    if (!kind.product && !kind.quotient && !kind.keeps_range) continue;
    is_quotient = is_quotient || kind.quotient;
    const size_t inputs = node.num_outputs();
    bool has_constant = false;
    for (size_t input = 0; input < inputs; ++input) has_constant = has_constant || !node.next_edge(input).function;
    if (kind.product) {
      is_factor = is_factor || !has_constant;
    } else if (has_constant && (kind.quotient ? !node.next_edge(0).function : !adds_number(node, kind))) {
      found = kSpanning;
    }
    for (size_t input = 0; input < inputs && count < kWalk; ++input) {
      if (const Node* const behind = node.next_edge(input).function.get())
        steps[count++] = {behind, is_factor, is_quotient};
    }
  }
  return found;
}

/// origin(tensor): return the name of the operator behind a tensor, views aside, or an empty one, and the tensor's
/// range.
inline PyObject* origin(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  constexpr int kLongestWalk = 8;
  static PyObject* const nothing = origin_tuple("", kNarrow);
  try {
    // From the base on: to ask a view for its node makes one. A view in another dtype has a node of its own.
    const at::TensorBase& base = tensor->is_view() ? tensor->_base() : *tensor;
    const at::TensorBase& start = base.scalar_type() == tensor->scalar_type() ? base : *tensor;
    const auto held = start.grad_fn();
    const Node* node = held.get();
    for (int step = 0; node && step < kLongestWalk; ++step) {
      const NodeKind& kind = kind_of(*node);
      if (kind.python) return origin_tuple(node->name(), kNarrow);
      if (!kind.view) return Py_XNewRef(kind.origin[range_of(node)]);
      node = first_input(*node);
    }
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return Py_XNewRef(nothing);
}

}  // namespace pac::observer
