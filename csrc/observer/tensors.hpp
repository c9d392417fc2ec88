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
#include <exception>

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

/// Return whether the class of a tensor's Python object is torch.Tensor or Parameter.
inline bool is_exact(const at::TensorBase& tensor) {
  PyObject* const object = THPVariable_Wrap(tensor);
  const bool exact = object && THPVariable_CheckExact(object);
  Py_XDECREF(object);
  return exact;
}

/// Return a tensor with the same memory and version counter, without the graph: `detach()` without observers.
inline at::Tensor bare_tensor(const at::Tensor& tensor) {
  const bool plain = !special() && tensor.layout() == at::kStrided && is_exact(tensor);
  return plain ? tensor.tensor_data() : tensor.detach();
}

inline PyObject* bare(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  try {
    return THPVariable_Wrap(bare_tensor(*tensor));
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

/// Return uninitialised memory on a device. Redispatch, because no callback observes a redispatch: boxing the arguments
/// for our callback takes longer than a cached allocation.
inline at::Tensor empty_with_gil(at::IntArrayRef shape, at::IntArrayRef stride, at::ScalarType dtype,
                                 c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (special() || !(device.is_cpu() || device.is_cuda())) return at::empty_strided(shape, stride, options);
  const c10::DispatchKeySet keys(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  return at::redispatch::empty_strided(keys, shape, stride, options);
}

/// Return uninitialised memory on the device of `beside`.
inline at::Tensor empty(at::IntArrayRef shape, at::IntArrayRef stride, at::ScalarType dtype, const at::Tensor& beside) {
  const WithoutGil released;
  return empty_with_gil(shape, stride, dtype, beside.device());
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

/// empty_like(tensor): return uninitialised memory with the layout and dtype of a dense tensor.
inline PyObject* empty_like(PyObject*, PyObject* object) {
  const at::Tensor* const tensor = tensor_of(object);
  if (!tensor) return nullptr;
  try {
    return THPVariable_Wrap(empty(tensor->sizes(), tensor->strides(), tensor->scalar_type(), *tensor));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

}  // namespace pac::observer
