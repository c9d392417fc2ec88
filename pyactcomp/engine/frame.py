"""One forward pass: opens and closes the hooks, and packs what the library leaves to Python.

The library packs and restores, ``csrc/engine/hooks.hpp``, and calls the methods of a frame for what is rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..readers.forms import AS_CODES, BFLOAT16, CODES, ITSELF, RELATIVE, Form, Reading, Use
from ..readers.lookup import CHECKPOINT, CHECKPOINTED
from ..readers.observer import observer, transformed
from ..torch_private import never_traced, profiled_range, profiler_enabled, top_saved_tensor_hooks
from ..torch_private.distributed import local_tensor, waited
from . import reasons, saved
from .gathered import gathering, store_shard
from .marks import PACKS
from .packing import FEWEST, HALF_BYTES, Packing
from .record import Recorder
from .saved import PLAIN, Distributed, Pending, Saved
from .unpacking import unpack_profiled

# A forward with more saved casts than this is a loop, where the search for weight copies costs more than it saves.
_MOST_CASTS = 10_000


class Frame:
    """The hooks of one forward pass.

    Attributes
    ----------
    hooks : Hooks
        The library's part, which packs.
    """

    __slots__ = ("_caller", "_context", "_pending", "_pending_since", "hooks", "packing", "recorder")

    def __init__(self, packing: Packing, module: Module | None, recorder: Recorder | None) -> None:
        self.packing = packing
        self.recorder = recorder
        self._caller: FrameType | None = None
        self._pending: list[tuple[Pending, saved.Kept, Tensor, Form, str]] = []
        self._pending_since = (0, 0)
        config = packing.config
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        casts = 0 if config.keep_weight_copies else _MOST_CASTS
        self.hooks = saved.Hooks(
            self,
            packing,
            module,
            recorder,
            packing.decisions,
            config.min_bytes,
            packing.lossless,
            packing.stochastic,
            distributed,
            casts,
        )
        if packing.offloading is not None:
            packing.offloading.read_timings()
            self.hooks.offloads = not packing.offloads_blocks
        self._context: Any = torch.autograd.graph.saved_tensors_hooks(*self.pair())

    def pair(self) -> tuple[Any, Any]:
        """Return the pack and the unpack hook."""
        if profiler_enabled():
            return self.pack_profiled, unpack_profiled
        return self.hooks.pack, saved.library().unpack

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
        self.hooks.drop()
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
        self.hooks.skipping += 1

    def leave_exact(self) -> None:
        """Leave the innermost skipped module."""
        self.hooks.skipping = max(self.hooks.skipping - 1, 0)

    def enter_offloaded(self) -> None:
        """Enter a module of those whose stored bytes leave the device; no others do."""
        self._decide_pending()  # inputs of a block before it
        self.hooks.offloads = True

    def leave_offloaded(self) -> None:
        """Leave the module."""
        self._decide_pending()
        self.hooks.offloads = False

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Let nothing that is saved inside leave the device."""
        self._decide_pending()  # an input of the block before
        before, self.hooks.offloads = self.hooks.offloads, False
        try:
            yield
        finally:
            self.hooks.offloads = before

    @never_traced
    def pack_profiled(self, tensor: Tensor) -> Saved:
        """Pack, and show the packing as a range in the profile."""
        with profiled_range("pyactcomp::pack"):
            return self.hooks.pack(tensor)

    @never_traced
    def _pack_unclear(self, tensor: Tensor) -> Saved:
        """Pack a tensor of another class, or where operators may be transformed."""
        if transformed():
            return saved.Kept(tensor)
        if type(tensor) in PLAIN:
            return self.hooks.pack_plain(tensor, tensor)
        plain = waited(local := local_tensor(tensor))
        if plain is not tensor and type(plain) in PLAIN:
            stored = self.hooks.pack_plain(plain, tensor)
            return saved.Same(stored, tensor) if local is tensor else Distributed(stored, tensor)
        if self.recorder is not None:
            self.recorder.add(tensor, f"tensor subclass {type(tensor).__name__}")
        return saved.Kept(tensor)

    @never_traced
    def _report_kept(self, tensor: Tensor, name: str, reading: Reading | None) -> None:
        """Record a tensor kept for the reason of a name; codes saved by a fused function as the packed tensor."""
        assert self.recorder is not None
        packs = PACKS.get(tensor)
        if packs is not None:
            self.recorder.add_codes(packs, tensor.nbytes)
            return
        unknown = None if reading is None or reading.known else reading.operator
        self.recorder.add(tensor, self._reason(tensor, name, reading), unknown=unknown)

    def _reason(self, tensor: Tensor, name: str, reading: Reading | None) -> str:
        if reading is not None:
            return reading.reason if self.packing.lossless else self._reason_of_reading(tensor, reading)
        if name == "DTYPE":
            return f"dtype {tensor.dtype}"
        if name == "TENSOR_LAYOUT":
            return f"layout {tensor.layout}"
        if name == "DEVICE":
            return f"device {tensor.device}: impl={self.packing.config.impl!r} does not serve it"
        return str(saved.NAMES[name])

    def _reason_of_reading(self, tensor: Tensor, reading: Reading) -> str:
        if reading.use is not None or reading.need in (CODES, RELATIVE):
            if tensor.numel() < FEWEST:
                return reasons.FEW
            if tensor.itemsize <= HALF_BYTES:
                return f"{reasons.NARROW}: {reading.reason}"
        return reading.reason

    @never_traced
    def _sharded(self, tensor: Tensor, whole: Tensor, reading: Reading, form: Form) -> Saved | None:
        """Store this process's shard of a tensor gathered from those of several processes; None if it is none.

        Where the layout decides on codes, the layout of a shard may not allow them.
        """
        if form is not reading.form or reading.use not in (None, Use.MATRIX):
            return None
        found = gathering(tensor, whole)
        return None if found is None else store_shard(tensor, form, found, self.packing, self.hooks)

    @never_traced
    def _pack_for_checkpoint(self, tensor: Tensor, whole: Tensor, reading: Reading, form: Form) -> Saved:
        """Pack the input of a checkpointed block, exact if the block takes decisions from values."""
        calls, decisions, before = observer().progress()
        if reading is CHECKPOINTED:  # the block has run
            form = ITSELF if decisions != before else self._form_for_block(tensor, form, observer().take_divisor())
            return self.hooks.pack_for(tensor, whole, reading, form)
        if self._pending and self._pending_since[0] != calls:
            self._decide_pending()
        kept = saved.Kept(tensor)
        pending = Pending(kept)
        module = "" if self.recorder is None else self.recorder.module
        self._pending.append((pending, kept, tensor, form, module))
        self.hooks.waits = True
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

    @never_traced
    def _decide_pending(self) -> None:
        """Store the inputs of the last checkpointed block: by now the block's decisions are known."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        self.hooks.waits = False
        decided = observer().progress()[1] != self._pending_since[1]
        divisor = observer().take_divisor()
        for holder, kept, tensor, form, module in pending:
            if kept.unchanged:  # otherwise unpacking raises autograd's error
                if self.recorder is not None:
                    self.recorder.enter(module)
                form = ITSELF if decided else self._form_for_block(tensor, form, divisor)
                holder.stored = self.hooks.pack_for(tensor, tensor, CHECKPOINT, form)
                if self.recorder is not None:
                    self.recorder.leave()


def frame_of(hook: object) -> Frame | None:
    """Return the frame whose pack hook ``hook`` is, or None for another hook."""
    owner = getattr(hook, "__self__", None)
    frame = owner if isinstance(owner, Frame) else getattr(owner, "frame", None)
    return frame if isinstance(frame, Frame) else None


@contextmanager
def staying() -> Iterator[None]:
    """Let nothing that the active frame saves inside leave the device: backward reads it first."""
    top = top_saved_tensor_hooks()
    frame = None if top is None else frame_of(top[0])
    if frame is None:
        yield
        return
    with frame.staying():
        yield
