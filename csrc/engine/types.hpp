// The Python classes of the stored forms: what the rest of the package reads of them.
#pragma once

#include <array>
#include <type_traits>

#include "engine/recipes.hpp"

namespace pac::engine {

/// The classes, made once when the module is imported.
struct Types {
  PyTypeObject *storing, *sharing, *stored, *kept, *versioned, *same, *shapeless, *recast, *shared, *region, *view,
      *decisions, *hooks, *recipe, *from_recipe, *tape;
};

inline Types& types() {
  static Types instance{};
  return instance;
}

/// Return the body of a stored form whose class is this library's own, or null.
inline Stored* stored_in(PyObject* object) {
  const PyTypeObject* const type = Py_TYPE(object);
  const Types& all = types();
  for (const PyTypeObject* const each :
       {all.region, all.kept, all.view, all.same, all.recast, all.shapeless, all.from_recipe}) {
    if (type == each) return &body<Stored>(object);
  }
  return nullptr;
}

template <class Body>
Body* made(PyTypeObject* type) {
  PyObject* const object = allocate<Body>(type);
  if (!object) throw PythonError();
  return &body<Body>(object);
}

/// An attribute: a function of the body that returns a new reference.
template <class Body, PyObject* (*function)(Body&)>
PyObject* attribute(PyObject* self, void*) {
  return guarded([self] { return function(body<Body>(self)); });
}

inline PyObject* truth(bool value) { return PyBool_FromLong(value); }

// Versioned(tensor).

inline int versioned_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject* tensor = nullptr;
    if (!PyArg_ParseTuple(arguments, "O", &tensor)) throw PythonError();
    body<Versioned>(self).seen = Version(tensor_in(tensor));
  });
}

inline PyObject* versioned_check(PyObject* self, PyObject* shape) {
  return guarded([&] {
    Layout layout;
    const Ref sizes = checked(PySequence_Tuple(shape));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sizes.get()); ++i) {
      layout.sizes.push_back(integer(PyTuple_GET_ITEM(sizes.get(), i)));
    }
    body<Versioned>(self).seen.check(layout.sizes);
    return Py_NewRef(Py_None);
  });
}

inline PyMethodDef versioned_methods[] = {
    {"check", versioned_check, METH_O,
     "Raise autograd's own error if the tensor, of this shape, was written to since."},
    {"restore", restore_method, METH_NOARGS, "Return a tensor as the original."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyObject* versioned_moved(Versioned& form) { return truth(form.seen.moved()); }
inline PyGetSetDef versioned_attributes[] = {
    {"moved", attribute<Versioned, versioned_moved>, nullptr, "Whether the tensor was written to since.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// Kept(tensor).

inline int kept_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject* tensor = nullptr;
    if (!PyArg_ParseTuple(arguments, "O", &tensor)) throw PythonError();
    body<Kept>(self).hold(tensor_in(tensor));
  });
}

inline PyObject* kept_tensor(Kept& form) { return THPVariable_Wrap(form.buffer.tensor()); }
inline PyObject* kept_version(Kept& form) { return PyLong_FromUnsignedLong(form.seen.saved); }
inline PyObject* kept_layout(Kept& form) { return layout_object(form.layout()); }
inline PyObject* kept_unchanged(Kept& form) { return truth(form.unchanged()); }
inline PyObject* kept_is_leaf(Kept& form) { return truth(form.leaf); }
inline PyObject* kept_has_its_memory(Kept& form) { return truth(form.leaf && form.memory.is_of(form.buffer.tensor())); }
inline PyGetSetDef kept_attributes[] = {
    {"tensor", attribute<Kept, kept_tensor>, nullptr, "The tensor.", nullptr},
    {"version", attribute<Kept, kept_version>, nullptr, "The version when saved.", nullptr},
    {"layout", attribute<Kept, kept_layout>, nullptr, "Layout of the tensor.", nullptr},
    {"unchanged", attribute<Kept, kept_unchanged>, nullptr, "Whether the tensor was not written to since.", nullptr},
    {"is_leaf", attribute<Kept, kept_is_leaf>, nullptr, "Whether it is a leaf with memory, whose .data may change.",
     nullptr},
    {"has_its_memory", attribute<Kept, kept_has_its_memory>, nullptr, "Whether a leaf's .data still is what was saved.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

inline PyMethodDef restore_alone[] = {
    {"restore", restore_method, METH_NOARGS, "Return a tensor as the original, or raise autograd's error."},
    {nullptr, nullptr, 0, nullptr},
};

// Same(stored, tensor).

inline int same_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject *stored = nullptr, *tensor = nullptr;
    if (!PyArg_ParseTuple(arguments, "OO", &stored, &tensor)) throw PythonError();
    body<Same>(self).hold(Ref::borrowed(stored), tensor_in(tensor));
  });
}

inline PyObject* same_stored(Same& form) { return Py_NewRef(form.stored.get()); }
inline PyGetSetDef same_attributes[] = {
    {"stored", attribute<Same, same_stored>, nullptr, "The stored form with the values.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// Shared, the base of Region and FromRecipe.

inline PyObject* shared_make(PyObject* self, PyObject*) {
  return guarded([&] { return THPVariable_Wrap(body<Shared>(self).make()); });
}

/// record_stream(stream): let the buffer's memory wait for a stream before it is reused; false without a buffer.
inline PyObject* shared_record_stream(PyObject* self, PyObject* stream) {
  return guarded([&] {
    if (Py_TYPE(self) != types().region) return truth(false);
    const Ref packed(THPVariable_Wrap(body<Region>(self).buffer.tensor()));
    checked(PyObject_CallMethod(packed.get(), "record_stream", "O", stream));
    return truth(true);
  });
}

inline PyMethodDef shared_methods[] = {
    {"restore", restore_method, METH_NOARGS, "Return a tensor as the original, or raise autograd's error."},
    {"make", shared_make, METH_NOARGS, "Decode or recompute the tensor on the current stream, without checks."},
    {"record_stream", shared_record_stream, METH_O, "Let the stored bytes wait for a stream; False if there are none."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyObject* shared_layout(Shared& form) { return layout_object(form.layout); }
inline PyObject* shared_stream(Shared& form) { return PyLong_FromLongLong(form.stream); }
inline PyObject* shared_uses(Shared& form) { return PyLong_FromLong(form.uses); }
inline int shared_set_uses(PyObject* self, PyObject* value, void*) {
  return guarded_status([&] { body<Shared>(self).uses = static_cast<long>(integer(value)); });
}
inline PyGetSetDef shared_attributes[] = {
    {"layout", attribute<Shared, shared_layout>, nullptr, "Layout of the tensor stored first.", nullptr},
    {"stream", attribute<Shared, shared_stream>, nullptr, "The stream on which the tensor was packed.", nullptr},
    {"uses", attribute<Shared, shared_uses>, shared_set_uses, "Number of saved tensors that share the form.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// Region(source, storing, seed, stream, sharing).

inline int region_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject *source = nullptr, *storing = nullptr, *sharing = nullptr;
    unsigned long long seed = 0;
    long long stream = 0;
    if (!PyArg_ParseTuple(arguments, "OO!KLO!", &source, types().storing, &storing, &seed, &stream, types().sharing,
                          &sharing)) {
      throw PythonError();
    }
    Region& form = body<Region>(self);
    form.describe(tensor_in(source), stream, Ref::borrowed(sharing));
    form.store(tensor_in(source), Ref::borrowed(storing), seed);
  });
}

inline PyObject* region_is_of(PyObject* self, PyObject* tensor) {
  return guarded([&] { return truth(body<Region>(self).memory.is_of(tensor_in(tensor))); });
}

inline PyMethodDef region_methods[] = {
    {"is_of", region_is_of, METH_O, "Return whether a tensor has the memory that was packed."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyObject* region_dtype(Region& form) { return dtype_object(form.seen.dtype); }
inline PyObject* region_form(Region& form) { return Py_XNewRef(form.form.get()); }
inline PyObject* region_nbytes(Region& form) { return PyLong_FromLongLong(form.buffer.nbytes()); }
inline PyObject* region_narrowed(Region& form) { return truth(form.narrowed()); }
inline PyObject* region_unchanged(Region& form) { return truth(!form.seen.moved()); }
inline PyObject* region_address(Region& form) { return PyLong_FromVoidPtr(const_cast<void*>(form.address)); }
inline PyObject* region_buffer(Region& form) {
  return form.buffer ? THPVariable_Wrap(form.buffer.tensor()) : Py_NewRef(Py_None);
}
inline PyGetSetDef region_attributes[] = {
    {"dtype", attribute<Region, region_dtype>, nullptr, "Dtype of the tensor.", nullptr},
    {"form", attribute<Region, region_form>, nullptr, "The form of the stored bytes.", nullptr},
    {"nbytes", attribute<Region, region_nbytes>, nullptr, "Bytes held.", nullptr},
    {"narrowed", attribute<Region, region_narrowed>, nullptr,
     "Whether the buffer holds the exact elements in a narrower dtype.", nullptr},
    {"unchanged", attribute<Region, region_unchanged>, nullptr, "Whether the original was not written to since.",
     nullptr},
    {"address", attribute<Region, region_address>, nullptr, "Address of the original.", nullptr},
    {"buffer", attribute<Region, region_buffer>, nullptr, "The stored bytes as a tensor; None without.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// Recipe(output, compute or None, tensors that are given to `compute`, other operands that it reads unpacked).

inline int recipe_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject *out = nullptr, *compute = nullptr, *stored = nullptr, *operands = nullptr;
    if (!PyArg_ParseTuple(arguments, "OOO!O!", &out, &compute, &PyTuple_Type, &stored, &PyTuple_Type, &operands)) {
      throw PythonError();
    }
    Recipe& recipe = body<Recipe>(self);
    recipe.describe(tensor_in(out));
    if (compute != Py_None) recipe.python = Ref::borrowed(compute);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(stored); ++i) {
      recipe.read_stored(tensor_in(PyTuple_GET_ITEM(stored, i)));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); ++i) {
      recipe.read_unpacked(tensor_in(PyTuple_GET_ITEM(operands, i)));
    }
  });
}

inline PyObject* recipe_compute(PyObject* self, PyObject* dtype) {
  return guarded([&] { return THPVariable_Wrap(body<Recipe>(self).compute(dtype_in(dtype))); });
}

inline PyObject* recipe_serves(PyObject* self, PyObject* tensor) {
  return guarded([&] { return truth(body<Recipe>(self).serves(tensor_in(tensor))); });
}

/// forms(): return the stored forms to hold as long as `compute` may be called; None for each that is freed.
inline PyObject* recipe_forms(PyObject* self, PyObject*) {
  return guarded([&] {
    std::vector<Ref> forms = body<Recipe>(self).forms();
    Ref all = checked(PyTuple_New(static_cast<Py_ssize_t>(forms.size())));
    for (size_t i = 0; i < forms.size(); ++i) {
      PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), forms[i] ? forms[i].release() : Py_NewRef(Py_None));
    }
    return all.release();
  });
}

inline PyMethodDef recipe_methods[] = {
    {"compute", recipe_compute, METH_O, "Recompute the output in a dtype, or raise autograd's error."},
    {"serves", recipe_serves, METH_O, "Return whether a tensor still equals the recomputed output."},
    {"forms", recipe_forms, METH_NOARGS, "Return the stored forms that compute reads; None for each freed one."},
    {nullptr, nullptr, 0, nullptr},
};

inline PyObject* recipe_casts(Recipe& recipe) { return truth(recipe.casts); }
inline PyObject* recipe_computes(Recipe& recipe) { return truth(recipe.computes()); }
inline PyObject* recipe_dtype(Recipe& recipe) { return dtype_object(recipe.dtype); }
inline PyObject* recipe_depth(Recipe& recipe) { return PyLong_FromLong(recipe.depth); }
inline PyObject* recipe_exact(Recipe& recipe) { return truth(recipe.exact); }
inline PyObject* recipe_operands(Recipe& recipe) {
  const std::vector<at::Tensor> unpacked = recipe.unpacked();
  Ref all = checked(PyTuple_New(static_cast<Py_ssize_t>(unpacked.size())));
  Py_ssize_t place = 0;
  for (const at::Tensor& tensor : unpacked) PyTuple_SET_ITEM(all.get(), place++, THPVariable_Wrap(tensor));
  return all.release();
}
inline PyGetSetDef recipe_attributes[] = {
    {"casts", attribute<Recipe, recipe_casts>, nullptr, "Whether casts of the output are recomputed too.", nullptr},
    {"computes", attribute<Recipe, recipe_computes>, nullptr, "Whether the output can be recomputed.", nullptr},
    {"dtype", attribute<Recipe, recipe_dtype>, nullptr, "Dtype of the output.", nullptr},
    {"depth", attribute<Recipe, recipe_depth>, nullptr, "Length of the longest chain of recipes.", nullptr},
    {"exact", attribute<Recipe, recipe_exact>, nullptr, "Whether the output is recomputed to the bit.", nullptr},
    {"operands", attribute<Recipe, recipe_operands>, nullptr, "Tensors read unpacked.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// FromRecipe, made in C++ alone.

inline PyObject* from_recipe_recipe(FromRecipe& form) { return Py_NewRef(form.recipe.get()); }
inline PyObject* from_recipe_dtype(FromRecipe& form) { return dtype_object(form.dtype); }
inline PyGetSetDef from_recipe_attributes[] = {
    {"recipe", attribute<FromRecipe, from_recipe_recipe>, nullptr, "The recipe.", nullptr},
    {"dtype", attribute<FromRecipe, from_recipe_dtype>, nullptr, "Dtype of the tensor.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

// View(region, layout, offset).

inline int view_init(PyObject* self, PyObject* arguments, PyObject*) {
  return guarded_status([&] {
    PyObject *region = nullptr, *layout = nullptr;
    long long offset = 0;
    if (!PyArg_ParseTuple(arguments, "OOL", &region, &layout, &offset)) throw PythonError();
    View& form = body<View>(self);
    form.region = Ref::borrowed(region);
    form.layout = layout_in(layout);
    form.offset = offset;
  });
}

inline PyObject* view_region(View& form) { return Py_NewRef(form.region.get()); }
inline PyObject* view_layout(View& form) { return layout_object(form.layout); }
inline PyGetSetDef view_attributes[] = {
    {"region", attribute<View, view_region>, nullptr, "The form of the whole.", nullptr},
    {"layout", attribute<View, view_layout>, nullptr, "Layout of the view.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

/// tp_traverse of a class whose objects Python's collector need not know: what a form holds is in C++, where the
/// collector does not look. A thousand forms in a step would start a collection again and again.
inline int visit_nothing(PyObject*, visitproc, void*) { return 0; }

/// Make one class, with a base or none.
template <class Body>
PyTypeObject* class_of(const char* name, const char* doc, PyTypeObject* base, initproc init, PyMethodDef* methods,
                       PyGetSetDef* attributes, unsigned long flags = 0) {
  std::array<PyType_Slot, 10> slots{};
  size_t count = 0;
  const auto add = [&](int slot, void* value) {
    if (value) slots[count++] = {slot, value};
  };
  add(Py_tp_doc, const_cast<char*>(doc));
  if constexpr (!std::is_abstract_v<Body>) {
    add(Py_tp_new, reinterpret_cast<void*>(&allocate<Body>));
    add(Py_tp_dealloc, reinterpret_cast<void*>(&deallocate<Body>));
  }
  add(Py_tp_members, weakly_referable);
  add(Py_tp_init, reinterpret_cast<void*>(init));
  add(Py_tp_methods, methods);
  add(Py_tp_getset, attributes);
  if (base) {  // else the class would inherit from one of Python's what tells the collector
    add(Py_tp_traverse, reinterpret_cast<void*>(&visit_nothing));
    add(Py_tp_free, reinterpret_cast<void*>(&PyObject_Free));
  }
  PyType_Spec spec{name, sizeof(Header), 0, static_cast<unsigned>(Py_TPFLAGS_DEFAULT | flags), slots.data()};
  if constexpr (!std::is_abstract_v<Body>) spec.basicsize = sizeof(Boxed<Body>);
  const Ref bases = base ? checked(PyTuple_Pack(1, base)) : Ref();
  return reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpecWithBases(&spec, bases.get())).release());
}

/// Make the classes; `stored` is the common base, torch_private.StoredForm.
inline void make_types(PyTypeObject* stored) {
  Types& all = types();
  all.stored = stored;
  all.storing = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&storing_spec)).release());
  all.sharing = class_of<Sharing>("pyactcomp._observer.Sharing", "What the stored forms of one forward share.", nullptr,
                                  nullptr, nullptr, nullptr);
  all.versioned =
      class_of<Versioned>("pyactcomp._observer.Versioned", "The version counter of a saved tensor, without the tensor.",
                          stored, versioned_init, versioned_methods, versioned_attributes, Py_TPFLAGS_BASETYPE);
  all.kept = class_of<Kept>("pyactcomp._observer.Kept", "A tensor held unpacked, with autograd's version check.",
                            stored, kept_init, restore_alone, kept_attributes);
  all.same = class_of<Same>("pyactcomp._observer.Same",
                            "A tensor with the values of another stored one, but a version counter of its own.",
                            all.versioned, same_init, nullptr, same_attributes);
  all.shapeless = class_of<Shapeless>("pyactcomp._observer.Shapeless",
                                      "A saved tensor whose values backward never reads, only the shape.",
                                      all.versioned, nullptr, nullptr, nullptr);
  all.recast = class_of<Recast>("pyactcomp._observer.Recast",
                                "Autocast's copy of a parameter, cast again from the live parameter.", all.versioned,
                                nullptr, nullptr, nullptr);
  all.shared =
      class_of<Shared>("pyactcomp._observer.Shared", "A stored form that several operators may share.", stored, nullptr,
                       shared_methods, shared_attributes, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION);
  all.region = class_of<Region>("pyactcomp._observer.Region",
                                "A packed buffer: the elements of one dense tensor in storage order.", all.shared,
                                region_init, region_methods, region_attributes);
  all.from_recipe =
      class_of<FromRecipe>("pyactcomp._observer.FromRecipe", "A saved tensor recomputed in backward from a recipe.",
                           all.shared, nullptr, nullptr, from_recipe_attributes, Py_TPFLAGS_DISALLOW_INSTANTIATION);
  all.recipe = class_of<Recipe>("pyactcomp._observer.Recipe", "How backward recomputes an operator's output.", nullptr,
                                recipe_init, recipe_methods, recipe_attributes);
  all.view = class_of<View>("pyactcomp._observer.View", "A view of a packed region or of a recomputed output.", stored,
                            view_init, restore_alone, view_attributes);
}

}  // namespace pac::engine
