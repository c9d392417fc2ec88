// How tensors are stored in a form: the kernel, the buffer of stored bytes, and memory for both.
#pragma once

#include <ATen/Parallel.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "codec/kernel_table.hpp"
#include "engine/python.hpp"
#include "observer/tensors.hpp"

namespace pac::engine {

/// Needs of readers, ordered by strictness, as in readers/forms.py.
enum Need : long { kShape, kBits, kCodes, kRelative, kExact };

/// The memory of one stored tensor: its codes, or its elements as they are. Nothing else owns stored bytes.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(at::Tensor held) : held_(std::move(held)) {}
  const at::Tensor& tensor() const { return held_; }
  std::int64_t nbytes() const { return held_.defined() ? static_cast<std::int64_t>(held_.nbytes()) : 0; }
  explicit operator bool() const { return held_.defined(); }

 private:
  at::Tensor held_;
};

inline bool is_dense(const at::TensorBase& tensor) {
  return tensor.numel() == 0 || tensor.is_non_overlapping_and_dense();
}

/// Return the rows of a tensor with gaps if a kernel reads them where they are; of length 0 if it needs a copy.
inline Rows rows_for(const Bound& bound, const at::TensorBase& tensor) {
  constexpr std::int64_t kVector = 8, kMost = std::int64_t{1} << 35;
  const Format& format = bound.format;
  const bool served = format.encoding == Encoding::kCodes && format.bits == 8 && !format.stochastic;
  if (!served || !bound.kernel->encode_rows || tensor.dim() != 2 || tensor.stride(1) != 1) return {};
  const Rows rows{tensor.size(1), tensor.stride(0) - tensor.size(1)};
  return rows.length % kVector == 0 && rows.gap % kVector == 0 && tensor.numel() < kMost ? rows : Rows{};
}

/// Return the current stream of a CUDA device as an integer, by torch's own function: no function of this module is
/// compiled for CUDA, so that one build fits torch's builds with and without it.
inline std::int64_t current_stream(int device) {
  const Ref index(PyLong_FromLong(device));
  return integer(checked(PyObject_CallOneArg(constants().current_raw_stream, index.get())).get());
}

/// Return the current stream of a tensor's device as an integer; 0 on other devices than CUDA's.
inline std::int64_t stream_of(const at::TensorBase& tensor) {
  return tensor.is_cuda() ? current_stream(tensor.get_device()) : 0;
}

/// Return the kernels of pyactcomp._core.
inline const KernelTable& kernels() {
  static const KernelTable& table = [&]() -> const KernelTable& {
    const auto* const found = static_cast<const KernelTable*>(PyCapsule_Import(kKernelCapsule, 0));
    if (!found) throw PythonError();
    if (found->version == kKernelVersion) return *found;
    PyErr_SetString(PyExc_ImportError, "pyactcomp._core and its library are of two versions: reinstall pyactcomp");
    throw PythonError();
  }();
  return table;
}

/// Return the kernel that a Python kernel wraps, or null: Triton's and torch's are called in Python.
inline const Bound* bound_by(PyObject* kernel) {
  const Ref native(PyObject_GetAttrString(kernel, "native"));
  if (!native) {
    PyErr_Clear();
    return nullptr;
  }
  const Ref capsule = checked(PyObject_GetAttrString(native.get(), "bound"));
  const auto* const bound = static_cast<const Bound*>(PyCapsule_GetPointer(capsule.get(), kBoundCapsule));
  if (!bound) throw PythonError();
  return bound;
}

/// Run a kernel of C++ where a tensor is: a launch is too short to give the GIL away, packing on the host is not.
template <class Work>
void run(const Bound& bound, const at::TensorBase& where, const Work& work) {
  Status status = 0;
  if (bound.target == Target::kCuda) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    status = work(pac::Place{bound.device, reinterpret_cast<void*>(stream_of(where)), 0});
  } else {
    const observer::WithoutGil released;
    status = work(pac::Place{bound.device, nullptr, at::get_num_threads()});
  }
  if (status == 0) return;
  std::array<char, 256> text{};
  kernels().describe(status, text.data(), text.size());
  rare("refuse_failed_kernel", {checked(PyUnicode_FromString(text.data())).get()});
}

/// How tensors of one dtype are stored in a form: Storing(dtype, carrier, form, kernel, nbytes).
struct StoringBody {
  PyObject* self = nullptr;
  at::ScalarType dtype = at::kFloat, carrier = at::kFloat;  ///< the tensor's, and what the kernel reads and writes
  Ref form, kernel;
  const Bound* bound = nullptr;  ///< what `kernel` wraps
  long need = kExact;
  std::int64_t nbytes = 0;
  std::vector<std::pair<Ref, bool>> serves;  ///< answers of form.serves

  /// Write the packed form of a tensor, dense or in the order of its memory, to new memory.
  Buffer encode(const at::Tensor& source, std::uint64_t seed) const {
    Buffer buffer(observer::empty({nbytes}, {1}, at::kByte, source));
    at::Tensor given = carrier == dtype ? source : observer::bare_tensor(source).to(carrier);
    if (!is_dense(given)) {
      if (const Rows rows = bound ? rows_for(*bound, given) : Rows{}; rows.length != 0) {
        run(*bound, source, [&](const pac::Place& place) {
          return bound->kernel->encode_rows(bound->format, given.const_data_ptr(), rows,
                                            buffer.tensor().mutable_data_ptr(), given.numel(), place);
        });
        return buffer;
      }
      given = observer::bare_tensor(given).contiguous();
    }
    if (bound) {
      const Keys keys = bound->format.stochastic ? kernels().random_keys(seed) : Keys{};
      run(*bound, source, [&](const pac::Place& place) {
        return bound->kernel->encode(bound->format, given.const_data_ptr(), buffer.tensor().mutable_data_ptr(),
                                     given.numel(), keys, place);
      });
      return buffer;
    }
    const Ref bare(THPVariable_Wrap(observer::bare_tensor(given))), out(THPVariable_Wrap(buffer.tensor()));
    const Ref number = checked(PyLong_FromUnsignedLongLong(seed));
    rare("encode", {kernel.get(), bare.get(), out.get(), number.get()});
    return buffer;
  }

  /// Return the tensor that a buffer holds, in any dense layout of as many elements.
  at::Tensor decode(const Buffer& buffer, at::IntArrayRef sizes, at::IntArrayRef strides) const {
    const at::Tensor out = observer::empty(sizes, strides, carrier, buffer.tensor());
    if (bound) {
      run(*bound, out, [&](const pac::Place& place) {
        return bound->kernel->decode(bound->format, buffer.tensor().const_data_ptr(), out.mutable_data_ptr(),
                                     out.numel(), place);
      });
    } else {
      const Ref packed(THPVariable_Wrap(buffer.tensor())), target(THPVariable_Wrap(out));
      rare("decode", {kernel.get(), packed.get(), target.get()});
    }
    return carrier == dtype ? out : out.to(dtype);
  }

  /// Return whether a tensor stored so also serves a reader of another form.
  bool serves_form(PyObject* wanted) {
    if (form.get() == wanted) return true;
    for (const auto& [known, answer] : serves) {
      if (known.get() == wanted) return answer;
    }
    const bool answer = PyObject_IsTrue(checked(PyObject_CallMethod(form.get(), "serves", "(O)", wanted)).get()) != 0;
    serves.emplace_back(Ref::borrowed(wanted), answer);
    return answer;
  }
};

inline int storing_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject *dtype = nullptr, *carrier = nullptr, *form = nullptr, *kernel = nullptr;
    long long nbytes = 0;
    if (!PyArg_ParseTuple(arguments, "OOOOL", &dtype, &carrier, &form, &kernel, &nbytes)) throw PythonError();
    StoringBody& storing = body<StoringBody>(self);
    storing.dtype = dtype_in(dtype);
    storing.carrier = dtype_in(carrier);
    storing.need = static_cast<long>(integer(checked(PyObject_GetAttrString(form, "need")).get()));
    storing.form = Ref::borrowed(form);
    storing.kernel = Ref::borrowed(kernel);
    storing.bound = bound_by(kernel);
    storing.nbytes = nbytes;
  });
}

inline PyGetSetDef storing_attributes[] = {
    {"dtype", [](PyObject* self, void*) { return dtype_object(body<StoringBody>(self).dtype); }, nullptr,
     "Dtype of the tensor.", nullptr},
    {"carrier", [](PyObject* self, void*) { return dtype_object(body<StoringBody>(self).carrier); }, nullptr,
     "Dtype that the kernel reads and writes.", nullptr},
    {"form", [](PyObject* self, void*) { return Py_NewRef(body<StoringBody>(self).form.get()); }, nullptr, "The form.",
     nullptr},
    {"kernel", [](PyObject* self, void*) { return Py_NewRef(body<StoringBody>(self).kernel.get()); }, nullptr,
     "The kernel that packs and restores.", nullptr},
    {"nbytes", [](PyObject* self, void*) { return PyLong_FromLongLong(body<StoringBody>(self).nbytes); }, nullptr,
     "Size of the buffer in bytes.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

inline PyType_Slot storing_slots[] = {
    {Py_tp_doc, const_cast<char*>("How tensors of one dtype are stored in a form.")},
    {Py_tp_new, reinterpret_cast<void*>(allocate<StoringBody>)},
    {Py_tp_init, reinterpret_cast<void*>(storing_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<StoringBody>)},
    {Py_tp_getset, storing_attributes},
    {0, nullptr},
};

inline PyType_Spec storing_spec = {"pyactcomp._observer.Storing", sizeof(Boxed<StoringBody>), 0, Py_TPFLAGS_DEFAULT,
                                   storing_slots};

}  // namespace pac::engine
