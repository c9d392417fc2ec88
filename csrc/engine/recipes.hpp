// Recipes: how backward recomputes an operator's output from the operator's stored operands.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <typeindex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/regions.hpp"
#include "observer/nodes.hpp"

namespace pac::engine {

/// A weak reference to a stored form.
class Weak {
 public:
  explicit Weak(PyObject* form) {
    if (Stored* const own = stored_in(form)) {
      handle_ = own->handle();
    } else {
      reference_ = checked(PyWeakref_NewRef(form, nullptr));
    }
  }
  /// Return the form, or none once it is freed.
  Ref lock() const {
    if (handle_) return *handle_ && (*handle_)->is_whole() ? Ref::borrowed((*handle_)->self) : Ref();
    Ref form = checked(PyObject_CallNoArgs(reference_.get()));
    return form.get() == Py_None ? Ref() : form;
  }

 private:
  std::shared_ptr<Stored*> handle_;  ///< of a form of this library
  Ref reference_;                    ///< to a form of a class in Python
};

/// A stored operand, or none.
///
/// The operator's node holds its form until the node's backward has run; the memory of a leaf, which is read whatever
/// the leaf's `.data` becomes, is held by the recipe.
struct Operand {
  Ref form;
  bool leaf = false;
  explicit operator bool() const { return static_cast<bool>(form); }
};

/// Return the restored operands' function in a dtype, in any layout. Runs without the GIL and without autograd.
using Compute = std::function<at::Tensor(at::ScalarType, at::ArrayRef<at::Tensor>)>;

struct FromRecipe;

/// How backward recomputes an output: by `native` from stored operands, or by a function of Python.
///
/// Without either the output is stored, but its equal casts only once. A recipe never holds the output, nor a node: the
/// node's backward frees the saved tensors, and to free a long chain of nodes overflows the stack.
struct Recipe {
  /// A stored cast of the output, or of a view of it.
  struct Copy {
    at::ScalarType dtype;
    std::int64_t offset;
    Layout layout;
    Weak form;
  };

  PyObject* self = nullptr;
  Compute native;
  Ref python;          ///< maps a dtype to a tensor with the output's values and shape
  int depth = 1;       ///< length of the longest chain of recipes, this one included
  bool casts = true;   ///< whether casts of the output are recomputed too
  bool exact = false;  ///< whether the recomputed output is the output to the bit
  at::ScalarType dtype = at::kFloat;
  Layout layout;
  FromRecipe* latest = nullptr;  ///< takes itself out when freed
  std::vector<Copy> copies;

  Recipe() { ++counts().alive; }
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;
  ~Recipe() { --counts().alive; }

  /// Describe the output, dense and the owner of its memory.
  void describe(const at::Tensor& out) {
    dtype = out.scalar_type();
    layout = Layout::of(out);
    memory_ = Memory(out);
    version_ = version_of(out);
    out_ = WeakTensor(out.getIntrusivePtr());
  }
  void read_stored(const Operand& operand) {
    stored_.push_back({Weak(operand.form.get()), operand.leaf ? operand.form : Ref()});
  }
  /// Note a tensor that the computation holds: a write before backward raises autograd's error.
  void read_unpacked(const at::Tensor& operand) {
    unpacked_.push_back({std::make_unique<const Read>(operand), Version(operand)});
  }
  /// Let the computation read a tensor that is given to it: after restored operands, or to Python before the dtype.
  void read_stored(const at::Tensor& operand) {
    read_unpacked(operand);
    ++given_;
  }
  std::vector<at::Tensor> unpacked() const {
    std::vector<at::Tensor> all;
    for (const auto& [read, seen] : unpacked_) all.push_back(read->tensor());
    return all;
  }

  /// Return the stored operands, to hold as long as `compute` may be called; null for each that backward has freed.
  std::vector<Ref> forms() const {
    std::vector<Ref> all;
    all.reserve(stored_.size());
    for (const auto& [weak, held] : stored_) all.push_back(weak.lock());
    return all;
  }

  /// Return whether the output can be recomputed: not once backward has freed an operand.
  bool computes() const {
    if (!native && !python) return false;
    for (const Ref& form : forms()) {
      if (!form) return false;
    }
    return true;
  }

  /// Return whether a tensor still equals the recomputed output: the same memory, and no write since.
  bool serves(const at::Tensor& tensor) const { return memory_.is_of(tensor) && version_of(tensor) == version_; }

  /// Return the stored form of an equal cast, or none.
  Ref copy_like(const at::Tensor& copy) const {
    for (const Copy& each : copies) {
      const bool equal = each.dtype == copy.scalar_type() && each.offset == copy.storage_offset();
      if (!equal || !each.layout.fits(copy)) continue;
      if (Ref alive = each.form.lock()) return alive;
    }
    return {};
  }

  /// Return the output while it is alive.
  at::Tensor output() const {
    auto alive = out_.lock();
    return alive ? at::Tensor(std::move(alive)) : at::Tensor();
  }

  /// Recompute the output in the original layout, or raise autograd's error if an operand was written to.
  ///
  /// The layout matters: views of the output use its strides, and following operators sum in memory order.
  at::Tensor compute(at::ScalarType wanted) const {
    at::Tensor made;
    try {
      made = run(wanted);
    } catch (const PythonError&) {
      if (!PyErr_ExceptionMatches(constant("MODIFIED_ERROR"))) throw;
      const Ref error = taken_error();
      // Plain torch would read the saved output, not the operands.
      const at::Tensor out = output();
      if (!out.defined() || version_of(out) != version_) rare("refuse_unheld_output", {error.get()});
      made = observer::bare_tensor(out).to(wanted);
    }
    if (made.strides().equals(layout.strides)) return made;
    return observer::empty(layout.sizes, layout.strides, made.scalar_type(), made).copy_(made);
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Source {
    Weak form;
    Ref held;
  };
  std::vector<Source> stored_;
  struct Unpacked {
    std::unique_ptr<const Read> read;
    Version seen;
  };
  std::vector<Unpacked> unpacked_;  ///< first those that are given to the computation
  std::size_t given_ = 0;
  Memory memory_;
  std::uint32_t version_ = 0;
  WeakTensor out_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};

  at::Tensor run(at::ScalarType wanted) const {
    for (const auto& [read, seen] : unpacked_) {
      if (!seen.moved()) continue;
      const Ref object(THPVariable_Wrap(read->tensor())), expected(PyLong_FromUnsignedLong(seen.saved));
      rare("check_version", {object.get(), expected.get()});
    }
    if (python) {
      const Ref kind(dtype_object(wanted)), given = checked(PyTuple_New(static_cast<Py_ssize_t>(given_)));
      for (std::size_t i = 0; i < given_; ++i) {
        PyTuple_SET_ITEM(given.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(unpacked_[i].read->tensor()));
      }
      return tensor_in(rare("recompute", {python.get(), given.get(), kind.get()}).get());
    }
    std::vector<at::Tensor> operands;
    for (const Ref& form : forms()) operands.push_back(restore(form.get()));
    for (std::size_t i = 0; i < given_; ++i) operands.push_back(unpacked_[i].read->tensor());
    const at::NoGradGuard unrecorded;
    const c10::impl::ExcludeDispatchKeyGuard as_written(c10::autocast_dispatch_keyset);
    const observer::WithoutGil released;
    return native(wanted, operands).to(wanted);
  }
};

/// A saved tensor recomputed in backward from a recipe: the recipe's output, or a cast of it.
struct FromRecipe : Shared {
  Ref recipe;
  std::vector<Ref> forms;  ///< the stored forms that the recipe reads
  Version seen;
  at::ScalarType dtype = at::kFloat;
  bool checks = false;  ///< casts have version counters of their own: `Same` around this form checks them

  /// Describe the recipe's output in a dtype, saved as `whole` on a stream.
  void describe(const Ref& how, at::ScalarType wanted, const at::Tensor& whole, std::int64_t current,
                const Ref& shared) {
    Recipe& source = body<Recipe>(how.get());
    recipe = how;
    forms = source.forms();
    layout = source.layout;
    dtype = wanted;
    index = whole.is_cuda() ? whole.get_device() : -1;
    stream = current;
    sharing = shared;
    checks = wanted == source.dtype;
    if (checks) seen = Version(whole);
    source.latest = this;
  }
  ~FromRecipe() override {
    if (recipe && body<Recipe>(recipe.get()).latest == this) body<Recipe>(recipe.get()).latest = nullptr;
  }
  void check() const override {
    if (checks) seen.check(layout.sizes);
  }
  at::Tensor restore() override {
    check();
    if (!body<Recipe>(recipe.get()).exact) check_reader(constants().as_codes, kCodes, layout.sizes);
    return Shared::restore();
  }
  at::Tensor make() override {
    ++counts().recomputed;
    return body<Recipe>(recipe.get()).compute(dtype);
  }
};

/// The nodes whose results may be recomputed: classes of C++, and of functions written in Python; with the GIL.
struct Offering {
  std::unordered_set<std::type_index> nodes;
  std::unordered_set<PyTypeObject*> functions;  ///< holds a reference to each
};

inline Offering& offering() {
  static Offering& instance = *std::make_unique<Offering>().release();
  return instance;
}

/// Return whether a recipe may recompute a node's result.
inline bool offers(const observer::Node& node) {
  if (observer::is_leaf(node)) return false;
  if (observer::known(node).name) return offering().nodes.count(typeid(node)) != 0;
  return offering().functions.count(observer::class_of_function(node)) != 0;
}

/// Return the dict that goes with a node; Python has it as `metadata`.
inline PyObject* metadata_of(const observer::Node& node) {
  auto* const metadata = const_cast<observer::Node&>(node).metadata();
  return static_cast<torch::autograd::PyAnomalyMetadata*>(metadata)->dict();
}

/// The name of a recipe among the metadata of its node, as in engine/marks.py.
inline PyObject* recipe_name() {
  static PyObject* const name = PyUnicode_InternFromString("pyactcomp_recipe");
  return name;
}

/// Return the recipe offered on a node, or none.
inline Ref recipe_on(const observer::Node& node) {
  return Ref::borrowed(PyDict_GetItemWithError(metadata_of(node), recipe_name()));
}

/// Let operators that save a node's result, a view or autocast's cast of it store a recipe; the node holds the recipe.
inline void offer(observer::Node& node, const Ref& recipe) {
  if (observer::known(node).name) {
    offering().nodes.insert(typeid(node));
  } else if (PyTypeObject* const type = observer::class_of_function(node); offering().functions.insert(type).second) {
    Py_INCREF(type);
  }
  if (PyDict_SetItem(metadata_of(node), recipe_name(), recipe.get()) != 0) throw PythonError();
}

/// Return a recipe that computes an output from stored operands. For a function in C++: make it after the node has
/// saved its operands, and offer it.
Ref recipe_for(const at::Tensor& out, Compute compute, const std::vector<Operand>& operands, bool exact);

}  // namespace pac::engine
