// The saved-tensor hooks of one forward pass: decide how each tensor is stored, and store it.
//
// Longer than 400 lines: the decisions are one chain, in which each case hands over to the next.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "engine/decisions.hpp"
#include "engine/memory.hpp"
#include "engine/recompute.hpp"
#include "observer/facts.hpp"

namespace pac::engine {

/// The hooks of one forward.
///
/// Python's Frame opens and closes them, and packs what is rare: tensors of other classes, inputs of checkpointed
/// blocks and results of gathering shards. With a report's recorder, every tensor is recorded on
/// the way.
class Hooks {
 public:
  PyObject* self = nullptr;
  Ref frame, packing, recorder, module, sharing, decisions;
  std::int64_t min_bytes = 0;
  long skipping = 0;    ///< skipped modules whose forward is running
  long casts_left = 0;  ///< casts whose parameter to look for
  bool lossless = false, stochastic = false;
  bool gathers = false;   ///< whether the process is one of several, which may gather shards
  bool waits = false;     ///< whether inputs of a checkpointed block wait for their form
  bool offloads = false;  ///< whether stored bytes may leave the device

  /// Let go of all that the forward needed alone.
  void drop() {
    for (Ref* each : {&frame, &packing, &recorder, &module, &decisions}) *each = Ref();
    owned_ = Owned();
    tapes_.clear();
  }

  /// The pack hook: return the stored form of a saved tensor.
  Ref pack(PyObject* object) {
    observer::note_save();
    const at::Tensor& tensor = tensor_in(object);
    if (!frame) return keep({object, tensor}, "LOSSLESS");  // after the forward
    // Operators may be transformed or recorded, or the tensor is of another class: Python looks closely.
    if (observer::special() || !THPVariable_CheckExact(object)) return method("_pack_unclear", {object});
    const Given given{object, tensor};
    return pack_plain(given, given);
  }

  /// Pack a plain tensor; `saved` is the tensor in the graph: the subclass around `given`, or `given`.
  Ref pack_plain(const Given& given, const Given& saved) {
    if (const char* const reason = reason_to_keep(given.tensor, saved)) return keep(given, reason);
    const observer::Facts facts = observer::facts_of(saved.tensor);
    const Ref reading = facts.reading ? facts.reading : rare("of_no_operator", {});
    const bool starts_block = reading.get() == constants().checkpoint;
    if (waits && !starts_block) method("_decide_pending", {});
    if (given.tensor.scalar_type() == at::kBool) {
      if (reading_drops_nothing(reading.get())) return keep(given, "NOT_DROPPED");
      return compress(given, {Ref::borrowed(constants().itself), kExact});
    }
    const Form form =
        body<Decisions>(decisions.get()).form(packing.get(), given.object, given.tensor, reading.get(), facts);
    if (!lossless && runs_again(reading.get())) {
      return method("_pack_for_checkpoint", {given.object, saved.object, reading.get(), form.object.get()});
    }
    return pack_for(given, saved, reading.get(), form);
  }

  /// Pack a tensor for its reader in a form, or one at least as exact.
  Ref pack_for(const Given& given, const Given& saved, PyObject* reading, const Form& form) {
    if (form.need == kShape) {
      report(given, "SHAPE_ALONE");
      return shapeless(given.tensor, form);
    }
    const auto held = observer::node_of(saved.tensor);
    const auto* const maker = observer::producer(held.get());
    Ref stored = pack_made(given, saved, reading, form, maker);
    if (runs_again(reading)) {
      const Ref values = stored_form_of(stored);
      if (Py_TYPE(values.get()) == types().view) body<View>(values.get()).keeps_gaps = true;
    }
    Stored* const own = maker && copies_for_write(*maker) ? stored_in(stored.get()) : nullptr;
    if (own) own->written_over = true;
    return stored;
  }

  /// Store a tensor as a cast, a recipe, a concatenation or a shard if what made it allows; else in its form.
  Ref pack_made(const Given& given, const Given& saved, PyObject* reading, const Form& form,
                const observer::Node* maker) {
    const bool is_whole = saved.object == given.object;
    const auto* const cast = maker && observer::is_cast(*maker) ? maker : nullptr;
    if (cast) {
      if (Ref stored = recast(given, *cast)) return stored;
      if (is_whole) return pack_cast(given, reading, form, *cast);
    } else if (is_whole && maker && reading != constants().checkpoint) {
      // A checkpointed block may not differentiate an input, and then no one but a recipe asks for its operands.
      if (Ref stored = recompute(given, form)) return stored;
      if (Ref stored = join(given, form)) return stored;
    }
    if (Ref stored = sharded_by(given, saved, reading, form)) return stored;
    return store(given, reading, form, cast);
  }

  /// Store a tensor, as nothing recomputes it; `cast` is the tensor's node if that is a cast, else null.
  Ref store(const Given& given, PyObject* reading, const Form& form, const observer::Node* cast) {
    if (form.object.get() == constants().gained) {  // no recipe begins in front of the gain
      constexpr std::int64_t kHalfBytes = 2;
      const bool narrow = given.tensor.element_size() <= kHalfBytes;
      return store(given, reading, form_in(narrow ? constants().itself : constants().bfloat16), cast);
    }
    if (form.need == kExact) return store_exact(given, reading, cast);
    if (is_held(given.tensor)) return keep(given, "HELD");
    return compress(given, form);
  }

  /// Return the region that stores the memory of `source`: a live one if its form serves, else a new one. Adds the
  /// growth in bytes to `added`.
  Ref region(const at::Tensor& source, const Ref& how, std::int64_t& added) {
    StoringBody& storing = body<StoringBody>(how.get());
    const std::int64_t stream = stream_of(source);
    auto& regions = body<Sharing>(sharing.get()).regions;
    const auto known = regions.find({source.data_ptr(), source.numel()});
    if (known != regions.end() && known->second->still_holds(source, stream)) {
      Region& found = *known->second;
      Ref shared = Ref::borrowed(found.self);
      if (serves(found, storing.form.get())) {
        ++found.uses;
        return shared;
      }
      if (storing.serves_form(found.form.get())) {
        added -= found.buffer.nbytes();
        found.store(source, how, seed());
        added += found.buffer.nbytes();
        note_place(leave(found, source));
        ++found.uses;
        return shared;
      }
      // Neither form serves the other's reader: keep both.
    }
    Region& made_now = *made<Region>(types().region);
    Ref object(made_now.self);
    made_now.describe(source, stream, sharing);
    made_now.store(source, how, seed());
    regions[{source.data_ptr(), source.numel()}] = &made_now;
    added += made_now.buffer.nbytes();
    note_place(leave(made_now, source));
    return object;
  }

  /// Keep a tensor for a reason, named as in engine/reasons.py.
  Ref keep(const Given& given, const char* reason, PyObject* reading = nullptr) {
    Kept& form = *made<Kept>(types().kept);
    Ref object(form.self);
    form.hold(given.tensor);
    note_place(may_leave(given.tensor, reason) && leave(form, given.tensor));
    if (recorder) {
      const Ref name(PyUnicode_FromString(reason));
      method("_report_kept", {given.object, name.get(), reading ? reading : Py_None});
    }
    return object;
  }

 private:
  Owned owned_;
  std::vector<std::pair<c10::Device, Ref>> tapes_;  ///< of each device met; None where nothing leaves

  /// Return whether memory kept for a reason may leave: not that of the model, nor what an optimizer or user may own.
  bool may_leave(const at::Tensor& tensor, const std::string& reason) const {
    if (!offloads || reason == "PARAMETER" || reason == "LEAF" || reason == "SMALL") return false;
    const bool leaf = tensor.is_leaf() && tensor.requires_grad();
    return !leaf && tensor.layout() == at::kStrided && tensor.has_storage() && observer::is_exact(tensor) &&
           was_made_on_this_stream(tensor);
  }

  /// Memory goes back to the pool of the stream that allocated it, which may not wait for this stream before it uses
  /// the memory again. Of a tensor without a producer nobody knows the stream, but who shares such a tensor between
  /// streams has told the allocator.
  static bool was_made_on_this_stream(const at::Tensor& tensor) {
    const at::TensorBase& owner = tensor.is_view() ? tensor._base() : tensor;
    const auto& node = owner.grad_fn();
    if (!tensor.is_cuda() || !node) return true;
    const c10::impl::VirtualGuardImpl streams(tensor.device().type());
    return node->input_metadata(owner.output_nr()).stream() == streams.getStream(tensor.device());
  }

  /// Put the stored bytes of a form on the tape of their device, if there is one; return whether they are on it.
  template <class Form>
  bool leave(Form& form, const at::Tensor& source) {
    if (!offloads || !packing || observer::special()) return false;
    const c10::Device device = source.device();
    auto known = std::find_if(tapes_.begin(), tapes_.end(), [&](const auto& each) { return each.first == device; });
    if (known == tapes_.end()) {
      const Ref place = checked(THPDevice_New(device));
      tapes_.emplace_back(device, checked(PyObject_CallMethod(packing.get(), "tape", "O", place.get())));
      known = std::prev(tapes_.end());
    }
    PyObject* const tape = known->second.get();
    if (Py_TYPE(tape) == types().tape) form.leave(body<Tape>(tape), stream_of(source));
    if (!form.buffer.may_be_away()) return false;
    Read::leave(source.storage().unsafeGetStorageImpl(), body<Tape>(tape), stream_of(source));
    return true;
  }

  /// Tell the recorder where the bytes of the tensor that it records next go.
  void note_place(bool leaves) {
    if (recorder && offloads) checked(PyObject_CallMethod(recorder.get(), "note_place", "i", leaves));
  }

  Ref method(const char* name, std::initializer_list<PyObject*> arguments) {
    c10::SmallVector<PyObject*, 5> all{frame.get()};
    all.append(arguments.begin(), arguments.end());
    const Ref text(PyUnicode_InternFromString(name));
    return checked(PyObject_VectorcallMethod(text.get(), all.data(), all.size(), nullptr));
  }

  /// Record a saved tensor: kept or not stored for a reason, or stored in `nbytes` of its own.
  void report(const Given& given, const char* reason, std::int64_t nbytes = 0) {
    if (!recorder) return;
    PyObject* const why = reason ? constant(reason) : Py_None;
    checked(PyObject_CallMethod(recorder.get(), "add", "OOL", given.object, why, static_cast<long long>(nbytes)));
  }

  /// Return the reason to keep a tensor, from metadata and ownership alone; null if it may be packed.
  const char* reason_to_keep(const at::Tensor& tensor, const Given& saved) {
    if (tensor.layout() != at::kStrided) return "TENSOR_LAYOUT";
    if (tensor.is_nested()) return "NESTED";
    // Lossless mode copies almost nothing, so the owner matters only to a report, or where kept memory leaves.
    const bool copies = !lossless || recorder || offloads || tensor.scalar_type() == at::kBool;
    if (copies && owned_.owns(tensor, module.get())) return "PARAMETER";
    const at::TensorBase& owner = saved.tensor.is_view() ? saved.tensor._base() : saved.tensor;
    if (is_parameter(owner)) return "PARAMETER";
    const bool needs_grad = saved.tensor.requires_grad();
    if (needs_grad && owner.is_leaf() && owner.requires_grad()) return "LEAF";
    if (skipping) return "SKIPPED";
    if (!is_packed_dtype(tensor.scalar_type())) return "DTYPE";
    if (static_cast<std::int64_t>(tensor.nbytes()) < min_bytes) return "SMALL";
    if (!needs_grad && tensor.scalar_type() != at::kBool) {
      if (observer::may_be_of_compiled_graph()) rare("warn_of_compiled_graph", {packing.get()});
      return "NO_GRAD";
    }
    return tensor.is_neg() ? "NEGATIVE_VIEW" : nullptr;
  }

  /// Return whether a reader is a checkpointed block, which runs again in backward.
  static bool runs_again(PyObject* reading) {
    return reading == constants().checkpoint || reading == constants().checkpointed;
  }

  /// Return whether a mask's reader is one that fills elements, whose mask is no drawn one.
  static bool reading_drops_nothing(PyObject* reading) {
    const Ref why = checked(PyObject_GetAttrString(reading, "why"));
    return why.get() == constants().not_dropped;
  }

  Ref shapeless(const at::Tensor& tensor, const Form& form) {
    Shapeless& stored = *made<Shapeless>(types().shapeless);
    Ref object(stored.self);
    stored.seen = Version(tensor);
    stored.layout = Layout::of(tensor);
    stored.form = form.object;
    return object;
  }

  /// Store nothing of a parameter's cast but the parameter; return nothing for another cast.
  Ref recast(const Given& given, const observer::Node& cast) {
    if (casts_left <= 0) return {};
    --casts_left;
    const at::Tensor parameter = observer::cast_leaf(cast);
    if (!parameter.defined() || !is_parameter(parameter)) return {};
    const at::Tensor& copy = given.tensor;
    if (!is_fresh_cast(copy, parameter, cast)) return keep(given, "OTHER_LAYOUT");
    report(given, "RECAST");
    Recast& stored = *made<Recast>(types().recast);
    Ref object(stored.self);
    stored.seen = Version(copy);
    stored.layout = Layout::of(copy);
    stored.offset = copy.storage_offset();
    stored.parameter = parameter;
    stored.of_parameter = version_of(parameter);
    stored.names = packing;
    return object;
  }

  /// Store how to recompute a tensor as exactly as a form would; return nothing if there is no way.
  Ref recompute(const Given& given, const Form& form) {
    const Ref recipe = recipe_of(given.tensor, lossless, gathers);
    return recipe && is_as_exact(recipe, form) ? recomputed(given, recipe, given.tensor.scalar_type()) : Ref();
  }

  /// Pack the result of a cast, once for all equal casts of one offered output: autocast makes three for q, k and v.
  Ref pack_cast(const Given& given, PyObject* reading, const Form& form, const observer::Node& cast) {
    const at::Tensor& copy = given.tensor;
    const at::Tensor whole = copy.is_view() ? at::Tensor(copy._base()) : copy;
    const Ref known = recipe_of_source(whole, cast);
    const Ref recipe = known ? known : recipe_of_stored_source(whole, cast);
    if (recipe && body<Recipe>(recipe.get()).casts && body<Recipe>(recipe.get()).computes() &&
        is_as_exact(recipe, form)) {
      return recomputed(given, recipe, whole.scalar_type());
    }
    if (!known) return store(given, reading, form, &cast);
    Recipe& source = body<Recipe>(known.get());
    const Ref equal = source.copy_like(copy);
    Region* const region = equal && Py_TYPE(equal.get()) == types().region ? &body<Region>(equal.get()) : nullptr;
    if (equal && (!region || serves(*region, form.object.get()))) {
      if (region) ++region->uses;
      report(given, "SAME_CAST");
      return same(equal, copy);
    }
    Ref stored = store(given, reading, form, &cast);
    if (Py_TYPE(stored.get()) == types().kept || Py_TYPE(stored.get()) == types().region) {
      source.copies.push_back({copy.scalar_type(), copy.storage_offset(), Layout::of(copy), Weak(stored.get())});
    }
    return stored;
  }

  /// Return whether a recomputed output is as exact as a form.
  bool is_as_exact(const Ref& recipe, const Form& form) const {
    return lossless || form.need == kCodes || body<Recipe>(recipe.get()).exact;
  }

  /// Store of a concatenation the parts that nothing restores; return nothing if that is all of them: see parts.hpp.
  Ref join(const Given& given, const Form& form);

  /// Return the stored form of a tensor that a recipe recomputes: its output in a dtype, or a view of that. The
  /// recipe's operands take `added` bytes of their own.
  Ref recomputed(const Given& given, const Ref& recipe, at::ScalarType dtype, std::int64_t added = 0) {
    const at::Tensor& tensor = given.tensor;
    const Recipe& how = body<Recipe>(recipe.get());
    const std::int64_t stream = stream_of(tensor);
    report(given, added == 0 ? "RECOMPUTED" : nullptr, added);
    Ref whole;
    if (how.latest && how.latest->dtype == dtype && how.latest->stream == stream) {
      whole = Ref::borrowed(how.latest->self);
      ++how.latest->uses;
    } else {
      FromRecipe& stored = *made<FromRecipe>(types().from_recipe);
      whole = Ref(stored.self);
      stored.describe(recipe, dtype, tensor.is_view() ? at::Tensor(tensor._base()) : tensor, stream, sharing);
    }
    const Ref stored = viewed(whole, tensor, tensor.storage_offset());
    return dtype == how.dtype ? stored : same(stored, tensor);
  }

  /// Return a form with the values of another, for a tensor with a version counter of its own.
  static Ref same(const Ref& stored, const at::Tensor& tensor) {
    Same& form = *made<Same>(types().same);
    Ref object(form.self);
    form.hold(stored, tensor);
    return object;
  }

  /// Store codes of this process's shard of a tensor gathered from several; nothing if it is none.
  Ref sharded_by(const Given& given, const Given& saved, PyObject* reading, const Form& form) {
    if (!gathers || form.need != kCodes || is_held(given.tensor)) return {};
    Ref stored = method("_sharded", {given.object, saved.object, reading, form.object.get()});
    return stored.get() == Py_None ? Ref() : stored;
  }

  /// Store a tensor without loss: cast back to its narrower source dtype, or kept.
  Ref store_exact(const Given& given, PyObject* reading, const observer::Node* cast) {
    const at::Tensor& tensor = given.tensor;
    if (cast) {
      const at::ScalarType from = observer::source_dtype(*cast);
      const at::Tensor whole = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
      if (is_exact_cast(from, tensor.scalar_type()) && version_of(whole) == 0 && whole.grad_fn().get() == cast &&
          is_dense(whole)) {
        const Ref dtype(dtype_object(from));
        const Ref storing =
            body<Decisions>(decisions.get()).storing(packing.get(), "narrow_storing", whole, dtype.get());
        if (storing) {
          std::int64_t added = 0;
          const Ref stored = region(whole, storing, added);
          report(given, nullptr, added);
          return viewed(stored, tensor, tensor.storage_offset());
        }
      }
    }
    if (lossless) return keep(given, "LOSSLESS");
    Ref stored = keep(given, "READING", reading);
    body<Kept>(stored.get()).share(sharing);
    const auto& regions = body<Sharing>(sharing.get()).regions;
    const auto known = regions.find({tensor.data_ptr(), tensor.numel()});
    if (known != regions.end() && known->second->still_holds(tensor, known->second->stream)) {
      known->second->hold(tensor, Ref::borrowed(constants().itself));
      if (may_leave(tensor, "READING")) leave(*known->second, tensor);
    }
    return stored;
  }

  /// Return whether a tensor's memory is already kept exact for another reader.
  bool is_held(const at::Tensor& tensor) const {
    const auto& held = body<Sharing>(sharing.get()).held;
    const auto known = held.find(tensor.storage().unsafeGetStorageImpl());
    return known != held.end() && known->second->is_of(tensor);
  }

  /// Store a tensor in a form of fewer bits.
  Ref compress(const Given& given, const Form& form) {
    const at::Tensor& tensor = given.tensor;
    if (is_dense(tensor)) return compress_elements(given, tensor, form, 0);
    const at::Tensor distinct = without_expanded(tensor, Layout::of(tensor));
    if (is_dense(distinct)) return compress_elements(given, distinct, form, 0);
    const bool overlapping = overlaps(Layout::of(distinct));
    if (tensor.is_view()) {
      const at::Tensor base(tensor._base());
      const bool whole = overlapping ? holds_view(base, distinct) : is_stored(base, form);
      if (whole && !is_of_one_result(form)) {
        return compress_elements(given, base, form, tensor.storage_offset() - base.storage_offset());
      }
    }
    if (overlapping) return keep(given, "OVERLAPPING");
    const Layout order = Layout::in_memory_order(distinct);
    return compress_elements(given, observer::bare_tensor(distinct).as_strided(order.sizes, order.strides), form, 0);
  }

  /// Store a tensor that holds the elements of a saved one, from an offset on; return a view of it.
  Ref compress_elements(const Given& given, const at::Tensor& source, const Form& form, std::int64_t offset) {
    const Ref storing = body<Decisions>(decisions.get()).storing(packing.get(), "storing", source, form.object.get());
    if (!storing) return keep(given, "DEVICE");
    std::int64_t added = 0;
    Ref stored = region(source, storing, added);
    report(given, nullptr, added);
    return viewed(stored, given.tensor, offset);
  }

  /// Return whether the whole of a view is stored already, in a form that serves the view's reader.
  bool is_stored(const at::Tensor& base, const Form& form) const {
    const auto& regions = body<Sharing>(sharing.get()).regions;
    const auto known = regions.find({base.data_ptr(), base.numel()});
    return known != regions.end() && is_dense(base) && known->second->still_holds(base, stream_of(base)) &&
           serves(*known->second, form.object.get());
  }

  /// Return a region or a recomputed output for a tensor of its layout, or else a view of it.
  static Ref viewed(const Ref& stored, const at::Tensor& tensor, std::int64_t offset) {
    if (body<Shared>(stored.get()).layout.fits(tensor)) return stored;
    View& view = *made<View>(types().view);
    Ref object(view.self);
    view.region = stored;
    view.layout = Layout::of(tensor);
    view.offset = offset;
    return object;
  }

  /// Return whether a form is for one operator's result alone: other elements of the base may exceed its range, or
  /// share a group in which a small positive element rounds to zero.
  static bool is_of_one_result(const Form& form) {
    return PySequence_Contains(constant("OF_ONE_RESULT"), form.object.get()) == 1;
  }

  static bool serves(Region& known, PyObject* wanted) {
    if (known.form.get() == constants().itself || known.form.get() == wanted) return true;
    return known.storing && body<StoringBody>(known.storing.get()).serves_form(wanted);
  }

  /// Return the seed of the next tensor; 0 unless rounding is stochastic.
  std::uint64_t seed() const {
    if (!stochastic) return 0;
    const Ref next = checked(PyObject_CallMethod(packing.get(), "next_seed", nullptr));
    return PyLong_AsUnsignedLongLongMask(next.get());
  }
};

}  // namespace pac::engine
