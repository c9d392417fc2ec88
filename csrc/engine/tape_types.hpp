// The Python classes of the offload: HostArena and Tape.
#pragma once

#include <memory>

#include "engine/tape.hpp"
#include "engine/types.hpp"

namespace pac::engine {

/// HostArena(link, limit): `link` is an object of pyactcomp._core with a capsule.
struct ArenaBody {
  PyObject* self = nullptr;
  Ref link;
  std::unique_ptr<HostArena> arena;
};

inline PyTypeObject*& arena_type() {
  static PyTypeObject* type = nullptr;
  return type;
}

inline int arena_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject* link = nullptr;
    unsigned long long limit = 0;
    if (!PyArg_ParseTuple(arguments, "OK", &link, &limit)) throw PythonError();
    const Ref capsule = checked(PyObject_GetAttrString(link, "link"));
    auto* const found = static_cast<Link*>(PyCapsule_GetPointer(capsule.get(), kLinkCapsule));
    if (!found) throw PythonError();
    ArenaBody& made = body<ArenaBody>(self);
    made.link = Ref::borrowed(link);
    made.arena = std::make_unique<HostArena>(*found, limit);
  });
}

inline PyObject* arena_trim(PyObject* self, PyObject*) {
  return guarded([&] { return PyLong_FromSize_t(body<ArenaBody>(self).arena->trim()); });
}

inline PyObject* arena_limit(ArenaBody& form) { return PyLong_FromSize_t(form.arena->limit()); }
inline int arena_set_limit(PyObject* self, PyObject* value, void*) {
  return guarded_status([&] { body<ArenaBody>(self).arena->set_limit(static_cast<std::size_t>(integer(value))); });
}
inline PyObject* arena_most(ArenaBody& form) { return PyLong_FromSize_t(form.arena->most()); }
inline PyObject* arena_pinned(ArenaBody& form) { return PyLong_FromSize_t(form.arena->pinned()); }
inline PyObject* arena_taken(ArenaBody& form) { return PyLong_FromSize_t(form.arena->taken()); }
inline PyObject* arena_peak(ArenaBody& form) { return PyLong_FromSize_t(form.arena->peak()); }
inline PyObject* arena_pins(ArenaBody& form) { return PyLong_FromSize_t(form.arena->pins()); }

inline PyMethodDef arena_methods[] = {
    {"trim", arena_trim, METH_NOARGS, "Give slabs without a block in use back to the host; return how many bytes."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyGetSetDef arena_attributes[] = {
    {"limit", attribute<ArenaBody, arena_limit>, arena_set_limit, "Most bytes to pin.", nullptr},
    {"most", attribute<ArenaBody, arena_most>, nullptr, "How many bytes may be pinned now, in all.", nullptr},
    {"pinned", attribute<ArenaBody, arena_pinned>, nullptr, "Bytes pinned.", nullptr},
    {"taken", attribute<ArenaBody, arena_taken>, nullptr, "Bytes of the blocks in use.", nullptr},
    {"peak", attribute<ArenaBody, arena_peak>, nullptr, "The most bytes in use so far.", nullptr},
    {"pins", attribute<ArenaBody, arena_pins>, nullptr, "How many times memory was pinned.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

/// Tape(arena, window, share, min_bytes).
inline int tape_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject* arena = nullptr;
    unsigned long long window = 0, min_bytes = 0;
    double share = 1;
    if (!PyArg_ParseTuple(arguments, "O!KdK", arena_type(), &arena, &window, &share, &min_bytes)) throw PythonError();
    Tape& tape = body<Tape>(self);
    tape.arena_object = Ref::borrowed(arena);
    tape.arena = body<ArenaBody>(arena).arena.get();
    tape.window = window;
    tape.share = share;
    tape.min_bytes = min_bytes;
  });
}

inline PyObject* tape_statistics(PyObject* self, PyObject*) {
  return guarded([&] {
    Tape& tape = body<Tape>(self);
    tape.bury();
    const Tape::Counts& now = tape.counts;
    const std::pair<const char*, std::uint64_t> all[] = {
        {"packed", now.packed},
        {"sent", now.sent},
        {"left", now.left},
        {"brought", now.brought},
        {"prefetched", now.prefetched},
        {"late", now.late},
        {"stayed", now.stayed},
        {"held", now.held},
        {"packed_bytes", now.packed_bytes},
        {"sent_bytes", now.sent_bytes},
        {"left_bytes", now.left_bytes},
        {"brought_bytes", now.brought_bytes},
        {"stayed_bytes", now.stayed_bytes},
        {"held_bytes", now.held_bytes},
        {"window_bytes", tape.limit()},
        {"device_bytes", tape.on_device()},
        {"alive", tape.alive()},
    };
    const Ref made = checked(PyDict_New());
    for (const auto& [name, value] : all) {
      const Ref number = checked(PyLong_FromUnsignedLongLong(value));
      if (PyDict_SetItemString(made.get(), name, number.get()) != 0) throw PythonError();
    }
    return Py_NewRef(made.get());
  });
}

/// next_timing(finish): (backward, seconds, seconds waited), or None.
inline PyObject* tape_next_timing(PyObject* self, PyObject* finish) {
  return guarded([&] {
    const auto found = body<Tape>(self).next_timing(PyObject_IsTrue(finish) == 1);
    return found ? Py_BuildValue("(Odd)", found->backward ? Py_True : Py_False, found->seconds, found->waited)
                 : Py_NewRef(Py_None);
  });
}

/// samples(): what lay where after each piece of the last step that was packed or read.
inline PyObject* tape_samples(PyObject* self, PyObject*) {
  return guarded([&] {
    const Ref made = checked(PyList_New(0));
    for (const Tape::Sample& each : body<Tape>(self).samples()) {
      const Ref row =
          checked(Py_BuildValue("(Onnn)", each.backward ? Py_True : Py_False, static_cast<Py_ssize_t>(each.on_device),
                                static_cast<Py_ssize_t>(each.on_host), static_cast<Py_ssize_t>(each.allocated)));
      if (PyList_Append(made.get(), row.get()) != 0) throw PythonError();
    }
    return Py_NewRef(made.get());
  });
}

inline PyMethodDef tape_methods[] = {
    {"next_timing", tape_next_timing, METH_O,
     "Return of the oldest pass not read (backward, seconds, waited); None while it runs, unless to finish."},
    {"samples", tape_samples, METH_NOARGS,
     "Return what lay where during the last step: (backward, device, host, all)."},
    {"statistics", tape_statistics, METH_NOARGS, "Return the counts since the tape was made, and what is alive."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyObject* tape_timings(Tape& tape) { return PyLong_FromSize_t(tape.timings()); }
inline PyObject* tape_share(Tape& tape) { return PyFloat_FromDouble(tape.share); }
inline int tape_set_share(PyObject* self, PyObject* value, void*) {
  return guarded_status([&] {
    const double share = PyFloat_AsDouble(value);
    if (PyErr_Occurred()) throw PythonError();
    body<Tape>(self).share = share;
  });
}

inline PyGetSetDef tape_attributes[] = {
    {"timings", attribute<Tape, tape_timings>, nullptr, "Forwards and backwards that are over and were not read.",
     nullptr},
    {"share", attribute<Tape, tape_share>, tape_set_share, "Share of the bytes that leaves.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

inline void add_offload_classes(PyObject* module) {
  arena_type() = class_of<ArenaBody>("pyactcomp._observer.HostArena", "Pinned host memory of one device.", nullptr,
                                     arena_init, arena_methods, arena_attributes);
  types().tape = class_of<Tape>("pyactcomp._observer.Tape",
                                "The stored bytes of one configuration on one device, in the order of packing.",
                                nullptr, tape_init, tape_methods, tape_attributes);
  for (PyTypeObject* const type : {arena_type(), types().tape}) {
    if (PyModule_AddType(module, type) != 0) throw PythonError();
  }
}

}  // namespace pac::engine
