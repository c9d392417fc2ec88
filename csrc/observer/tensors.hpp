// The functions of pyactcomp._observer that make or inspect tensors without a dispatch that a callback would observe.
//
// A header, because two files that include torch take twice as long to compile.
#pragma once

#include <ATen/RedispatchFunctions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Type.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <new>

namespace pac::observer {

/// Return whether operators may be transformed, recorded or replaced instead of run; Python then checks more closely.
inline bool special() {
  using c10::DispatchKey;
  // jit's tracer, make_fx before dispatch, and functorch inside a transform.
  for (const auto key : {DispatchKey::Tracer, DispatchKey::PreDispatch, DispatchKey::FuncTorchDynamicLayerFrontMode}) {
    if (c10::impl::tls_is_dispatch_key_included(key)) return true;
  }
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

/// Return the tensor of a Python object, or null with an error set.
inline const at::Tensor* tensor_of(PyObject* object) {
  if (THPVariable_Check(object)) return &THPVariable_Unpack(object);
  PyErr_Format(PyExc_TypeError, "a torch.Tensor was expected, got %s", Py_TYPE(object)->tp_name);
  return nullptr;
}

/// How much there is to decide about a saved tensor.
enum Saving : long {
  kUnclear = 0,   ///< look closely
  kKept = 1,      ///< keep it: no floating-point tensor, a small one, or a leaf
  kConstant = 2,  ///< keep it, as it has no gradient, unless it is a compiled graph's
  kOrdinary = 3,  ///< pack it, unless the model owns its memory or skips the module
};

inline bool is_packed_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

/// Return whether the class of a tensor's Python object is torch.Tensor itself.
inline bool is_plain(const at::TensorBase& tensor) {
  PyObject* const object = THPVariable_Wrap(tensor);
  const bool plain = object && Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
  Py_XDECREF(object);
  return plain;
}

/// Return how much there is to decide about a tensor, in C++ since each question costs 50 ns in Python.
inline Saving saving_of(PyObject* object, const at::Tensor& tensor, std::int64_t min_bytes) {
  if (special() || !THPVariable_CheckExact(object)) return kUnclear;
  if (tensor.layout() != at::kStrided || tensor.is_nested()) return kUnclear;
  if (tensor.scalar_type() == at::kBool) return kUnclear;
  if (!tensor.is_floating_point()) return kKept;
  if (static_cast<std::int64_t>(tensor.nbytes()) < min_bytes) return kKept;
  if (!is_packed_dtype(tensor.scalar_type())) return kUnclear;
  if (!tensor.requires_grad()) return kConstant;
  const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
  if (owner.is_leaf() && owner.requires_grad()) return kKept;
  return tensor.is_neg() || !is_plain(owner) ? kUnclear : kOrdinary;
}

/// layout_key(tensor): return bytes that are equal for tensors of equal shape, strides, dtype and device.
inline PyObject* layout_key(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  try {
    const auto sizes = tensor->sizes(), strides = tensor->strides();
    const std::int64_t kind = static_cast<std::int64_t>(tensor->scalar_type());
    const std::int64_t place = static_cast<std::int64_t>(tensor->device().type()) * 256 + tensor->device().index();
    PyObject* const key = PyBytes_FromStringAndSize(
        nullptr, static_cast<Py_ssize_t>((sizes.size() + strides.size() + 2) * sizeof(std::int64_t)));
    if (!key) return nullptr;
    char* out = PyBytes_AS_STRING(key);
    const auto append = [&out](const std::int64_t* numbers, size_t count) {
      if (count != 0) std::memcpy(out, numbers, count * sizeof(std::int64_t));
      out += count * sizeof(std::int64_t);
    };
    append(sizes.data(), sizes.size());
    append(strides.data(), strides.size());
    append(&kind, 1);
    append(&place, 1);
    return key;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

/// Return a tensor with the same memory and version counter, without the graph: `detach()` without observers.
inline PyObject* bare(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  try {
    const bool plain = THPVariable_CheckExact(object) && !special();
    return THPVariable_Wrap(plain ? tensor->tensor_data() : tensor->detach());
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

/// Releases the GIL for the object's lifetime: an allocation may wait for the device.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

/// Return uninitialised memory on the device of `beside`. Redispatch, because no callback observes a redispatch: boxing
/// the arguments for our callback takes longer than a cached allocation.
inline at::Tensor empty(at::IntArrayRef shape, at::IntArrayRef stride, at::ScalarType dtype, const at::Tensor& beside) {
  const WithoutGil released;
  const auto options = at::TensorOptions().dtype(dtype).device(beside.device());
  if (special() || !(beside.is_cpu() || beside.is_cuda())) return at::empty_strided(shape, stride, options);
  const c10::DispatchKeySet keys(beside.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  return at::redispatch::empty_strided(keys, shape, stride, options);
}

/// buffer(tensor, nbytes): return uninitialised bytes on the device of a tensor.
inline PyObject* buffer(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_Format(PyExc_TypeError, "buffer expects a tensor and a number of bytes, got %zd arguments", count);
    return nullptr;
  }
  const at::Tensor* const tensor = tensor_of(arguments[0]);
  const std::int64_t size = tensor ? PyLong_AsLongLong(arguments[1]) : -1;
  if (PyErr_Occurred()) return nullptr;
  try {
    return THPVariable_Wrap(empty({size}, {1}, at::kByte, *tensor));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

/// empty_as(like, beside): return uninitialised memory with the layout and dtype of `like` on the device of `beside`.
inline PyObject* empty_as(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_Format(PyExc_TypeError, "empty_as expects two tensors, got %zd arguments", count);
    return nullptr;
  }
  const at::Tensor* const like = tensor_of(arguments[0]);
  const at::Tensor* const beside = like ? tensor_of(arguments[1]) : nullptr;
  if (!beside) return nullptr;
  try {
    return THPVariable_Wrap(empty(like->sizes(), like->strides(), like->scalar_type(), *beside));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

/// The version of a tensor when saved, and the version counter, without the tensor.
struct Version {
  PyObject_HEAD c10::VariableVersion counter;
  std::uint32_t saved;
};

inline void version_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Version*>(self)->counter.~VariableVersion();
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* version_saved(PyObject* self, void*) {
  return PyLong_FromUnsignedLong(reinterpret_cast<Version*>(self)->saved);
}

inline PyObject* version_current(PyObject* self, void*) {
  return PyLong_FromUnsignedLong(reinterpret_cast<Version*>(self)->counter.current_version());
}

inline PyObject* version_moved(PyObject* self, void*) {
  const Version& version = *reinterpret_cast<Version*>(self);
  return PyBool_FromLong(version.counter.current_version() != version.saved);
}

inline PyGetSetDef version_attributes[] = {
    {"saved", version_saved, nullptr, "The version that was saved.", nullptr},
    {"current", version_current, nullptr, "The version now.", nullptr},
    {"moved", version_moved, nullptr, "Whether the tensor was written to since.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

inline PyType_Slot version_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(version_dealloc)},
    {Py_tp_getset, version_attributes},
    {0, nullptr},
};

inline PyType_Spec version_spec = {"pyactcomp._observer.Version", sizeof(Version), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, version_slots};

inline PyTypeObject* version_type = nullptr;

inline PyObject* version(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  PyObject* made = version_type->tp_alloc(version_type, 0);
  if (!made) return nullptr;
  Version& held = *reinterpret_cast<Version*>(made);
  new (&held.counter) c10::VariableVersion(torch::autograd::impl::version_counter(*tensor));
  held.saved = held.counter.current_version();
  return made;
}

}  // namespace pac::observer
