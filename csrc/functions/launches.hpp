// The launches of the Triton kernels of a fused function.
#pragma once

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/hooks.hpp"

namespace pac::functions {

using engine::checked, engine::Ref;

/// A tuple of what a kernel is given.
class Arguments {
 public:
  explicit Arguments(Py_ssize_t size) : tuple_(checked(PyTuple_New(size))) {}
  Arguments& add(const at::Tensor& tensor) { return add_object(THPVariable_Wrap(tensor)); }
  Arguments& add(long long number) { return add_object(PyLong_FromLongLong(number)); }
  Arguments& add(double number) { return add_object(PyFloat_FromDouble(number)); }
  PyObject* get() const { return tuple_.get(); }

 private:
  Ref tuple_;
  Py_ssize_t next_ = 0;
  Arguments& add_object(PyObject* object) {
    if (!object) throw engine::PythonError();
    PyTuple_SET_ITEM(tuple_.get(), next_++, object);
    return *this;
  }
};

/// The kernels of a function and how they are launched, which Python plans once for each number of elements. With the
/// GIL.
class Kernels {
 public:
  Ref planner;  ///< maps a kernel, elements, flags, whether codes are dropped and a device to a plan
  Ref runs_on;  ///< maps a device to whether the kernels serve it

  Kernels() = default;
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;
  ~Kernels() {
    const engine::WithGil held;  // the last may be a node that is freed by a thread of autograd's
    plans_.clear();
    planner = runs_on = Ref();
  }

  /// Return whether the kernels serve a tensor of torch's own class, where no operator is transformed.
  bool serves(const at::Tensor& x) {
    const at::ScalarType dtype = x.scalar_type();
    const bool reads = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
    if (!reads || x.numel() == 0 || at::isBatchedTensor(x) || !(x.is_cuda() || x.is_cpu())) return false;
    const auto [known, fresh] = devices_.try_emplace(index_of(x), false);
    if (fresh) {
      devices_.erase(known);  // if Python raises, it is asked again
      const Ref device = checked(THPDevice_New(x.device()));
      const Ref answer = checked(PyObject_CallOneArg(runs_on.get(), device.get()));
      return devices_[index_of(x)] = answer.get() == Py_True;
    }
    return known->second;
  }

 protected:
  struct Plan {
    std::vector<std::pair<Ref, long long>> launches;  ///< with the number of programs
    long long stored = 0, nbytes = 0;                 ///< elements and bytes of codes, rows padded
    long long programs() const { return launches.front().second; }
  };

  const Plan& plan_of(const char* kernel, const at::Tensor& of, std::initializer_list<int> flags, bool drops) {
    constexpr size_t kMost = 256;  // sizes may differ from step to step
    unsigned all = 0;
    for (const int flag : flags) all = all * 4 + static_cast<unsigned>(flag);
    const Key key{kernel, of.numel(), all, drops, index_of(of)};
    const auto known = plans_.find(key);
    if (known != plans_.end()) return known->second;
    if (plans_.size() >= kMost) plans_.clear();
    Arguments given(static_cast<Py_ssize_t>(flags.size()));
    for (const int flag : flags) given.add(static_cast<long long>(flag));
    const Ref device = checked(THPDevice_New(of.device()));
    const Ref made = checked(PyObject_CallFunction(planner.get(), "sLOOO", kernel, static_cast<long long>(of.numel()),
                                                   given.get(), drops ? Py_True : Py_False, device.get()));
    PyObject* launches = nullptr;
    Plan found;
    if (!PyArg_ParseTuple(made.get(), "O!LL", &PyTuple_Type, &launches, &found.stored, &found.nbytes)) {
      throw engine::PythonError();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(launches); ++i) {
      PyObject* start = nullptr;
      long long programs = 0;
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(launches, i), "OL", &start, &programs)) throw engine::PythonError();
      found.launches.emplace_back(Ref::borrowed(start), programs);
    }
    return plans_.emplace(key, std::move(found)).first->second;
  }

  static void launch(const Plan& how, const Arguments& tensors, const Arguments& scalars) {
    for (const auto& [start, count] : how.launches) {
      const Ref programs = checked(PyLong_FromLongLong(count));
      PyObject* const all[] = {programs.get(), tensors.get(), scalars.get()};
      checked(PyObject_Vectorcall(start.get(), all, 3, nullptr));
    }
  }

  static at::Tensor empty(const engine::Layout& layout, at::ScalarType dtype, const at::Tensor& beside) {
    return observer::empty(layout.sizes, layout.strides, dtype, beside);
  }
  static at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& beside) {
    return empty(engine::Layout::contiguous(sizes), dtype, beside);
  }

  /// Return a contiguous tensor for a kernel, or what stands in for none and is not read.
  static at::Tensor or_else(const at::Tensor& tensor, const at::Tensor& stand_in) {
    return tensor.defined() ? tensor.contiguous() : stand_in;
  }

  /// Let a report count codes as the packed form of a tensor.
  static void mark_as_packed(const at::Tensor& packed, const at::Tensor& source) {
    const Ref codes(THPVariable_Wrap(packed)), original(THPVariable_Wrap(source));
    engine::rare("mark_as_packed", {codes.get(), original.get()});
  }

 private:
  struct Key {
    const char* kernel;
    std::int64_t numel;
    unsigned flags;
    bool drops;
    int device;
    bool operator<(const Key& other) const {
      return std::tie(kernel, numel, flags, drops, device) <
             std::tie(other.kernel, other.numel, other.flags, other.drops, other.device);
    }
  };
  std::map<Key, Plan> plans_;
  std::map<int, bool> devices_;  ///< answers of `runs_on`

  static int index_of(const at::Tensor& of) { return of.is_cuda() ? of.get_device() : -1; }
};

}  // namespace pac::functions
