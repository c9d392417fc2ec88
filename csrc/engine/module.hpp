// The Python class of the hooks, and all classes of the engine in the module.
#pragma once

#include "engine/away.hpp"
#include "engine/tape_types.hpp"
#include "engine/unpack.hpp"

namespace pac::engine {

/// Hooks(frame, packing, module, recorder, decisions, min_bytes, lossless, stochastic, gathers, casts_left).
inline int hooks_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject *frame = nullptr, *packing = nullptr, *module = nullptr, *recorder = nullptr, *decisions = nullptr;
    long long min_bytes = 0;
    int lossless = 0, stochastic = 0, gathers = 0;
    long casts_left = 0;
    if (!PyArg_ParseTuple(arguments, "OOOOO!Lpppl", &frame, &packing, &module, &recorder, types().decisions, &decisions,
                          &min_bytes, &lossless, &stochastic, &gathers, &casts_left)) {
      throw PythonError();
    }
    Hooks& hooks = body<Hooks>(self);
    hooks.frame = Ref::borrowed(frame);
    hooks.packing = Ref::borrowed(packing);
    hooks.module = Ref::borrowed(module);
    hooks.recorder = recorder == Py_None ? Ref() : Ref::borrowed(recorder);
    hooks.decisions = Ref::borrowed(decisions);
    hooks.sharing = checked(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(types().sharing)));
    hooks.min_bytes = min_bytes;
    hooks.lossless = lossless != 0;
    hooks.stochastic = stochastic != 0;
    hooks.gathers = gathers != 0;
    hooks.casts_left = casts_left;
  });
}

inline PyObject* hooks_pack(PyObject* self, PyObject* tensor) {
  return guarded([&] { return body<Hooks>(self).pack(tensor).release(); });
}

inline PyObject* hooks_pack_plain(PyObject* self, PyObject* arguments) {
  return guarded([&] {
    PyObject *tensor = nullptr, *saved = nullptr;
    if (!PyArg_ParseTuple(arguments, "OO", &tensor, &saved)) throw PythonError();
    return body<Hooks>(self).pack_plain({tensor, tensor_in(tensor)}, {saved, tensor_in(saved)}).release();
  });
}

inline PyObject* hooks_pack_for(PyObject* self, PyObject* arguments) {
  return guarded([&] {
    PyObject *tensor = nullptr, *saved = nullptr, *reading = nullptr, *form = nullptr;
    if (!PyArg_ParseTuple(arguments, "OOOO", &tensor, &saved, &reading, &form)) throw PythonError();
    const Given given{tensor, tensor_in(tensor)}, whole{saved, tensor_in(saved)};
    return body<Hooks>(self).pack_for(given, whole, reading, form_in(form)).release();
  });
}

inline PyObject* hooks_store(PyObject* self, PyObject* arguments) {
  return guarded([&] {
    PyObject *tensor = nullptr, *reading = nullptr, *form = nullptr;
    if (!PyArg_ParseTuple(arguments, "OOO", &tensor, &reading, &form)) throw PythonError();
    const auto held = observer::node_of(tensor_in(tensor));
    const auto* const maker = observer::producer(held.get());
    const auto* const cast = maker && observer::is_cast(*maker) ? maker : nullptr;
    return body<Hooks>(self).store({tensor, tensor_in(tensor)}, reading, form_in(form), cast).release();
  });
}

inline int hooks_traverse(PyObject* self, visitproc visit, void* arg) {
  Hooks& hooks = body<Hooks>(self);
  for (const Ref* each : {&hooks.frame, &hooks.packing, &hooks.recorder, &hooks.module, &hooks.decisions})
    Py_VISIT(each->get());
  Py_VISIT(Py_TYPE(self));
  return 0;
}

inline int hooks_clear(PyObject* self) {
  body<Hooks>(self).drop();
  return 0;
}

/// drop(): let go of the frame, which holds the hooks: the forward has ended.
inline PyObject* hooks_drop(PyObject* self, PyObject*) {
  hooks_clear(self);
  Py_RETURN_NONE;
}

/// region(tensor, storing): return the region of a dense tensor, and by how many bytes the stored memory grew.
inline PyObject* hooks_region(PyObject* self, PyObject* arguments) {
  return guarded([&] {
    PyObject *tensor = nullptr, *storing = nullptr;
    if (!PyArg_ParseTuple(arguments, "OO!", &tensor, types().storing, &storing)) throw PythonError();
    std::int64_t added = 0;
    Ref region = body<Hooks>(self).region(tensor_in(tensor), Ref::borrowed(storing), added);
    return Py_BuildValue("(NL)", region.release(), static_cast<long long>(added));
  });
}

inline PyObject* hooks_keep(PyObject* self, PyObject* arguments) {
  return guarded([&] {
    PyObject* tensor = nullptr;
    const char* reason = nullptr;
    if (!PyArg_ParseTuple(arguments, "Os", &tensor, &reason)) throw PythonError();
    return body<Hooks>(self).keep({tensor, tensor_in(tensor)}, reason).release();
  });
}

inline void hooks_deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  deallocate<Hooks>(self);
}

inline PyMethodDef hooks_methods[] = {
    {"pack", hooks_pack, METH_O, "Return the stored form of a saved tensor: the pack hook."},
    {"pack_plain", hooks_pack_plain, METH_VARARGS, "Pack a plain tensor, given with the tensor in the graph."},
    {"pack_for", hooks_pack_for, METH_VARARGS, "Pack a tensor for its reader in a form."},
    {"store", hooks_store, METH_VARARGS, "Store a tensor in a form, as nothing recomputes it."},
    {"drop", hooks_drop, METH_NOARGS, "Let go of the frame: the forward has ended."},
    {"region", hooks_region, METH_VARARGS, "Return the region of a dense tensor, and the growth of the stored bytes."},
    {"keep", hooks_keep, METH_VARARGS, "Keep a tensor for a reason."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyObject* hooks_frame(Hooks& hooks) { return Py_NewRef(hooks.frame ? hooks.frame.get() : Py_None); }
inline PyObject* hooks_recorder(Hooks& hooks) { return Py_NewRef(hooks.recorder ? hooks.recorder.get() : Py_None); }
inline PyObject* hooks_sharing(Hooks& hooks) { return Py_NewRef(hooks.sharing.get()); }
inline PyObject* hooks_skipping(Hooks& hooks) { return PyLong_FromLong(hooks.skipping); }
inline int hooks_set_skipping(PyObject* self, PyObject* value, void*) {
  return guarded_status([&] { body<Hooks>(self).skipping = static_cast<long>(integer(value)); });
}
inline PyObject* hooks_waits(Hooks& hooks) { return truth(hooks.waits); }
inline int hooks_set_waits(PyObject* self, PyObject* value, void*) {
  return guarded_status([&] { body<Hooks>(self).waits = PyObject_IsTrue(value) == 1; });
}
inline PyObject* hooks_offloads(Hooks& hooks) { return truth(hooks.offloads); }
inline int hooks_set_offloads(PyObject* self, PyObject* value, void*) {
  return guarded_status([&] { body<Hooks>(self).offloads = PyObject_IsTrue(value) == 1; });
}
inline PyGetSetDef hooks_attributes[] = {
    {"frame", attribute<Hooks, hooks_frame>, nullptr, "The frame that opens and closes the hooks.", nullptr},
    {"recorder", attribute<Hooks, hooks_recorder>, nullptr, "The record of this forward for a report, or None.",
     nullptr},
    {"sharing", attribute<Hooks, hooks_sharing>, nullptr, "What the stored forms of this forward share.", nullptr},
    {"skipping", attribute<Hooks, hooks_skipping>, hooks_set_skipping, "Skipped modules whose forward is running.",
     nullptr},
    {"waits", attribute<Hooks, hooks_waits>, hooks_set_waits,
     "Whether inputs of a checkpointed block wait for their form.", nullptr},
    {"offloads", attribute<Hooks, hooks_offloads>, hooks_set_offloads, "Whether stored bytes may leave the device.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

inline PyType_Slot hooks_slots[] = {
    {Py_tp_doc, const_cast<char*>("The hooks of one forward pass.")},
    {Py_tp_new, reinterpret_cast<void*>(allocate<Hooks>)},
    {Py_tp_init, reinterpret_cast<void*>(hooks_init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(hooks_deallocate)},
    {Py_tp_traverse, reinterpret_cast<void*>(hooks_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(hooks_clear)},
    {Py_tp_members, weakly_referable},
    {Py_tp_methods, hooks_methods},
    {Py_tp_getset, hooks_attributes},
    {0, nullptr},
};

inline PyType_Spec hooks_spec = {"pyactcomp._observer.Hooks", sizeof(Boxed<Hooks>), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, hooks_slots};

/// note_offering(class): note that results of an autograd function may be recomputed; return whether it was noted.
inline PyObject* note_offering(PyObject*, PyObject* type) {
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "a class was expected, got %R", type);
  const bool added = offering().functions.insert(reinterpret_cast<PyTypeObject*>(type)).second;
  if (added) Py_INCREF(type);
  return truth(!added);
}

/// is_offering(class): return whether results of an autograd function may be recomputed.
inline PyObject* is_offering(PyObject*, PyObject* type) {
  return truth(offering().functions.count(reinterpret_cast<PyTypeObject*>(type)) != 0);
}

/// recipe_of(tensor): return the recipe that recomputes a tensor, or the source of the cast that made it, or None.
inline PyObject* find_recipe(PyObject*, PyObject* object) {
  return guarded([&] {
    const at::Tensor& tensor = tensor_in(object);
    const auto node = observer::node_of(tensor);
    const auto* const maker = observer::producer(node.get());
    if (!maker) return Py_NewRef(Py_None);
    Ref recipe = observer::is_cast(*maker) ? recipe_of_source(tensor, *maker) : recipe_of(tensor, false, false);
    return recipe ? recipe.release() : Py_NewRef(Py_None);
  });
}

/// offer_norm(out, may_be_freed): offer a recipe for the output of a norm or a gain: autocast's casts do not lead
/// there.
inline PyObject* offer_norm(PyObject*, PyObject* arguments) {
  return guarded([&] {
    PyObject* out = nullptr;
    int may_be_freed = 0;
    if (!PyArg_ParseTuple(arguments, "Op", &out, &may_be_freed)) throw PythonError();
    if (const auto node = tensor_in(out).grad_fn()) recipe_of_result(tensor_in(out), *node, false, may_be_freed != 0);
    return Py_NewRef(Py_None);
  });
}

/// offer_exact_layer_norm(out, eps, weight or None, bias or None, may_be_freed): offer a recipe to the bit.
inline PyObject* offer_exact_layer_norm(PyObject*, PyObject* arguments) {
  return guarded([&] {
    PyObject *object = nullptr, *weight = nullptr, *bias = nullptr;
    double eps = 0;
    int may_be_freed = 0;
    if (!PyArg_ParseTuple(arguments, "OdOOp", &object, &eps, &weight, &bias, &may_be_freed)) throw PythonError();
    const auto given = [](PyObject* each) { return each == Py_None ? at::Tensor() : tensor_in(each); };
    const at::Tensor& out = tensor_in(object);
    const auto node = out.grad_fn();
    const auto* const norm = node ? node_as<generated::NativeLayerNormBackward0>(*node) : nullptr;
    if (!norm || version_of(out) != 0) return Py_NewRef(Py_None);
    const Result<generated::NativeLayerNormBackward0> result{out, *norm, may_be_freed != 0};
    if (const Ref recipe = recipe_of_exact_layer_norm(result, eps, given(weight), given(bias))) offer(*node, recipe);
    return Py_NewRef(Py_None);
  });
}

inline PyMethodDef recipe_functions[] = {
    {"note_offering", note_offering, METH_O, "Note that results of an autograd function may be recomputed."},
    {"is_offering", is_offering, METH_O, "Return whether results of an autograd function may be recomputed."},
    {"recipe_of", find_recipe, METH_O, "Return the recipe for a tensor, or for the source of the cast that made it."},
    {"offer_norm", offer_norm, METH_VARARGS, "Offer a recipe for a norm's output."},
    {"offer_exact_layer_norm", offer_exact_layer_norm, METH_VARARGS, "Offer a recipe to the bit for a layer norm."},
    {nullptr, nullptr, 0, nullptr},
};

/// Add the classes of the engine to the module.
inline void add_classes(PyObject* module) {
  const Ref holder = checked(PyImport_ImportModule("pyactcomp.torch_private"));
  const Ref stored = checked(PyObject_GetAttrString(holder.get(), "StoredForm"));
  Types& all = types();
  make_types(reinterpret_cast<PyTypeObject*>(stored.get()));
  all.decisions =
      class_of<Decisions>("pyactcomp._observer.Decisions",
                          "How tensors are stored, decided once for each reading, maker, partner and layout.", nullptr,
                          nullptr, nullptr, nullptr);
  all.hooks = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&hooks_spec)).release());
  for (PyTypeObject* const type :
       {all.storing, all.sharing, all.decisions, all.hooks, all.kept, all.versioned, all.same, all.shapeless,
        all.recast, all.shared, all.region, all.view, all.recipe, all.from_recipe}) {
    if (PyModule_AddType(module, type) != 0) throw PythonError();
  }
  for (PyMethodDef* const functions : {recipe_functions, away_functions}) {
    if (PyModule_AddFunctions(module, functions) != 0) throw PythonError();
  }
  add_offload_classes(module);
}

}  // namespace pac::engine
