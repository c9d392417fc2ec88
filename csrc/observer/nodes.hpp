// The operator behind a tensor, read from the autograd graph without a Python object for each node.
//
// A Python object for a node lives as long as the graph, and to make one takes as long as the whole walk.
#pragma once

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
  std::unordered_set<std::string> range_kept;  ///< results have the range of the first operand
};

/// A class of nodes. `origin[wide]` is the tuple (name, wide); functions written in Python share a class, not a name.
struct NodeKind {
  PyObject* origin[2] = {nullptr, nullptr};
  bool python = false;
  bool view = false, wide = false, keeps_range = false, product = false;
};

inline NodeNames& node_names() {
  static NodeNames& instance = *std::make_unique<NodeNames>().release();
  return instance;
}

inline PyObject* origin_tuple(const std::string& name, bool wide) {
  PyObject* text = PyUnicode_InternFromString(name.c_str());
  return text ? Py_BuildValue("(NO)", text, wide ? Py_True : Py_False) : nullptr;
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
    kind.keeps_range = names.range_kept.count(name) != 0;
    kind.product = name == "MulBackward0";
    for (const bool wide : {false, true}) kind.origin[wide] = origin_tuple(name, wide);
  }
  return known->second;
}

inline const Node* first_input(const Node& node) {
  return node.num_outputs() == 0 ? nullptr : node.next_edge(0).function.get();
}

/// Return whether the result of a node may span orders of magnitude: follows the first operand through operators that
/// keep its range, products with a constant included.
inline bool spans_magnitudes(const Node* node) {
  constexpr int kWalk = 4;
  for (int step = 0; node && step < kWalk; ++step) {
    const NodeKind& kind = kind_of(*node);
    if (kind.wide) return true;
    const bool scaled = kind.product && !node->next_edge(node->num_outputs() - 1).function;
    if (!kind.keeps_range && !scaled) return false;
    node = first_input(*node);
  }
  return false;
}

/// origin(tensor): return the name of the operator behind a tensor, views aside, or an empty one, and whether the
/// tensor may span orders of magnitude.
inline PyObject* origin(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  constexpr int kLongestWalk = 8;
  static PyObject* const nothing = origin_tuple("", false);
  try {
    // From the base on: to ask a view for its node makes one. A view in another dtype has a node of its own.
    const at::TensorBase& base = tensor->is_view() ? tensor->_base() : *tensor;
    const at::TensorBase& start = base.scalar_type() == tensor->scalar_type() ? base : *tensor;
    const auto held = start.grad_fn();
    const Node* node = held.get();
    for (int step = 0; node && step < kLongestWalk; ++step) {
      const NodeKind& kind = kind_of(*node);
      if (kind.python) return origin_tuple(node->name(), false);
      if (!kind.view) return Py_XNewRef(kind.origin[spans_magnitudes(node)]);
      node = first_input(*node);
    }
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return Py_XNewRef(nothing);
}

}  // namespace pac::observer
