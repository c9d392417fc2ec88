#include "bindings/python_values.hpp"

#include <frameobject.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator/config.hpp"

namespace py = pybind11;

namespace pac::bindings {
namespace {

std::string got(py::handle value) {
  const std::string type = Py_TYPE(value.ptr())->tp_name;
  try {
    return ", got " + std::string(py::str(py::repr(value))) + " (" + type + ")";
  } catch (const py::error_already_set&) {
    return ", got an " + type + " without a text";  // Python writes no integer of more than 4300 digits
  }
}

/// References released by the core, on any thread and under the lock, where waiting for the GIL could deadlock and a
/// destructor could call back. The next call from Python drops them.
class Dropped {
 public:
  void add(PyObject* object) {
    const std::lock_guard<std::mutex> guard(mutex_);
    objects_.push_back(object);
  }

  std::vector<PyObject*> take() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(objects_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
};

Dropped& dropped() {
  // Never destroyed: the allocators of the process may outlive static destruction.
  static Dropped* const instance = std::make_unique<Dropped>().release();
  return *instance;
}

struct DropLater {
  void operator()(PyObject* object) const { dropped().add(object); }
};

std::shared_ptr<PyObject> share(py::object object) { return {object.release().ptr(), DropLater{}}; }

/// A user's function for the core to call from any thread.
class Callback {
 public:
  /// `role` names the function in messages. TypeError unless callable.
  Callback(const char* role, const py::object& function) {
    if (!PyCallable_Check(function.ptr()))
      throw py::type_error(std::string(role) + " must be callable" + got(function));
    name_ = std::string(role) + " " + std::string(py::str(py::getattr(function, "__qualname__", py::repr(function))));
    function_ = share(function);
  }

  const std::string& name() const { return name_; }

  /// Needs the GIL. Turns the function's exception into a std::runtime_error, while the GIL is held.
  template <class... Args>
  py::object operator()(Args... args) const {
    std::string failure;
    try {
      return py::handle(function_.get())(args...);
    } catch (const py::error_already_set& error) {
      failure = error.what();
    }
    throw std::runtime_error(name_ + " raised " + failure.substr(0, failure.find("\n\nAt:")));
  }

 private:
  std::string name_;
  std::shared_ptr<PyObject> function_;
};

std::uint64_t to_unsigned(const char* name, const char* expected, py::handle value) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
    throw py::type_error(std::string(name) + " must be " + expected + got(value));
  }
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!index) throw py::error_already_set();
  const unsigned long long number = PyLong_AsUnsignedLongLong(index.ptr());
  if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
    PyErr_Clear();
    throw py::value_error(std::string(name) + " must be at least 0 and below 2**64" + got(value));
  }
  return number;
}

/// Called by Python's main thread, with the GIL.
int warn_now(void* given) {
  const std::unique_ptr<std::string> text(static_cast<std::string*>(given));
  return PyErr_WarnEx(PyExc_UserWarning, text->c_str(), 1);
}

}  // namespace

std::uint64_t to_number(const char* name, py::handle value) { return to_unsigned(name, "an integer", value); }

alloc::Bytes to_bytes(const char* name, py::handle value) {
  if (!PyUnicode_Check(value.ptr())) return to_unsigned(name, "an integer or a text like '512MiB'", value);
  try {
    return alloc::parse_bytes(value.cast<std::string>());
  } catch (const std::invalid_argument& error) {
    throw py::value_error(std::string(name) + ": " + error.what());
  }
}

double to_share(const char* name, py::handle value) {
  if (PyBool_Check(value.ptr()) || !(PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()))) {
    throw py::type_error(std::string(name) + " must be a number" + got(value));
  }
  return value.cast<double>();
}

alloc::PoolId to_pool(py::handle value) {
  if (!PyTuple_Check(value.ptr()) || PyTuple_GET_SIZE(value.ptr()) != 2) {
    throw py::type_error("pool must be a pair of integers, the id of a torch.cuda.MemPool" + got(value));
  }
  return {to_number("pool[0]", PyTuple_GET_ITEM(value.ptr(), 0)),
          to_number("pool[1]", PyTuple_GET_ITEM(value.ptr(), 1))};
}

alloc::Context python_stack() {
  collect_dropped();
  // Code objects and line numbers: names are looked up only when a stack is read.
  py::list stack;
  auto frame =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  while (frame) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    stack.append(py::make_tuple(code, PyFrame_GetLineNumber(raw)));
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return share(std::move(stack));
}

py::list frames(const alloc::Context& context) {
  py::list described;
  // The deleter tells our stacks from another library's contexts.
  if (std::get_deleter<DropLater>(context) == nullptr) return described;
  for (const py::handle frame : py::reinterpret_borrow<py::list>(static_cast<PyObject*>(context.get()))) {
    const py::tuple pair = py::reinterpret_borrow<py::tuple>(frame);
    const py::object code = pair[0];
    py::dict entry;
    entry["filename"] = code.attr("co_filename");
    entry["line"] = pair[1];
    entry["name"] = code.attr("co_name");
    described.append(std::move(entry));
  }
  return described;
}

std::function<bool(alloc::Bytes)> pressure_callback(const py::object& function) {
  return [callback = Callback("pressure callback", function)](alloc::Bytes missing) {
    const py::gil_scoped_acquire gil;
    const py::object answer = callback(missing);
    if (!PyBool_Check(answer.ptr())) {
      throw std::runtime_error(callback.name() + " must return whether it freed anything, True or False" + got(answer));
    }
    return answer.ptr() == Py_True;
  };
}

std::function<void(alloc::Bytes, alloc::Bytes, alloc::Bytes)> oom_observer(const py::object& function) {
  return [callback = Callback("out-of-memory observer", function)](alloc::Bytes requested, alloc::Bytes total,
                                                                   alloc::Bytes free) {
    const py::gil_scoped_acquire gil;
    callback(requested, total, free);
  };
}

void warn_later(const std::string& text) noexcept {
  if (!Py_IsInitialized()) return;
  auto kept = std::make_unique<std::string>(text);
  if (Py_AddPendingCall(&warn_now, kept.get()) == 0) static_cast<void>(kept.release());
}

void collect_dropped() {
  for (PyObject* const object : dropped().take()) Py_DECREF(object);
}

}  // namespace pac::bindings
