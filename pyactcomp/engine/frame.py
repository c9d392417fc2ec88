"""The saved-tensor hooks of one forward pass: decide how each tensor is stored.

Longer than 400 lines: one decision with many cases, and their order matters.
"""

from __future__ import annotations

import sys
from collections import deque
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module

from ..codec import bind_form
from ..codec.layouts import Layout, layout_of, overlaps, without_expanded
from ..errors import ImplementationUnavailableError
from ..readers.forms import (
    ARTANH,
    AS_CODES,
    AS_SHAPE,
    BFLOAT16,
    CODES,
    ITSELF,
    POSITIVE,
    PROBABILITY,
    Form,
    Reading,
    Use,
)
from ..readers.lookup import CHECKPOINT, CHECKPOINTED, of_no_operator
from ..readers.nodes import CAST, cast_parameter, producer
from ..readers.observer import CONSTANT, ORDINARY, UNCLEAR, observer, transformed
from ..readers.table import NOT_DROPPED
from ..torch_private import never_traced, profiled_range, profiler_enabled, source_dtype
from ..torch_private.distributed import local_tensor, waited
from .gathered import GATHERED, Gathering, gathering, new_region
from .marks import PACKS
from .narrow import is_exact_cast
from .packing import HALF_BYTES, Packing
from .policy import (
    HELD,
    LOSSLESS,
    NO_GRAD,
    OTHER_LAYOUT,
    OVERLAPPING,
    PLAIN,
    RECAST,
    RECOMPUTED,
    SAME_CAST,
    SHAPE_ALONE,
    Policy,
    shared_by_siblings,
)
from .recipes import FromRecipe, Recipe
from .recompute import cast_recipe, is_exact, is_fresh_cast, source_of, source_of_cast
from .record import Recorder
from .saved import (
    Distributed,
    Gathered,
    Kept,
    Pending,
    Recast,
    Recent,
    Region,
    Same,
    Saved,
    Shapeless,
    Storing,
    View,
    stream_of,
)
from .unpacking import unpack, unpack_profiled

# A forward with more saved casts than this is a loop, where the search for weight copies costs more than it saves.
_MOST_CASTS = 10_000
# Restored tensors kept at a time, each until the last operator to share it has run.
_RECENTLY_RESTORED = 2
# Forms for the result of one operator: the rest of the base may be out of their range, or share a group that rounds a
# small positive element to zero.
_OF_ONE_RESULT = frozenset((POSITIVE, PROBABILITY, ARTANH))
# Imported only once something was compiled. Test for the module first: to inspect the caller costs more than the rest.
_AOT_AUTOGRAD = "torch._functorch.aot_autograd"


class Frame:
    """The hooks of one forward pass."""

    __slots__ = (
        "_caller",
        "_casts_left",
        "_context",
        "_copies",
        "_facts",
        "_held",
        "_min_bytes",
        "_module",
        "_pending",
        "_pending_since",
        "_recent",
        "_regions",
        "_saving",
        "packing",
        "policy",
        "recorder",
    )

    def __init__(self, packing: Packing, module: Module | None, recorder: Recorder | None) -> None:
        self.packing = packing
        self.recorder = recorder
        self.policy: Policy | None = None
        self._caller: FrameType | None = None
        self._module = module
        self._min_bytes = packing.config.min_bytes
        self._regions: dict[tuple[int, int], ref[Region]] = {}
        # Tensors kept exact for their reader, by the address of their storage.
        self._held: dict[int, ref[Kept]] = {}
        self._pending: list[tuple[Pending, Kept, Tensor, Form, str, str]] = []
        self._pending_since = (0, 0)
        self._saving, self._facts = observer().saving, observer().facts
        self._recent: Recent = deque(maxlen=_RECENTLY_RESTORED)
        # Lossless mode copies almost nothing, so a tensor's ownership matters only to a report.
        self._copies = not packing.lossless or recorder is not None
        self._casts_left = 0 if packing.config.keep_weight_copies else _MOST_CASTS
        hooks = (self.pack_profiled, unpack_profiled) if profiler_enabled() else (self.pack, unpack)
        self._context: Any = torch.autograd.graph.saved_tensors_hooks(*hooks)

    def open(self, caller: FrameType | None) -> None:
        """Activate the hooks; :meth:`abandoned` asks whether ``caller``, if given, still runs."""
        self._caller = caller
        observer().start()
        if self.recorder is not None:
            self.recorder.open()
        self._context.__enter__()

    def close(self) -> None:
        """Deactivate the hooks; packed tensors stay valid."""
        self._caller = None
        # The context holds the hooks and the hooks hold this frame: break the cycle now.
        context, self._context = self._context, None
        context.__exit__()
        observer().stop()
        self._decide_pending()
        if self.recorder is not None:
            self.recorder.close()

    def abandoned(self) -> bool:
        """Return whether the forward ended but the forward hooks never ran, as after KeyboardInterrupt."""
        if self._caller is None:
            return False
        try:
            self._caller.clear()
        except RuntimeError:  # the caller is still running
            return False
        return True

    def enter_exact(self) -> None:
        """Enter a skipped module: keep all tensors until :meth:`leave_exact`."""
        if self.policy is None:
            self.policy = Policy(self._module, self._min_bytes)
        self.policy.skipping += 1

    def leave_exact(self) -> None:
        """Leave the innermost skipped module."""
        if self.policy is not None and self.policy.skipping:
            self.policy.skipping -= 1

    @never_traced
    def pack_profiled(self, tensor: Tensor) -> Saved:
        """Pack, and show the packing as a range in the profile."""
        with profiled_range("pyactcomp::pack"):
            return self.pack(tensor)

    @never_traced
    def pack(self, tensor: Tensor) -> Saved:
        """Return the stored form of a saved tensor: the pack hook."""
        saving = self._saving(tensor, self._min_bytes)
        if saving == UNCLEAR:
            if transformed():
                return Kept(tensor)
        elif self.recorder is None:  # a report wants the reason from `_pack_plain`
            if saving == ORDINARY:
                return self._pack_plain(tensor, tensor, ordinary=True)
            if saving != CONSTANT or self.packing.warned_of_compile or _AOT_AUTOGRAD not in sys.modules:
                return Kept(tensor)
        if type(tensor) in PLAIN:
            return self._pack_plain(tensor, tensor)
        plain = waited(local := local_tensor(tensor))
        if plain is not tensor and type(plain) in PLAIN:
            stored = self._pack_plain(plain, tensor)
            return Same(stored, tensor) if local is tensor else Distributed(stored, tensor)
        return self._keep(tensor, f"tensor subclass {type(tensor).__name__}")

    def _pack_plain(self, tensor: Tensor, saved: Tensor, ordinary: bool = False) -> Saved:
        """Pack a plain tensor; ``saved`` is the tensor in the graph: the subclass around ``tensor``, or ``tensor``.

        For an ``ordinary`` tensor the observer has answered every question but those about the model.
        """
        if self.policy is None:
            self.policy = Policy(self._module, self._min_bytes)
        if ordinary:
            reason = self.policy.reason_of_model(tensor, self._copies)
        else:
            reason = self.policy.reason_to_keep(tensor, saved, self._copies or tensor.dtype is torch.bool)
        if reason is not None:
            if reason is NO_GRAD and _AOT_AUTOGRAD in sys.modules and not self.packing.warned_of_compile:
                self.packing.warn_of_compiled_graph()
            return self._keep(tensor, reason)
        reading, maker, partner, name = self._facts(saved)
        if reading is None:
            reading = of_no_operator()
        if self._pending and reading is not CHECKPOINT:
            self._decide_pending()
        if tensor.dtype is torch.bool:
            if reading.why is NOT_DROPPED:
                return self._keep(tensor, NOT_DROPPED)
            return self._compress(tensor, ITSELF, None)
        form = self.packing.form_for(tensor, reading, maker, partner)
        if not self.packing.lossless and (reading is CHECKPOINT or reading is CHECKPOINTED):
            return self._pack_for_checkpoint(tensor, saved, reading, form, name)
        return self._pack_for(tensor, saved, reading, form, name)

    def _pack_for(self, tensor: Tensor, saved: Tensor, reading: Reading, form: Form, name: str) -> Saved:
        """Pack a tensor, made by the operator ``name``, for its reader in ``form``, or a form at least as exact."""
        if form is AS_SHAPE:
            if self.recorder is not None:
                self.recorder.add(tensor, SHAPE_ALONE)
            return Shapeless(tensor)
        if name == CAST:
            return self._pack_result_of_cast(tensor, saved, reading, form)
        # A checkpointed block may not differentiate an input, and then no one but a recipe asks for its operands.
        if saved is tensor and reading is not CHECKPOINT:
            source = source_of(tensor, name, self.packing.lossless)
            if source is not None and self._serves(source[0], form):
                return self._recomputed(tensor, *source)
        gather = gathering(tensor, saved) if name in GATHERED and _as_shards(reading, form) else None
        return self._store(tensor, None, reading, form, gather)

    def _pack_result_of_cast(self, tensor: Tensor, saved: Tensor, reading: Reading, form: Form) -> Saved:
        """Pack the output of a cast; of a parameter's cast nothing is stored but the parameter's name."""
        node = producer(saved)[1]
        assert node is not None
        if self._casts_left:
            self._casts_left -= 1
            parameter = cast_parameter(node)
            if parameter is not None:
                if not is_fresh_cast(tensor, parameter, node):
                    return self._keep(tensor, OTHER_LAYOUT)
                if self.recorder is not None:
                    self.recorder.add(tensor, RECAST)
                return Recast(tensor, parameter, self.packing)
        if saved is tensor:
            return self._pack_cast(tensor, node, reading, form)
        gather = gathering(tensor, saved) if _as_shards(reading, form) else None
        return self._store(tensor, node, reading, form, gather)

    def _serves(self, recipe: Recipe, form: Form) -> bool:
        """Return whether the recomputed output is as exact as ``form``."""
        return recipe.exact or form.need == CODES or self.packing.lossless

    def _pack_cast(self, copy: Tensor, node: Node, reading: Reading, form: Form) -> Saved:
        """Pack the output of a cast, once for all equal casts of one tensor: autocast makes three for q, k and v."""
        whole = copy if copy._base is None else copy._base
        known = cast_recipe(whole, node)
        source = source_of_cast(whole, node, known)
        if source is not None and self._serves(source[0], form):
            return self._recomputed(copy, *source)
        if known is None:
            return self._store(copy, node, reading, form, None)
        copies = known[0].copies
        part = copy.dtype, copy.storage_offset(), layout_of(copy)
        reference = copies.get(part)
        stored = None if reference is None else reference()
        if stored is not None and (is_exact(stored) or (isinstance(stored, Region) and stored.form.serves(form))):
            if isinstance(stored, Region):
                stored.uses += 1
            if self.recorder is not None:
                self.recorder.add(copy, SAME_CAST)
            return Same(stored, copy)
        new = self._store(copy, node, reading, form, None)
        if isinstance(new, (Kept, Region)):
            first: Kept | Region = new
            copies[part] = ref(first)
        return new

    def _store(
        self, tensor: Tensor, cast: Node | None, reading: Reading, form: Form, gather: Gathering | None
    ) -> Saved:
        """Store a tensor because no recipe serves; ``cast`` is the tensor's node if the node is a cast."""
        if form is ITSELF:
            return self._narrow(tensor, cast, reading)
        if self._held and self._is_held(tensor):
            return self._keep(tensor, HELD)
        return self._compress(tensor, form, gather)

    def _is_held(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is already kept exact for another reader."""
        storage = tensor.untyped_storage()
        reference = self._held.get(storage.data_ptr())
        kept = None if reference is None else reference()
        return kept is not None and kept.tensor.untyped_storage() is storage and kept.version == tensor._version

    def _keep_for(self, tensor: Tensor, reading: Reading) -> Kept:
        """Keep a tensor whose reader needs exact values; other readers of the same memory then share the tensor."""
        if self.packing.lossless:
            return self._keep(tensor, LOSSLESS)
        kept = self._keep(tensor, reading.reason, reading)
        self._held[tensor.untyped_storage().data_ptr()] = ref(kept)
        known = self._regions.get((tensor.data_ptr(), tensor.numel()))
        region = None if known is None else known()
        if region is not None and region.still_holds(tensor, tensor.untyped_storage(), region.stream):
            region.hold(tensor)
        return kept

    def _pack_for_checkpoint(self, tensor: Tensor, saved: Tensor, reading: Reading, form: Form, name: str) -> Saved:
        """Pack the input of a checkpointed block, exact if the block takes decisions from values."""
        calls, decisions, before = observer().progress()
        if reading is CHECKPOINTED:  # the block has run
            form = ITSELF if decisions != before else self._form_for_block(tensor, form, observer().take_divisor())
            return self._pack_for(tensor, saved, reading, form, name)
        if self._pending and self._pending_since[0] != calls:
            self._decide_pending()
        kept = Kept(tensor)
        pending = Pending(kept)
        module = "" if self.recorder is None else self.recorder.module
        self._pending.append((pending, kept, tensor, form, name, module))
        observer().take_divisor()
        # Count from here: the inputs of one block are saved in a row, and packing calls operators too.
        self._pending_since = observer().progress()[:2]
        return pending

    def _form_for_block(self, tensor: Tensor, form: Form, divisor: int) -> Form:
        """Return the form for an input of a checkpointed block whose largest divisor has so many elements.

        A divisor for every group of the input comes from few elements: their errors are not averaged out.
        """
        if form is AS_CODES and divisor * self.packing.config.group_size > tensor.numel():
            return BFLOAT16 if tensor.itemsize > HALF_BYTES else ITSELF
        return form

    def _decide_pending(self) -> None:
        """Store the inputs of the last checkpointed block: by now the block's decisions are known."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        decided = observer().progress()[1] != self._pending_since[1]
        divisor = observer().take_divisor()
        for holder, kept, tensor, form, name, module in pending:
            if kept.unchanged:  # otherwise unpacking raises autograd's error
                if self.recorder is not None:
                    self.recorder.enter(module)
                form = ITSELF if decided else self._form_for_block(tensor, form, divisor)
                holder.stored = self._pack_for(tensor, tensor, CHECKPOINT, form, name)
                if self.recorder is not None:
                    self.recorder.leave()

    def _recomputed(self, tensor: Tensor, recipe: Recipe, out: Tensor, dtype: torch.dtype) -> Saved:
        """Return the stored form of a recomputed tensor: an output in a dtype, or a view of one."""
        shared = recipe.stored(out, dtype, stream_of(tensor), self._recent)
        if self.recorder is not None:
            self.recorder.add(tensor, RECOMPUTED)
        layout = layout_of(tensor)
        whole = shared.layout == layout
        stored: FromRecipe | View = shared if whole else View(shared, layout, int(tensor.storage_offset()))
        return stored if dtype is recipe.dtype else Same(stored, tensor)

    def _narrow(self, tensor: Tensor, cast: Node | None, reading: Reading) -> Saved:
        """Store a tensor without loss: cast back to its narrower source dtype, or kept."""
        # No exact cast has a target of fewer than four bytes.
        dtype = None if cast is None or tensor.dtype.itemsize < 4 else source_dtype(cast)
        whole = tensor if tensor._base is None else tensor._base
        if (
            dtype is None
            or not is_exact_cast(dtype, tensor.dtype)
            or whole._version != 0
            or whole.grad_fn is not cast
            or not layout_of(whole).dense
        ):
            return self._keep_for(tensor, reading)
        try:
            kernel = bind_form(self.packing.config.impl, "cast", whole.dtype, whole.device, dtype)
        except ImplementationUnavailableError:
            return self._keep_for(tensor, reading)
        nbytes = kernel.packed_nbytes(whole.numel())
        region, added = self._region(
            whole, Storing.of(layout_of(whole), whole.dtype, whole.dtype, ITSELF, kernel, nbytes)
        )
        if self.recorder is not None:
            self.recorder.add(tensor, None, added)
        layout = layout_of(tensor)
        return region if region.layout == layout else View(region, layout, int(tensor.storage_offset()))

    def _compress(self, tensor: Tensor, form: Form, gather: Gathering | None) -> Saved:
        try:
            storing = self.packing.storing(tensor, form)
        except ImplementationUnavailableError:
            return self._keep(tensor, f"device {tensor.device}: impl={self.packing.config.impl!r} does not serve it")
        if (layout := storing.layout).dense:
            region, added = self._region(tensor, storing, gather)
            if self.recorder is not None:
                self.recorder.add(tensor, None, added)
            stored = region if region.layout == layout else View(region, layout, 0)
            # A region of another result of gathering the same shards has the version of that.
            return stored if gather is None or region.storage() is tensor.untyped_storage() else Same(stored, tensor)
        return self._compress_with_gaps(tensor, layout, form)

    def _compress_with_gaps(self, tensor: Tensor, layout: Layout, form: Form) -> Saved:
        source = without_expanded(tensor, layout)
        offset = 0
        gathered = False
        if not layout_of(source).dense:
            base = tensor._base
            if base is not None and form not in _OF_ONE_RESULT and shared_by_siblings(base, source):
                offset = int(tensor.storage_offset() - base.storage_offset())
                source = base
            elif overlaps(layout):
                return self._keep(tensor, OVERLAPPING)
            else:
                gathered = True
                source = tensor.detach().contiguous()
        region, added = self._region(source, self.packing.storing(source, form))
        if self.recorder is not None:
            self.recorder.add(tensor, None, added)
        return Gathered(region, tensor) if gathered else View(region, layout, offset)

    def _region(self, source: Tensor, storing: Storing, gather: Gathering | None = None) -> tuple[Region, int]:
        """Return the packed region of a dense tensor, and by how many bytes the stored memory grew."""
        stream = stream_of(source)
        form = storing.form
        key = source.data_ptr(), source.numel()
        known = self._regions.get(key)
        region = None if known is None else known()
        held = 0
        if region is not None and region.still_holds(source, source.untyped_storage(), stream):
            if region.form is ITSELF or region.form.serves(form):
                region.uses += 1
                return region, 0
            held = region.nbytes
            if not form.serves(region.form):
                region, held = None, 0  # neither form serves the other's reader: keep both
        else:
            region = None
        seed = self.packing.seeds.next() if self.packing.stochastic else 0
        if region is None:
            region, held = new_region(source, storing, seed, stream, self._recent, self.packing, gather)
            self._regions[key] = ref(region)
        else:
            region.store(source, storing, seed)
            region.uses += 1
        return region, region.nbytes - held

    def _keep(self, tensor: Tensor, reason: str, reading: Reading | None = None) -> Kept:
        """Keep a tensor; a report counts codes saved by a fused function as the packed tensor."""
        if self.recorder is not None:
            packs = PACKS.get(tensor)
            if packs is None:
                unknown = None if reading is None or reading.known else reading.operator
                self.recorder.add(tensor, reason, unknown=unknown)
            else:
                self.recorder.add_codes(packs, tensor.nbytes)
        return Kept(tensor)


def _as_shards(reading: Reading, form: Form) -> bool:
    """Return whether shards of a gathered tensor may take the form; where the layout decides, theirs may not."""
    return form is reading.form and reading.use in (None, Use.MATRIX)
