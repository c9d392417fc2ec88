// Python objects from C++: references, errors, and objects with a C++ body.
#pragma once

#include <Python.h>
#include <structmember.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

namespace pac::engine {

/// Thrown where a Python error is set.
struct PythonError {};

/// A reference to a Python object, or none.
class Ref {
 public:
  Ref() = default;
  /// Takes over a new reference.
  explicit Ref(PyObject* owned) : object_(owned) {}
  static Ref borrowed(PyObject* object) { return Ref(Py_XNewRef(object)); }
  Ref(const Ref& other) : object_(Py_XNewRef(other.object_)) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

/// Return a new reference from a call of Python's, or throw.
inline Ref checked(PyObject* made) {
  if (!made) throw PythonError();
  return Ref(made);
}

/// Holds the GIL for the object's lifetime.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

/// Return the error that is set, and clear it.
inline Ref taken_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return Ref(PyErr_GetRaisedException());
#else
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return Ref(error);
#endif
}

/// Run a function of C++ for Python: every exception becomes Python's.
template <class Function>
PyObject* guarded(const Function& function) {
  try {
    return function();
  } catch (const PythonError&) {
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

/// As `guarded`, for functions that return 0, or -1 with an error set.
template <class Function>
int guarded_status(const Function& function) {
  try {
    function();
    return 0;
  } catch (const PythonError&) {
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return -1;
}

inline long long integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value;
}

inline const at::Tensor& tensor_in(PyObject* object) {
  if (!THPVariable_Check(object)) {
    PyErr_Format(PyExc_TypeError, "a torch.Tensor was expected, got %s", Py_TYPE(object)->tp_name);
    throw PythonError();
  }
  return THPVariable_Unpack(object);
}

inline at::ScalarType dtype_in(PyObject* object) {
  if (!THPDtype_Check(object)) {
    PyErr_Format(PyExc_TypeError, "a torch.dtype was expected, got %s", Py_TYPE(object)->tp_name);
    throw PythonError();
  }
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

inline PyObject* dtype_object(at::ScalarType dtype) {
  return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

/// What Python gives by name: its functions for what happens rarely (errors, warnings, other streams), and constants.
inline Ref& names() {
  static Ref& instance = *std::make_unique<Ref>().release();  // never freed: the interpreter may end first
  return instance;
}

/// Return what Python gave by a name; borrowed.
inline PyObject* constant(const char* name) {
  PyObject* const found = names() ? PyDict_GetItemString(names().get(), name) : nullptr;
  if (found) return found;
  PyErr_Format(PyExc_RuntimeError, "pyactcomp's engine was not configured with %s", name);
  throw PythonError();
}

/// What every saved tensor may need of it, at hand.
struct Constants {
  PyObject *itself, *as_codes, *gained, *bfloat16, *checkpoint, *checkpointed, *not_dropped, *current_raw_stream;
};

inline const Constants& constants() {
  static const Constants instance{constant("ITSELF"),      constant("AS_CODES"),          constant("GAINED"),
                                  constant("BFLOAT16"),    constant("CHECKPOINT"),        constant("CHECKPOINTED"),
                                  constant("NOT_DROPPED"), constant("current_raw_stream")};
  return instance;
}

/// Call one of the functions for what is rare.
inline Ref rare(const char* name, std::initializer_list<PyObject*> arguments) {
  return checked(PyObject_Vectorcall(constant(name), arguments.begin(), arguments.size(), nullptr));
}

/// A Python object of a C++ class.
template <class Body>
struct Boxed {
  PyObject_HEAD PyObject* weak_references;
  Body body;
};

struct Header {
  PyObject_HEAD PyObject* weak_references;
};

/// Return the body of an object whose class is known.
template <class Body>
Body& body(PyObject* object) {
  static_assert(alignof(Body) <= alignof(Header), "the body follows the header directly");
  return *reinterpret_cast<Body*>(reinterpret_cast<char*>(object) + sizeof(Header));
}

/// tp_new: an object with an empty body, which knows the object.
template <class Body>
PyObject* allocate(PyTypeObject* type, PyObject* = nullptr, PyObject* = nullptr) {
  PyObject* const made = type->tp_alloc(type, 0);
  if (!made) return nullptr;
  new (&body<Body>(made)) Body();
  body<Body>(made).self = made;
  return made;
}

template <class Body>
void deallocate(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  // What is destroyed below may call Python and let another thread run: a collection there must not find the object.
  if (PyType_IS_GC(type)) PyObject_GC_UnTrack(object);
  if (reinterpret_cast<Header*>(object)->weak_references) PyObject_ClearWeakRefs(object);
  body<Body>(object).~Body();
  type->tp_free(object);
  Py_DECREF(type);
}

inline PyMemberDef weakly_referable[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Header, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

}  // namespace pac::engine
