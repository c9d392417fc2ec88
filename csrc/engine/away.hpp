// Tensors that compiled graphs send away. In place of each a graph saves a handle: a tensor without elements, of shape
// [0, *shape], whose memory owns the stored bytes. The bytes live as long as the handle, whatever torch does with it.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine/storing.hpp"
#include "engine/types.hpp"
#include "observer/tensors.hpp"

namespace pac::engine {

/// The deleter of a handle's memory.
inline void drop_away(void* stored) {
  std::unique_ptr<Buffer> last(static_cast<Buffer*>(stored));
  if (!Py_IsInitialized()) {
    static_cast<void>(last.release());  // the tape is gone with the interpreter
    return;
  }
  const PyGILState_STATE state = PyGILState_Ensure();  // torch drops saved tensors without the GIL too
  last.reset();
  PyGILState_Release(state);
}

inline at::Tensor handle_of(Buffer stored, c10::Device device) {
  c10::SmallVector<std::int64_t, 6> sizes{0};
  sizes.append(stored.sizes().begin(), stored.sizes().end());
  const auto options = at::TensorOptions().dtype(stored.scalar_type()).device(device);
  // The address stays null, so that nothing takes the handle for a tensor with memory.
  return at::for_blob(nullptr, sizes)
      .context(std::make_unique<Buffer>(std::move(stored)).release(), drop_away)
      .target_device(device)
      .options(options)
      .make_tensor();
}

/// Return the tensor that a handle stands for, to be read by work queued on the current stream from here on.
inline at::Tensor taken(const at::Tensor& handle) {
  const auto* const stored = handle.storage().data_ptr().cast_context<Buffer>(drop_away);
  if (!stored) {
    rare("refuse_lost_handle", {checked(THPVariable_Wrap(handle)).get()});
    throw PythonError();
  }
  return stored->tensor();
}

/// Return a tensor of a dtype in a part of another tensor's memory.
inline at::Tensor part_of(const at::Tensor& memory, caffe2::TypeMeta dtype, at::IntArrayRef sizes, std::int64_t byte) {
  auto made = c10::make_intrusive<c10::TensorImpl>(c10::Storage(memory.storage()), memory.key_set(), dtype);
  made->set_storage_offset(byte / static_cast<std::int64_t>(dtype.itemsize()));
  made->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(made));
}

/// Return contiguous copies. What shares a memory still does: a kernel reads codes and parameters of groups as one.
inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  constexpr std::int64_t kAlignment = 16;
  std::int64_t begin = INT64_MAX, end = 0;
  bool together = tensors.size() > 1;
  for (const at::Tensor& each : tensors) {
    const std::int64_t first = each.storage_offset() * each.element_size();
    begin = std::min(begin, first / kAlignment * kAlignment);
    end = std::max(end, first + static_cast<std::int64_t>(each.nbytes()));
    together = together && each.is_contiguous() && each.is_alias_of(tensors[0]);
  }
  std::vector<at::Tensor> copies;
  if (!together) {
    for (const at::Tensor& each : tensors) copies.push_back(each.clone(at::MemoryFormat::Contiguous));
    return copies;
  }
  const at::Tensor copy = part_of(tensors[0], caffe2::TypeMeta::Make<std::uint8_t>(), {end - begin}, begin).clone();
  for (const at::Tensor& each : tensors) {
    const std::int64_t first = each.storage_offset() * each.element_size();
    copies.push_back(part_of(copy, each.dtype(), each.sizes(), first - begin));
  }
  return copies;
}

/// send(tensors, tape or None): put copies on a tape; return a handle for each.
inline PyObject* send_away(PyObject*, PyObject* arguments) {
  return guarded([&] {
    PyObject *given = nullptr, *tape = nullptr;
    if (!PyArg_ParseTuple(arguments, "O!O", &PyList_Type, &given, &tape)) throw PythonError();
    std::vector<at::Tensor> tensors;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) tensors.push_back(tensor_in(PyList_GET_ITEM(given, i)));
    const Ref handles = checked(PyList_New(0));
    for (at::Tensor& copy : copies_of(tensors)) {
      const std::int64_t stream = stream_of(copy);
      const c10::Device device = copy.device();
      Buffer stored(std::move(copy));
      if (Py_TYPE(tape) == types().tape) stored.leave(body<Tape>(tape), stream);
      const Ref handle(THPVariable_Wrap(handle_of(std::move(stored), device)));
      if (!handle || PyList_Append(handles.get(), handle.get()) != 0) throw PythonError();
    }
    return Py_NewRef(handles.get());
  });
}

/// take(handle): return the tensor that a handle stands for.
inline PyObject* take_back(PyObject*, PyObject* given) {
  return guarded([&] { return THPVariable_Wrap(taken(tensor_in(given))); });
}

inline PyMethodDef away_functions[] = {
    {"send", send_away, METH_VARARGS, "Put copies of tensors on a tape; return a handle for each."},
    {"take", take_back, METH_O, "Return the tensor that a handle stands for."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace pac::engine
