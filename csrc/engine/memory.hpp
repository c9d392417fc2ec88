// Questions about a tensor to be packed: who owns its memory, how its elements lie there, and what of it is exact.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/forms.hpp"
#include "engine/python.hpp"
#include "observer/facts.hpp"

namespace pac::engine {

inline bool is_packed_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble ||
         dtype == at::kBool;
}

/// Return whether a wider dtype represents every value of a dtype exactly.
inline bool is_exact_cast(at::ScalarType from, at::ScalarType to) {
  const bool half = from == at::kBFloat16 || from == at::kHalf;
  return (half && (to == at::kFloat || to == at::kDouble)) || (from == at::kFloat && to == at::kDouble);
}

/// Return whether elements may overlap in memory: a stride is below the extent of the dimensions of smaller strides.
inline bool overlaps(const Layout& layout) {
  c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 5> steps;
  for (size_t dim = 0; dim < layout.sizes.size(); ++dim) {
    if (layout.sizes[dim] != 1) steps.emplace_back(layout.strides[dim], layout.sizes[dim]);
  }
  std::sort(steps.begin(), steps.end());
  std::int64_t extent = 1;
  for (const auto& [step, length] : steps) {
    if (step < extent) return true;
    extent = step * (length - 1) + extent;
  }
  return false;
}

/// The memory of the parameters and buffers of a model, by address.
class Owned {
 public:
  /// Return whether the model owns the memory of a tensor. FSDP frees a parameter's memory, and another tensor may get
  /// the address.
  bool owns(const at::Tensor& tensor, PyObject* module) {
    if (!known_) collect(module);
    if (!tensor.has_storage()) return false;
    const void* const address = tensor.storage().data();
    const auto owner = owners_.find(address);
    return address && owner != owners_.end() && owner->second.storage().data() == address;
  }

 private:
  /// Look through a module and all inside it, in each forward, since parameters and buffers may change.
  void collect(PyObject* root) {
    known_ = true;
    const Ref parameters(PyUnicode_InternFromString("_parameters")), buffers(PyUnicode_InternFromString("_buffers"));
    const Ref modules(PyUnicode_InternFromString("_modules"));
    std::vector<Ref> left;
    std::unordered_set<PyObject*> seen{Py_None, root};
    if (root != Py_None) left.push_back(Ref::borrowed(root));
    while (!left.empty()) {
      const Ref module = std::move(left.back());
      left.pop_back();
      for (const Ref& tensors : {parameters, buffers}) {
        each_value(module, tensors, [this](PyObject* tensor) { add(tensor); });
      }
      each_value(module, modules, [&](PyObject* inner) {
        if (seen.insert(inner).second) left.push_back(Ref::borrowed(inner));
      });
    }
  }

  template <class Function>
  static void each_value(const Ref& module, const Ref& mapping, const Function& function) {
    const Ref values = checked(PyMapping_Values(checked(PyObject_GetAttr(module.get(), mapping.get())).get()));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values.get()); ++i) function(PyList_GET_ITEM(values.get(), i));
  }

  void add(PyObject* given) {
    if (given == Py_None) return;
    const Ref object = THPVariable_CheckExact(given) ? Ref::borrowed(given) : rare("owned_tensor", {given});
    if (object.get() == Py_None) return;
    const at::Tensor& tensor = tensor_in(object.get());
    if (tensor.layout() == at::kStrided && tensor.has_storage()) owners_[tensor.storage().data()] = tensor;
  }

  bool known_ = false;
  std::unordered_map<const void*, at::Tensor> owners_;
};

/// A tensor with its Python object.
struct Given {
  PyObject* object;
  const at::Tensor& tensor;
};

/// Return the tensor with each expanded dimension (stride 0) narrowed to one element.
inline at::Tensor without_expanded(const at::Tensor& tensor, Layout layout) {
  bool expanded = false;
  for (size_t dim = 0; dim < layout.sizes.size(); ++dim) {
    if (layout.strides[dim] != 0 || layout.sizes[dim] <= 1) continue;
    layout.sizes[dim] = 1;
    expanded = true;
  }
  if (!expanded) return tensor;
  return observer::bare_tensor(tensor).as_strided(layout.sizes, layout.strides, tensor.storage_offset());
}

/// Return whether the base of a view takes fewer bytes than the view's elements, which overlap.
inline bool holds_view(const at::Tensor& base, const at::Tensor& view) {
  constexpr std::int64_t kLargestBase = 4;  // in sizes of the view; codes are a quarter of what would be kept
  return observer::is_exact(base) && base.scalar_type() == view.scalar_type() && base.is_alias_of(view) &&
         base.numel() <= kLargestBase * view.numel() && is_dense(base);
}

inline bool is_parameter(const at::TensorBase& owner) {
  const Ref object(THPVariable_Wrap(owner));
  if (Py_TYPE(object.get()) == reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
  return PyObject_IsInstance(object.get(), ParameterClass) == 1;
}

/// Return whether casting a parameter again gives a copy or its base: same layout, never written to.
inline bool is_fresh_cast(const at::Tensor& copy, const at::Tensor& parameter, const observer::Node& cast) {
  const at::TensorBase& whole = copy.is_view() ? copy._base() : copy;
  // A cast keeps the strides of a dense tensor unless a memory format was requested.
  return whole.grad_fn().get() == &cast && whole.unsafeGetTensorImpl()->version_counter().current_version() == 0 &&
         whole.scalar_type() == copy.scalar_type() && whole.storage_offset() == 0 &&
         whole.sizes() == parameter.sizes() && whole.strides() == parameter.strides() &&
         parameter.device() == copy.device() && observer::is_exact(parameter) && is_dense(parameter);
}

}  // namespace pac::engine
