// Stored forms that several operators may share: the region of one tensor's codes, and views of regions.
#pragma once

#include <cstdint>
#include <utility>

#include "engine/forms.hpp"

namespace pac::engine {

/// A stored form that several operators may share, decoded or recomputed in backward.
///
/// The restored tensor stays alive from the first unpacking to the last, so the backward of q, k and v restores their
/// common input once.
struct Shared : Stored {
  Layout layout;
  Ref sharing;
  int index = -1;  ///< of the CUDA device
  std::int64_t stream = 0;
  long uses = 1, pending = 0;
  at::Tensor restored;

  ~Shared() override {
    if (!sharing) return;
    for (Shared*& each : body<Sharing>(sharing.get()).recent) {
      if (each == this) each = nullptr;
    }
  }

  /// Decode or recompute the tensor on the current stream.
  virtual at::Tensor make() = 0;

  at::Tensor restore() override {
    if (index >= 0 && current_stream(index) != stream) {
      const Ref device(PyLong_FromLong(index)), packing(PyLong_FromLongLong(stream));
      const Ref made = rare("make_on_another_stream", {self, device.get(), packing.get()});
      return tensor_in(made.get());
    }
    return uses == 1 ? make() : restore_shared();
  }

 private:
  at::Tensor restore_shared() {
    if (pending == 0) pending = uses;
    --pending;
    if (restored.defined()) return pending == 0 ? std::exchange(restored, at::Tensor()) : restored;
    at::Tensor made = make();
    if (pending == 0 || !sharing) return made;
    restored = made;
    auto& [oldest, latest] = body<Sharing>(sharing.get()).recent;
    if (oldest && oldest != this) oldest->restored.reset();
    oldest = std::exchange(latest, this);
    return made;
  }
};

/// A packed buffer: the elements of one dense tensor in storage order.
///
/// Several saved tensors may be views of one region. If a later reader needs more, the region is stored anew for all.
/// If a tensor has gaps between its elements, as a slice of each row, the region holds the elements alone.
struct Region : Shared {
  Version seen;
  Memory memory;
  Layout apart;  ///< of a tensor with gaps: where its elements lay
  const void* address = nullptr;
  std::int64_t numel = 0;
  Ref storing;  ///< none if the buffer holds the tensor itself
  Ref form;
  long need = kExact;
  Buffer buffer;

  ~Region() override {
    if (!sharing) return;
    auto& regions = body<Sharing>(sharing.get()).regions;
    const auto entry = regions.find({address, numel});
    if (entry != regions.end() && entry->second == this) regions.erase(entry);
  }

  /// Describe the tensor that is stored, dense or as `in_memory_order` gives it; `store` or `hold` follows.
  void describe(const at::Tensor& source, std::int64_t current, const Ref& shared) {
    layout = Layout::of(source);
    if (!is_dense(source)) apart = std::exchange(layout, Layout::contiguous(source.sizes()));
    index = source.is_cuda() ? source.get_device() : -1;
    stream = current;
    sharing = shared;
    seen = Version(source);
    memory = Memory(source);
    address = source.data_ptr();
    numel = source.numel();
  }

  /// Pack `source`, the described tensor in any shape.
  void store(const at::Tensor& source, const Ref& how, std::uint64_t seed) {
    const StoringBody& given = body<StoringBody>(how.get());
    buffer = given.encode(source, seed);
    storing = how;
    form = given.form;
    need = given.need;
  }

  /// Hold the original instead of codes; `source` is the same memory in any shape.
  void hold(const at::Tensor& source, const Ref& itself) {
    const Layout& own = has_gaps() ? apart : layout;
    buffer = Buffer(observer::bare_tensor(source).as_strided(own.sizes, own.strides));
    storing = Ref();
    form = itself;
    need = kExact;
  }

  /// Let the stored bytes leave the device.
  void leave(Tape& tape, std::int64_t current) { buffer.leave(tape, current); }

  bool has_gaps() const { return !apart.sizes.empty(); }

  /// Return whether the buffer holds the exact elements in a narrower dtype.
  bool narrowed() const { return need == kExact && storing; }

  /// Return whether the codes provably match a tensor at the same address with as many elements.
  bool still_holds(const at::Tensor& source, std::int64_t current) const {
    return memory.is_of(source) && !seen.moved() && version_of(source) == seen.saved &&
           seen.dtype == source.scalar_type() && stream == current &&
           apart == (is_dense(source) ? Layout() : Layout::in_memory_order(source));
  }

  void check() const override { seen.check(layout.sizes); }
  at::Tensor restore() override {
    check();
    if (need != kExact) check_reader(form.get(), need, layout.sizes);
    return Shared::restore();
  }

  at::Tensor make() override {
    if (!storing) return buffer.tensor();
    ++counts().decoded;
    return body<StoringBody>(storing.get()).decode(buffer, layout.sizes, layout.strides);
  }
};

/// A view of a packed region or of a recomputed output.
struct View : Stored {
  Ref region;
  Layout layout;
  std::int64_t offset = 0;
  /// The input of a checkpointed block, whose operators may save other tensors for one without gaps.
  bool keeps_gaps = false;
  void check() const override { stored_in(region.get())->check(); }
  at::Tensor restore() override {
    const at::Tensor whole = engine::restore(region.get());
    const auto* const own = dynamic_cast<const Region*>(stored_in(region.get()));
    if (!own || !own->has_gaps()) return view_of(whole, layout, offset);
    if (!own->storing) return view_of(whole, layout, whole.storage_offset());
    // Kernels sum in the order of memory, so what must be exact gets its gaps back.
    const bool gaps = keeps_gaps || own->need == kExact;
    const auto dense = gaps ? std::nullopt : own->apart.without_gaps(layout);
    if (dense) return view_of(whole, *dense, 0);
    at::Tensor out = observer::empty(layout.sizes, layout.strides, whole.scalar_type(), whole);
    view_of(out, own->apart, 0).copy_(whole);
    return out;
  }
};

}  // namespace pac::engine
