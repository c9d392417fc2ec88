// What the engine asks of a saved tensor: how the running operator reads it, and what made it.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <string>
#include <type_traits>
#include <utility>

#include "engine/python.hpp"
#include "observer/nodes.hpp"

namespace pac::observer {

/// A reading and the facts that its form depends on; no reading outside of operators.
struct Facts {
  engine::Ref reading;
  PyObject *maker = nullptr, *partner = nullptr;  ///< members of the rule's enumerations, borrowed
  /// Whether the same object tells the reading of the next such call: not of functions written in Python.
  bool repeats = false;
};

/// Count a tensor that the running operator saves.
void note_save();

/// Return how the running operator reads a tensor that it saves, and the rest of the facts.
Facts facts_of(const at::Tensor& tensor);

/// Return the tensor that the running operator writes to in place, or an undefined one.
at::Tensor written();

/// Return the name of the node running in backward if the table gives it a need above `need`, else nothing.
engine::Ref contradiction_of(long need);

/// Return the first node, from `node` on, that is no view, or null.
inline const Node* producer(const Node* node) {
  for (int step = 0; node && step < kLongest; ++step) {
    if (known(*node).kind != Kind::kView) return node;
    node = input_of(*node, 0);
  }
  return nullptr;
}

inline bool is_cast(const Node& node) { return typeid(node) == typeid(torch::autograd::generated::ToCopyBackward0); }

/// Return the dtype of a cast's source.
inline at::ScalarType source_dtype(const Node& cast) {
  return static_cast<const torch::autograd::generated::ToCopyBackward0&>(cast).self_options.dtype().toScalarType();
}

/// Return the leaf that a cast reads, or an undefined tensor.
inline at::Tensor cast_leaf(const Node& cast) {
  const Node* const source = input_of(cast, 0);
  const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(source);
  return leaf ? leaf->variable : at::Tensor();
}

/// Return whether torch.compile's runtime may call the running hook: where its module is loaded, and a caller is of it.
inline bool may_be_of_compiled_graph() {
  static PyObject* const name = PyUnicode_InternFromString("torch._functorch.aot_autograd");
  if (!PyDict_GetItemWithError(PyImport_GetModuleDict(), name)) return false;
  engine::Ref frame = engine::Ref::borrowed(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  // Two of Python's own pack a tensor where operators may be transformed; one is torch's apply.
  constexpr int kCallers = 4;
  for (int step = 0; frame && step < kCallers; ++step) {
    auto* const running = reinterpret_cast<PyFrameObject*>(frame.get());
    const engine::Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(running)));
    const engine::Ref file(PyObject_GetAttrString(code.get(), "co_filename"));
    const char* const text = file ? PyUnicode_AsUTF8(file.get()) : nullptr;
    if (text && std::string(text).find("_functorch") != std::string::npos) return true;
    frame = engine::Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(running)));
  }
  return false;
}

}  // namespace pac::observer
