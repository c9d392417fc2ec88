// What made a tensor, read from the autograd graph without a Python object for each node.
//
// A Python object for a node lives as long as the graph, and to make one takes as long as the whole look.
#pragma once

#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_function.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "observer/operators.hpp"
#include "observer/tensors.hpp"

namespace pac::observer {

using torch::autograd::Node;

// The enumerations of readers/rule.py.
enum class Maker { kOther, kLayer, kResidual, kGate, kRectified, kLogarithm, kExponential, kMasked, kGained };
enum class Partner { kNothing, kItself, kGain, kParameter, kStatistic, kGate, kLayer, kLogarithm, kOther };
enum class Kind {
  kOther,
  kView,
  kMoves,
  kScales,
  kSum,
  kDifference,
  kProduct,
  kBiasedProduct,
  kActivates,
  kRectifies,
  kLayer,
  kBounds,
  kSoftmax,
  kLogarithm,
  kExponential,
  kMasks,
  kInvertsRoot,
};

/// What is known of a class of nodes.
struct KnownNode {
  PyObject* name = nullptr;  ///< null for functions written in Python, whose names differ
  Kind kind = Kind::kOther;
};

/// The look-ups that `configure` sets, and what they found. Guarded by the GIL.
struct Nodes {
  Object kind_of;  ///< maps a node's name, or its class if written in Python, to what it does
  std::vector<PyObject*> makers, partners;
  /// By address, since the hash of a type_index reads the class's name. A class with two type_infos is here twice.
  std::unordered_map<const std::type_info*, KnownNode> kinds;
  std::unordered_map<PyTypeObject*, Kind> functions;  ///< holds a reference to each class
};

inline Nodes& nodes() {
  static Nodes& instance = *std::make_unique<Nodes>().release();
  return instance;
}

/// Ask Python what a node does; an error there counts as unknown.
inline Kind ask(PyObject* node) {
  PyObject* found = node ? PyObject_CallOneArg(nodes().kind_of.get(), node) : nullptr;
  const long value = found ? PyLong_AsLong(found) : -1;
  Py_XDECREF(found);
  if (PyErr_Occurred()) PyErr_Clear();
  return value < 0 ? Kind::kOther : static_cast<Kind>(value);
}

/// Return the object of a function written in Python: a member until torch 2.12, then a method.
template <class PythonNode>
auto function_object(const PythonNode& node, int) -> decltype(node.obj) {
  return node.obj;
}
template <class PythonNode>
auto function_object(const PythonNode& node, long) -> decltype(node.pyobj()) {
  return node.pyobj();
}

/// Return the class of a function written in Python.
inline PyTypeObject* class_of_function(const Node& node) {
  return Py_TYPE(function_object(static_cast<const torch::autograd::PyNode&>(node), 0));
}

/// Return a node's name and kind. By name, since torch does not export the class of functions written in Python.
inline KnownNode known(const Node& node) {
  Nodes& all = nodes();
  const auto found = all.kinds.find(&typeid(node));
  if (found != all.kinds.end() && found->second.name) return found->second;
  if (found == all.kinds.end()) {
    KnownNode made;
    if (c10::demangle(typeid(node).name()) != "torch::autograd::PyNode") {
      made.name = PyUnicode_InternFromString(node.name().c_str());
      made.kind = ask(made.name);
    }
    all.kinds.emplace(&typeid(node), made);
    if (made.name) return made;
  }
  PyTypeObject* const type = class_of_function(node);
  const auto [function, added] = all.functions.try_emplace(type, Kind::kOther);
  if (added) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    function->second = ask(reinterpret_cast<PyObject*>(type));
  }
  return {nullptr, function->second};
}

// Attention in windows makes ten views of a projection.
constexpr int kLongest = 16;

inline const Node* input_of(const Node& node, size_t index) {
  return index < node.num_outputs() ? node.next_edge(index).function.get() : nullptr;
}

/// Return whether a view by strides holds all elements of its base in order: autograd makes such a node for a view once
/// the base, or the view itself, was written to in place.
inline bool is_of_all(const torch::autograd::generated::AsStridedBackward0& view) {
  const at::TensorGeometry& base = view.self_geometry;
  std::int64_t count = 1;
  for (size_t dim = view.size.size(); dim-- > 0;) {
    const std::int64_t size = view.size[dim].maybe_as_int().value_or(0);
    if (size != 1 && view.stride[dim].maybe_as_int() != count) return false;
    count *= size;
  }
  const bool same_start = !view.storage_offset || view.storage_offset->maybe_as_int() == base.storage_offset();
  return same_start && base.is_contiguous() && count == base.numel();
}

/// Return whether a node's result has the elements of its input in the same order.
inline bool reshapes(const Node& node) {
  using namespace torch::autograd::generated;
  const auto& kind = typeid(node);
  if (kind == typeid(AsStridedBackward0)) return is_of_all(static_cast<const AsStridedBackward0&>(node));
  return kind == typeid(ViewBackward0) || kind == typeid(UnsafeViewBackward0) || kind == typeid(AliasBackward0) ||
         kind == typeid(ReshapeAliasBackward0) || kind == typeid(UnsqueezeBackward0) ||
         kind == typeid(SqueezeBackward0);
}

/// Return the producer of an input of a node, reshapes aside, and the number of its output; or null.
inline std::pair<Node*, std::uint32_t> source_of(const Node& node, size_t input = 0) {
  const Node* reader = &node;
  for (int step = 0; step < kLongest && input < reader->num_outputs(); ++step) {
    const auto& edge = reader->next_edge(input);
    if (!edge.function || !reshapes(*edge.function)) return {edge.function.get(), edge.input_nr};
    reader = edge.function.get();
    input = 0;
  }
  return {nullptr, 0};
}

/// Return whether a node accumulates the gradient of a leaf.
inline bool is_leaf(const Node& node) { return node.num_outputs() == 0; }

/// Return whether a scalar type is that of a number that torch made a tensor: it has 64 bits.
inline bool is_number(at::ScalarType type, at::ScalarType beside) {
  return type == at::kLong || (type == at::kDouble && beside != at::kDouble);
}

/// Return whether the constant operand of a sum, difference or product is a number, or that of a quotient any constant.
inline bool has_number(const Node& node) {
  using namespace torch::autograd::generated;
  if (node.num_outputs() < 2 || input_of(node, 1)) return false;
  if (typeid(node) == typeid(AddBackward0))
    return is_number(static_cast<const AddBackward0&>(node).other_scalar_type, at::kFloat);
  if (typeid(node) == typeid(SubBackward0))
    return is_number(static_cast<const SubBackward0&>(node).other_scalar_type, at::kFloat);
  if (typeid(node) == typeid(MulBackward0)) {
    const auto& product = static_cast<const MulBackward0&>(node);
    return is_number(product.other_scalar_type, product.self_scalar_type);
  }
  return typeid(node) == typeid(DivBackward0);
}

/// Return the first node, from `node` on, that does not merely arrange elements, or multiply by a number if `scaled`.
inline const Node* unmoved(const Node* node, bool scaled = false) {
  for (int step = 0; node && step < kLongest && !is_leaf(*node); ++step) {
    const Kind kind = known(*node).kind;
    if (kind != Kind::kView && kind != Kind::kMoves && !(scaled && kind == Kind::kScales && has_number(*node))) break;
    node = input_of(*node, 0);
  }
  return node;
}

/// Return the leaf of which a node's result is a view, a cast, or one more than one; null if it is of none.
inline const Node* parameter_of(const Node* node) {
  node = unmoved(node);
  if (node && !is_leaf(*node) && known(*node).kind == Kind::kSum) {
    const Node *const first = input_of(*node, 0), *const second = input_of(*node, 1);
    node = first && second ? nullptr : unmoved(first ? first : second);
  }
  return node && is_leaf(*node) ? node : nullptr;
}

inline bool is_parameter(const Node* node) { return parameter_of(node) != nullptr; }

inline bool is_of_layer(Maker maker) { return Maker::kLayer <= maker && maker <= Maker::kRectified; }

/// Return whether a node's result is an inverse root: a factor of a norm composed of operators.
inline bool inverts_root(const Node* node) {
  node = unmoved(node);
  return node && !is_leaf(*node) && known(*node).kind == Kind::kInvertsRoot;
}

inline bool is_gate(Maker maker) { return maker == Maker::kGate || maker == Maker::kRectified; }

/// Return what made the result of a node. Sums are followed three deep: beyond lies a residual stream.
inline Maker maker_of(const Node* node, int depth = 0) {
  using torch::autograd::generated::MulBackward0;
  constexpr int kDeepest = 3;
  Maker made = Maker::kLayer;
  bool activated = false;  // on the way from the node to where the walk is
  for (int step = 0; step < kLongest; ++step) {
    node = unmoved(node, true);
    if (!node || is_leaf(*node)) return Maker::kOther;
    const Kind kind = known(*node).kind;
    switch (kind) {
      case Kind::kLayer:
        return made;
      case Kind::kBounds:
      case Kind::kSoftmax:
        return activated ? made : Maker::kGate;
      case Kind::kProduct:
      case Kind::kBiasedProduct:
        for (size_t input = kind == Kind::kBiasedProduct ? 1 : 0; input < node->num_outputs(); ++input) {
          const Node* const factor = unmoved(input_of(*node, input));
          if (factor && (is_leaf(*factor) || known(*factor).kind == Kind::kSoftmax)) return made;
        }
        return Maker::kOther;
      case Kind::kScales: {
        const Node *const first = input_of(*node, 0), *const second = input_of(*node, 1);
        if (!first || !second || depth >= kDeepest || typeid(*node) != typeid(MulBackward0)) return Maker::kOther;
        if (is_parameter(first) || is_parameter(second)) {
          node = is_parameter(first) ? second : first;
          continue;
        }
        if (inverts_root(first) || inverts_root(second)) return made;
        const Maker one = maker_of(first, depth + 1), other = maker_of(second, depth + 1);
        if (!is_of_layer(one) || !is_of_layer(other) || !(is_gate(one) || is_gate(other))) return Maker::kOther;
        return one == Maker::kRectified || other == Maker::kRectified ? Maker::kRectified : made;
      }
      case Kind::kActivates:
      case Kind::kRectifies:
        if (!activated) made = kind == Kind::kRectifies ? Maker::kRectified : Maker::kGate;
        activated = true;
        node = input_of(*node, 0);
        continue;
      case Kind::kSum:
      case Kind::kDifference: {
        const Node *const first = input_of(*node, 0), *const second = input_of(*node, 1);
        const auto made_by = [depth](const Node* each) {
          return !each ? Maker::kOther : depth < kDeepest ? maker_of(each, depth + 1) : Maker::kLayer;
        };
        const Maker one = made_by(second), other = made_by(first);
        if (!activated && (one == Maker::kLogarithm || other == Maker::kLogarithm)) return Maker::kLogarithm;
        if (!first || !second) return activated || has_number(*node) ? Maker::kOther : Maker::kMasked;
        if (kind == Kind::kDifference) return Maker::kOther;
        // A bias, as Linear adds to rows that lie apart in memory.
        const bool biased = is_parameter(first) || is_parameter(second);
        const int layers = int{is_of_layer(one)} + int{is_of_layer(other)};
        if (layers < (biased ? 1 : 2)) return Maker::kOther;
        return activated ? made : biased ? Maker::kLayer : Maker::kResidual;
      }
      case Kind::kLogarithm:
        return activated ? Maker::kOther : Maker::kLogarithm;
      case Kind::kExponential:
        return activated ? Maker::kOther : Maker::kExponential;
      case Kind::kMasks:
        return activated ? Maker::kOther : Maker::kMasked;
      default:
        return Maker::kOther;
    }
  }
  return Maker::kOther;
}

/// Return whether a node's result is a parameter of several numbers, which may differ by orders of magnitude.
inline bool is_gain(const Node* node) {
  const Node* const leaf = parameter_of(node);
  if (!leaf || leaf->num_inputs() != 1) return false;
  for (const c10::SymInt& size : leaf->input_metadata(0).shape_as_dim_vector()) {
    if (size != 1) return true;
  }
  return false;
}

/// Return whether the last that made a node's result is a gain, as that of a norm of rows; a bias aside.
inline bool is_gained(const Node* node) {
  using namespace torch::autograd::generated;
  node = unmoved(node, true);
  if (node && typeid(*node) == typeid(AddBackward0)) {
    const Node *const first = input_of(*node, 0), *const second = input_of(*node, 1);
    node = is_parameter(second) ? unmoved(first) : is_parameter(first) ? unmoved(second) : nullptr;
  }
  if (!node) return false;
  if (typeid(*node) == typeid(MulBackward0)) return is_gain(input_of(*node, 0)) || is_gain(input_of(*node, 1));
  return (typeid(*node) == typeid(NativeLayerNormBackward0) || typeid(*node) == typeid(FusedRmsNormBackward0)) &&
         input_of(*node, 1);
}

/// Return what made a tensor, given its node: a gain hides what made the tensor that it multiplies.
inline Maker maker_of_operand(const Node* node) { return is_gained(node) ? Maker::kGained : maker_of(node); }

/// Return the node of a tensor without making one for a view; a view in another dtype has a node of its own.
inline auto node_of(const at::TensorBase& tensor) {
  const at::TensorBase& base = tensor.is_view() ? tensor._base() : tensor;
  return (base.scalar_type() == tensor.scalar_type() ? base : tensor).grad_fn();
}

/// Return whether two tensors of as many elements are multiples of the whole result of one operator.
inline bool same_source(const Node* one, const Node* other, const at::TensorBase& tensor) {
  one = unmoved(one, true);
  if (!one || one != unmoved(other, true) || is_leaf(*one) || one->num_inputs() != 1) return false;
  if (one->input_metadata(0).is_nested_tensor()) return false;
  std::int64_t count = 1;
  for (const c10::SymInt& size : one->input_metadata(0).shape_as_dim_vector()) count *= size.maybe_as_int().value_or(0);
  return count == tensor.numel();
}

/// Return the name of a node or, if it is a view, of the first node before it that is none; empty if there is none.
inline PyObject* name_of(const Node* node) {
  for (int step = 0; node && step < kLongest; ++step) {
    const KnownNode made = known(*node);
    if (!made.name) return PyUnicode_FromString(node->name().c_str());
    if (made.kind != Kind::kView) return Py_NewRef(made.name);
    node = input_of(*node, 0);
  }
  return PyUnicode_FromString("");
}

}  // namespace pac::observer
