// Stored forms: the objects that autograd holds in place of saved tensors. Each can be restored any number of times.
//
// None of them takes part in Python's garbage collection, as they lead to no cycle: a form holds older forms, kernels,
// and tensors without their graph. Subclasses in Python, which hold more, do.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "engine/storing.hpp"

namespace pac::engine {

/// The shape and strides of a tensor.
struct Layout {
  c10::SmallVector<std::int64_t, 5> sizes, strides;

  static Layout of(const at::TensorBase& tensor) {
    return {{tensor.sizes().begin(), tensor.sizes().end()}, {tensor.strides().begin(), tensor.strides().end()}};
  }
  static Layout contiguous(at::IntArrayRef sizes) {
    Layout made{{sizes.begin(), sizes.end()}, {}};
    made.strides.resize(sizes.size());
    std::int64_t numel = 1;
    for (size_t dim = sizes.size(); dim-- > 0; numel *= sizes[dim]) made.strides[dim] = numel;
    return made;
  }
  /// Return where the elements of a tensor lie, in the order of their memory and in as few dimensions as possible: all
  /// views of the same elements have one such layout. Repeated elements, of a stride of 0, count once.
  static Layout in_memory_order(const at::TensorBase& tensor) {
    c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 5> steps;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) != 1 && tensor.stride(dim) != 0) steps.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
    std::sort(steps.rbegin(), steps.rend());
    Layout made;
    for (const auto& [step, length] : steps) {
      if (!made.sizes.empty() && made.strides.back() == step * length) {
        made.sizes.back() *= length;
        made.strides.back() = step;
      } else {
        made.sizes.push_back(length);
        made.strides.push_back(step);
      }
    }
    return made;
  }
  /// Return where the elements of a view lie once those of this layout, in the order of their memory, follow each other
  /// without gaps; nothing if a dimension of the view runs across a gap.
  std::optional<Layout> without_gaps(const Layout& view) const {
    const Layout dense = contiguous(sizes);
    Layout made = view;
    for (size_t dim = 0; dim < view.sizes.size(); ++dim) {
      const std::int64_t step = view.strides[dim], steps = view.sizes[dim] - 1;
      if (steps == 0 || step == 0) continue;
      size_t of = 0;
      while (of < sizes.size() && strides[of] > step) ++of;
      if (of == sizes.size() || step % strides[of] != 0 || step / strides[of] * steps >= sizes[of]) return std::nullopt;
      made.strides[dim] = step / strides[of] * dense.strides[of];
    }
    return made;
  }
  bool operator==(const Layout& other) const { return sizes == other.sizes && strides == other.strides; }
  bool fits(const at::TensorBase& tensor) const {
    return tensor.sizes().equals(sizes) && tensor.strides().equals(strides);
  }
};

inline Ref integers(at::IntArrayRef values) {
  Ref made = checked(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
  }
  return made;
}

/// Return the layout as Python knows it, a `codec.layouts.Layout`.
inline PyObject* layout_object(const Layout& layout) {
  return rare("layout", {integers(layout.sizes).get(), integers(layout.strides).get()}).release();
}

inline Layout layout_in(PyObject* object) {
  Layout layout;
  const auto read = [](PyObject* numbers, c10::SmallVector<std::int64_t, 5>& into) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) into.push_back(integer(PyTuple_GET_ITEM(numbers, i)));
  };
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) < 2 || !PyTuple_Check(PyTuple_GET_ITEM(object, 0)) ||
      !PyTuple_Check(PyTuple_GET_ITEM(object, 1))) {
    PyErr_Format(PyExc_TypeError, "a Layout was expected, got %s", Py_TYPE(object)->tp_name);
    throw PythonError();
  }
  read(PyTuple_GET_ITEM(object, 0), layout.sizes);
  read(PyTuple_GET_ITEM(object, 1), layout.strides);
  return layout;
}

/// A view of a restored tensor. Autograd and observers do not see it: the restored tensor has no graph.
inline at::Tensor view_of(const at::Tensor& restored, const Layout& layout, std::int64_t offset) {
  if (observer::special()) return restored.as_strided(layout.sizes, layout.strides, offset);
  const at::AutoDispatchBelowADInplaceOrView below;
  return restored.as_strided(layout.sizes, layout.strides, offset);
}

/// The memory of a tensor, without holding it.
class Memory {
 public:
  Memory() = default;
  explicit Memory(const at::TensorBase& tensor) {
    if (tensor.has_storage()) storage_ = tensor.storage().getWeakStorageImpl();
  }
  explicit operator bool() const { return !storage_.expired(); }
  /// Return whether a tensor has the same, living memory.
  bool is_of(const at::TensorBase& tensor) const {
    return *this && tensor.has_storage() && storage_._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
  }
  /// Return the memory, or an empty storage once it is freed.
  c10::Storage lock() const { return c10::Storage(storage_.lock()); }
  const c10::StorageImpl* address() const { return storage_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
};

inline std::uint32_t version_of(const at::Tensor& tensor) {
  return torch::autograd::impl::version_counter(tensor).current_version();
}

/// The version of a saved tensor, and its counter: tells of later writes without holding the tensor.
struct Version {
  c10::VariableVersion counter;
  std::uint32_t saved = 0;
  at::ScalarType dtype = at::kFloat;
  c10::Device device = at::kCPU;

  Version() = default;
  explicit Version(const at::Tensor& tensor)
      : counter(torch::autograd::impl::version_counter(tensor)),
        saved(counter.current_version()),
        dtype(tensor.scalar_type()),
        device(tensor.device()) {}
  bool moved() const { return counter.current_version() != saved; }
  /// Raise autograd's own error if the tensor, of this shape, was written to since.
  void check(at::IntArrayRef shape) const {
    if (!moved()) return;
    const Ref current(PyLong_FromUnsignedLong(counter.current_version())), expected(PyLong_FromUnsignedLong(saved));
    const Ref kind(dtype_object(dtype)), place = checked(THPDevice_New(device));
    rare("refuse_modified", {kind.get(), place.get(), integers(shape).get(), current.get(), expected.get()});
  }
};

/// Counts of this process, with the GIL.
struct Counts {
  long alive = 0;       ///< stored forms and recipes
  long decoded = 0;     ///< regions decoded
  long recomputed = 0;  ///< recipes run
};

inline Counts& counts() {
  static Counts instance;
  return instance;
}

/// The body of every stored form. All that are alive form a ring, with the GIL: Python's collector does not know them.
struct Stored {
  PyObject* self = nullptr;
  bool written_over = false;  ///< whether it is autograd's copy of what an operator in place has written over since
  Stored() {
    ++counts().alive;
    if (newest_) {
      before_ = newest_;
      after_ = newest_->after_;
    }
    before_->after_ = after_->before_ = newest_ = this;
  }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;
  virtual ~Stored() {
    if (handle_) *handle_ = nullptr;
    --counts().alive;
    before_->after_ = after_;
    after_->before_ = before_;
    if (newest_ == this) newest_ = before_ == this ? nullptr : before_;
  }
  /// Return a tensor with the values, layout, dtype and device of the saved one.
  virtual at::Tensor restore() = 0;
  /// Raise autograd's own error if the saved tensor was written to since; `restore` does so, too.
  virtual void check() const {}

  /// Return whether the object may be referred to: it is neither being made nor being freed.
  bool is_whole() const { return self && Py_REFCNT(self) > 0; }

  /// Return what becomes null when the form is freed. Cheaper than a weak reference of Python's, which the collector
  /// visits.
  const std::shared_ptr<Stored*>& handle() {
    if (!handle_) handle_ = std::make_shared<Stored*>(this);
    return handle_;
  }

  /// Return all that are alive.
  static Ref all() {
    Ref found = checked(PyList_New(0));
    if (!newest_) return found;
    const Stored* each = newest_;
    do {
      if (each->is_whole() && PyList_Append(found.get(), each->self) != 0) throw PythonError();
      each = each->before_;
    } while (each != newest_);
    return found;
  }

 private:
  static inline Stored* newest_ = nullptr;
  Stored *before_ = this, *after_ = this;
  std::shared_ptr<Stored*> handle_;
};

/// Return the body of a stored form of this library, or null for other objects.
Stored* stored_in(PyObject* object);

/// Restore any stored form, also one of a class in Python.
inline at::Tensor restore(PyObject* form) {
  if (Stored* const own = stored_in(form)) return own->restore();
  static PyObject* const name = PyUnicode_InternFromString("restore");
  const Ref made = checked(PyObject_CallMethodNoArgs(form, name));
  return tensor_in(made.get());
}

inline PyObject* restore_method(PyObject* self, PyObject*) {
  return guarded([&] { return THPVariable_Wrap(body<Stored>(self).restore()); });
}

struct Shared;
struct Region;
struct Kept;

/// A tensor's place in memory.
struct Span {
  const void* address;
  std::int64_t numel;
  bool operator==(const Span& other) const { return address == other.address && numel == other.numel; }
};

struct SpanHash {
  size_t operator()(const Span& place) const {
    return std::hash<const void*>()(place.address) * 31 + std::hash<std::int64_t>()(place.numel);
  }
};

/// What the stored forms of one forward know of each other, without holding one: a form takes itself out when freed.
struct Sharing {
  PyObject* self = nullptr;
  std::unordered_map<Span, Region*, SpanHash> regions;
  /// Tensors kept exact for their reader, by their memory.
  std::unordered_map<const c10::StorageImpl*, Kept*> held;
  /// The forms restored last, whose restored tensors may still be alive: each until the last operator to share it ran.
  std::array<Shared*, 2> recent{};
};

/// A tensor held unpacked, with the version check that autograd omits under hooks.
///
/// A leaf is held by itself, as in torch: ZeRO-3 gathers a parameter for a forward, frees the memory by assigning to
/// `.data`, and gathers the parameter again for backward. The memory of any other tensor is held without the graph: an
/// operator that saves its own output would otherwise hold itself, out of gc's reach.
struct Kept : Stored {
  Buffer buffer;
  Version seen;
  Memory memory;
  bool leaf = false;
  Ref sharing;  ///< of a tensor kept exact for its reader: other readers of the same memory share it
  const c10::StorageImpl* place = nullptr;

  ~Kept() override {
    if (!sharing) return;
    auto& held = body<Sharing>(sharing.get()).held;
    const auto entry = held.find(place);
    if (entry != held.end() && entry->second == this) held.erase(entry);
  }

  /// Let other readers of the same memory find this form.
  void share(const Ref& with) {
    sharing = with;
    place = memory.address();
    body<Sharing>(with.get()).held[place] = this;
  }

  void hold(const at::Tensor& tensor) {
    seen = Version(tensor);
    leaf = tensor.is_leaf() && tensor.has_storage();
    buffer = Buffer(tensor.is_leaf() ? tensor : observer::bare_tensor(tensor));
    memory = Memory(tensor);
  }
  /// Return whether a tensor has the memory held, with the elements saved.
  bool is_of(const at::Tensor& tensor) const { return memory.is_of(tensor) && version_of(tensor) == seen.saved; }
  bool unchanged() const { return !seen.moved(); }
  Layout layout() const {
    return {{buffer.sizes().begin(), buffer.sizes().end()}, {buffer.strides().begin(), buffer.strides().end()}};
  }
  /// Let the memory leave the device. From then on the form holds the memory as it was saved: backward does not see a
  /// later assignment to a leaf's `.data`.
  void leave(Tape& tape, std::int64_t stream) {
    buffer.leave(tape, stream);
    if (buffer.may_be_away()) leaf = false;
  }
  at::Tensor restore() override {
    if (buffer && !unchanged()) {
      const Ref tensor(THPVariable_Wrap(buffer.tensor())), expected(PyLong_FromUnsignedLong(seen.saved));
      rare("check_version", {tensor.get(), expected.get()});
    }
    return buffer.tensor();
  }
};

/// Base of stored forms with only the version counter of the saved tensor, so the tensor can be freed.
struct Versioned : Stored {
  Version seen;
  at::Tensor restore() override {
    PyErr_SetString(PyExc_NotImplementedError, "a version alone restores no tensor");
    throw PythonError();
  }
};

/// A saved tensor with the values of another stored one, such as an equal cast, but a version counter of its own.
struct Same : Versioned {
  Ref stored;
  c10::SmallVector<std::int64_t, 5> shape;

  void hold(const Ref& form, const at::Tensor& tensor) {
    seen = Version(tensor);
    shape = Layout::of(tensor).sizes;
    stored = form;
  }
  void check() const override { seen.check(shape); }
  at::Tensor restore() override {
    check();
    return engine::restore(stored.get());
  }
};

/// Raise PyactcompError if the table of readers says that the running node needs more than a form, and warn, once, if
/// backward records a graph of gradients that are off.
void check_reader(PyObject* form, long need, at::IntArrayRef shape);

/// A saved tensor whose values backward never reads, only the shape.
struct Shapeless : Versioned {
  Layout layout;
  Ref form;
  /// Return uninitialised memory in backward; elsewhere NaN, so that nobody mistakes garbage for values.
  at::Tensor restore() override {
    seen.check(layout.sizes);
    check_reader(form.get(), kShape, layout.sizes);
    // All elements in the saved layout: CUDA's kernels copy an input with gaps or repeats.
    const auto options = at::TensorOptions().dtype(seen.dtype).device(seen.device);
    const at::Tensor out = at::empty_strided(layout.sizes, layout.strides, options);
    if (!torch::autograd::get_current_node()) out.fill_(std::numeric_limits<double>::quiet_NaN());
    return out;
  }
};

/// Autocast's copy of a parameter, cast again from the live parameter.
struct Recast : Versioned {
  Layout layout;
  std::int64_t offset = 0;
  at::Tensor parameter;
  std::uint32_t of_parameter = 0;
  Ref names;  ///< names parameters in errors

  at::Tensor restore() override {
    seen.check(layout.sizes);
    if (version_of(parameter) != of_parameter) {
      const Ref leaf(THPVariable_Wrap(parameter)), expected(PyLong_FromUnsignedLong(of_parameter));
      const Ref kind(dtype_object(seen.dtype));
      rare("refuse_changed_parameter", {leaf.get(), expected.get(), kind.get(), names.get()});
    }
    return view_of(parameter.detach().to(seen.dtype), layout, offset);
  }
};

}  // namespace pac::engine
