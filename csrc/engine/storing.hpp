// How tensors are stored in a form: the kernel, the buffer of stored bytes, and memory for both.
#pragma once

#include <ATen/Parallel.h>

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "codec/kernel_table.hpp"
#include "engine/python.hpp"
#include "engine/streams.hpp"
#include "engine/tape.hpp"
#include "observer/tensors.hpp"

namespace pac::engine {

/// Needs of readers, ordered by strictness, as in readers/forms.py.
enum Need : long { kShape, kBits, kCodes, kRelative, kExact };

/// The memory of one stored tensor: its codes, or its elements as they are. Nothing else owns stored bytes.
///
/// The memory is held, or on a tape: then it leaves the device, and `tensor` brings it back.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(at::Tensor held) : held_(std::move(held)) {}
  at::Tensor tensor() const { return placed_ ? placed_->tensor() : held_; }
  at::ScalarType scalar_type() const { return placed_ ? placed_->dtype.toScalarType() : held_.scalar_type(); }
  at::IntArrayRef sizes() const { return placed_ ? at::IntArrayRef(placed_->sizes) : held_.sizes(); }
  at::IntArrayRef strides() const { return placed_ ? at::IntArrayRef(placed_->strides) : held_.strides(); }
  bool may_be_away() const { return placed_ != nullptr; }
  std::int64_t nbytes() const {
    return static_cast<std::int64_t>(placed_ ? placed_->nbytes : held_.defined() ? held_.nbytes() : 0);
  }
  explicit operator bool() const { return placed_ || held_.defined(); }

  /// Put the memory on a tape, unless it stays.
  void leave(Tape& tape, std::int64_t stream) {
    if (placed_ || !held_.defined()) return;
    std::shared_ptr<Piece> piece = tape.adopt(held_, stream);
    if (!piece) return;
    placed_ = std::make_unique<const Placed>(std::move(piece), held_);
    held_ = at::Tensor();
  }

 private:
  at::Tensor held_;
  std::unique_ptr<const Placed> placed_;
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

/// A tensor that a recipe reads, and that autograd may save too: then both have the memory on the tape.
class Read {
 public:
  explicit Read(const at::Tensor& tensor) : buffer_(tensor), place_(tensor.storage().unsafeGetStorageImpl()) {
    all().emplace(place_, this);
  }
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;
  ~Read() {
    const auto [begin, end] = all().equal_range(place_);
    for (auto each = begin; each != end; ++each) {
      if (each->second != this) continue;
      all().erase(each);
      return;
    }
  }
  at::Tensor tensor() const { return buffer_.tensor(); }

  /// Let go of a memory that a stored form has put on a tape.
  static void leave(const c10::StorageImpl* place, Tape& tape, std::int64_t stream) {
    const auto [begin, end] = all().equal_range(place);
    for (auto each = begin; each != end; ++each) each->second->buffer_.leave(tape, stream);
  }

 private:
  Buffer buffer_;
  const c10::StorageImpl* place_;

  static std::unordered_multimap<const c10::StorageImpl*, Read*>& all() {
    static auto& instance = *std::make_unique<std::unordered_multimap<const c10::StorageImpl*, Read*>>().release();
    return instance;
  }
};

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
    const at::Tensor stored = buffer.tensor();
    const at::Tensor out = observer::empty(sizes, strides, carrier, stored);
    if (bound) {
      run(*bound, out, [&](const pac::Place& place) {
        return bound->kernel->decode(bound->format, stored.const_data_ptr(), out.mutable_data_ptr(), out.numel(),
                                     place);
      });
    } else {
      const Ref packed(THPVariable_Wrap(stored)), target(THPVariable_Wrap(out));
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
