"""Saved-tensor hooks around a forward: what each saved tensor becomes, and when the hooks are active."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections import deque
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from . import format as fmt
from .codec import bind, is_dense
from .config import Config
from .errors import HookConflictError, ImplementationUnavailableError
from .kernels import Kernel
from .policy import (
    CARRIER,
    CAST,
    NO_GRAD,
    OTHER_LAYOUT,
    OVERLAPPING,
    RECAST,
    RELU,
    Policy,
    cast_parameter,
    local_tensor,
    producer,
)
from .record import Recorder
from .saved import Distributed, Gathered, Kept, Recast, Region, Saved, View, unpack, unpack_profiled
from .torch_private import (
    current_raw_stream,
    inside_functorch,
    profiler_enabled,
    saved_tensor_hooks_enabled,
    top_saved_tensor_hooks,
)

# A forward that saves more casts than this is a loop; looking for weight copies in it is not worth its time.
_MOST_CASTS = 10_000
# Restored tensors that several operators share and that are kept until the last has run.
_RECENTLY_RESTORED = 2
# A view with gaps is packed with its whole base, unless the base is more than this many times larger: then it is
# cheaper to gather the view's elements.
_LARGEST_BASE = 4
# Sizes repeat from step to step. Not in format.py: graphs call that one with symbols, which have no hash.
_packed_nbytes = functools.lru_cache(maxsize=4096)(fmt.packed_nbytes)
_PLAIN = (Tensor, Parameter)


class Frame:
    """The hooks of one forward pass."""

    __slots__ = (
        "_caller",
        "_casts_left",
        "_context",
        "_module",
        "_recent",
        "_regions",
        "policy",
        "recorder",
        "session",
    )

    def __init__(self, session: Session, module: Module | None, recorder: Recorder | None) -> None:
        self.session = session
        self.recorder = recorder
        self.policy: Policy | None = None
        self._caller: FrameType | None = None
        self._module = module
        self._regions: dict[tuple[int, int], ref[Region]] = {}
        self._recent: deque[ref[Region]] = deque(maxlen=_RECENTLY_RESTORED)
        self._casts_left = 0 if session.config.keep_weight_copies else _MOST_CASTS
        hooks = (self.pack_profiled, unpack_profiled) if profiler_enabled() else (self.pack, unpack)
        self._context: Any = torch.autograd.graph.saved_tensors_hooks(*hooks)

    def open(self, caller: FrameType | None) -> None:
        """Activate the hooks, for as long as ``caller`` runs if it is given."""
        self._caller = caller
        self._context.__enter__()

    def close(self) -> None:
        """Deactivate the hooks; what they packed stays."""
        self._caller = None
        self._context.__exit__()
        if self.recorder is not None:
            self.recorder.close()

    def abandoned(self) -> bool:
        """Return whether the forward was left without its last hooks, as KeyboardInterrupt leaves it."""
        if self._caller is None:
            return False
        try:
            self._caller.clear()
        except RuntimeError:  # it is running
            return False
        return True

    def enter_exact(self, reason: str) -> None:
        """Enter a module in which nothing is compressed."""
        if self.policy is None:
            self.policy = Policy(self._module, self.session.config.min_bytes)
        self.policy.exact.append(reason)

    def leave_exact(self) -> None:
        """Leave such a module."""
        if self.policy is not None and self.policy.exact:
            self.policy.exact.pop()

    def pack_profiled(self, tensor: Tensor) -> Saved:
        """Pack as a range of its own in a profile."""
        with torch.profiler.record_function("pyactcomp::pack"):
            return self.pack(tensor)

    def pack(self, tensor: Tensor) -> Saved:
        """Turn a tensor that autograd saves into what is held instead: the hook that autograd calls."""
        if type(tensor) in _PLAIN:
            return self._pack_plain(tensor, tensor)
        local = local_tensor(tensor)
        if local is not tensor and type(local) in _PLAIN:
            return Distributed(self._pack_plain(local, tensor), tensor)
        return self._keep(tensor, f"tensor subclass {type(tensor).__name__}")

    def _pack_plain(self, tensor: Tensor, saved: Tensor) -> Saved:
        """Pack a plain tensor; ``saved`` is what autograd knows of it, the DTensor around it or itself."""
        if self.policy is None:
            self.policy = Policy(self._module, self.session.config.min_bytes)
        reason = self.policy.reason_to_keep(tensor, saved)
        if reason is not None:
            if reason is NO_GRAD and not self.session.warned_of_compile:
                self.session.warn_of_compiled_graph()
            return self._keep(tensor, reason)
        name, node = producer(saved)
        if name == CAST and node is not None and self._casts_left:
            self._casts_left -= 1
            parameter = cast_parameter(node)
            if parameter is not None:
                if not _same_memory_layout(tensor, parameter):
                    return self._keep(tensor, OTHER_LAYOUT)
                if self.recorder is not None:
                    self.recorder.add(tensor, RECAST, None)
                return Recast(tensor, parameter, self.session.name_of)
        try:
            kernel = self.session.kernel(tensor.dtype, tensor.device, name == RELU)
        except ImplementationUnavailableError:
            unserved = f"device {tensor.device}: impl={self.session.config.impl!r} does not serve it"
            return self._keep(tensor, unserved)
        return self._compress(tensor, kernel)

    def _compress(self, tensor: Tensor, kernel: Kernel) -> Saved:
        if tensor.is_contiguous() or is_dense(tensor.size(), tensor.stride()):
            region, new = self._region(tensor, kernel)
            if self.recorder is not None:
                self.recorder.add(tensor, None, region if new else None)
            if new or (region.shape == tensor.size() and region.stride == tensor.stride()):
                return region
            return View(region, tensor.size(), tensor.stride(), 0)
        return self._compress_with_gaps(tensor, kernel)

    def _compress_with_gaps(self, tensor: Tensor, kernel: Kernel) -> Saved:
        shape, stride = tensor.size(), tensor.stride()
        source = _without_expanded(tensor, shape, stride)
        offset = 0
        gathered = False
        if not is_dense(source.size(), source.stride()):
            base = tensor._base
            if base is not None and _shared_by_siblings(base, source):
                offset = int(tensor.storage_offset() - base.storage_offset())
                source = base
            elif _overlaps(shape, stride):
                return self._keep(tensor, OVERLAPPING)
            else:
                gathered = True
                source = tensor.detach().contiguous()
        region, new = self._region(source, kernel)
        if self.recorder is not None:
            self.recorder.add(tensor, None, region if new else None)
        return Gathered(region, tensor) if gathered else View(region, shape, stride, offset)

    def _region(self, source: Tensor, kernel: Kernel) -> tuple[Region, bool]:
        """Return the packed region of a dense tensor, and whether it is new or held the same values already."""
        index = source.get_device()
        stream = current_raw_stream(index) if index >= 0 else 0
        numel = source.numel()
        key = source.data_ptr(), numel
        known = self._regions.get(key)
        if known is not None:
            region = known()
            if region is not None and region.still_holds(source, source.untyped_storage(), stream):
                region.uses += 1
                return region, False
        bits = 1 if source.dtype is torch.bool else 8
        nbytes = _packed_nbytes(numel, bits, self.session.config.group_size)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=source.device)
        seed = self.session.next_seed() if self.session.stochastic else 0
        region = Region(source, kernel, CARRIER[source.dtype], buffer, seed, stream, self._recent)
        self._regions[key] = ref(region)
        return region, True

    def _keep(self, tensor: Tensor, reason: str) -> Kept:
        if self.recorder is not None:
            self.recorder.add(tensor, reason, None)
        return Kept(tensor)


def _same_memory_layout(copy: Tensor, parameter: Tensor) -> bool:
    """Return whether casting ``parameter`` again gives a storage laid out as that of ``copy``."""
    return (
        copy.untyped_storage().nbytes() == parameter.numel() * copy.itemsize
        and parameter.device == copy.device
        and type(parameter) in _PLAIN
        and is_dense(parameter.size(), parameter.stride())
    )


def _shared_by_siblings(base: Tensor, view: Tensor) -> bool:
    """Return whether to pack the base of a view with gaps: q, k and v of one projection then share it."""
    return (
        type(base) in _PLAIN
        and base.dtype is view.dtype
        and base.untyped_storage() is view.untyped_storage()
        and base.numel() <= _LARGEST_BASE * view.numel()
        and is_dense(base.size(), base.stride())
    )


def _without_expanded(tensor: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Return the tensor with each dimension that repeats one element (stride 0) narrowed to it."""
    for dim, step in enumerate(stride):
        if step == 0 and shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _overlaps(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether elements may share memory, by the test that sorted strides skip all smaller dimensions."""
    extent = 1
    for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step < extent:
            return True
        extent = step * (length - 1) + extent
    return False


def _close_abandoned() -> None:
    """Deactivate hooks of this thread whose forward is over."""
    while (top := top_saved_tensor_hooks()) is not None:
        frame = getattr(top[0], "__self__", None)
        if not isinstance(frame, Frame) or not frame.abandoned():
            return
        frame.session.drop(frame)


class Session:
    """One configuration in use: opens a :class:`Frame` for each forward and keeps what outlives it.

    Copying or pickling a session gives a fresh one with the same configuration.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stochastic = config.rounding == "stochastic"
        self.recorder: Recorder | None = None
        self.paused = False
        self.warned_of_compile = False
        self._frames = threading.local()
        self._kernels: dict[tuple[torch.dtype, torch.device, bool], Kernel] = {}
        self._packed = 0
        self._root: ref[Module] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Session, (self.config,)

    def kernel(self, dtype: torch.dtype, device: torch.device, keep_positive: bool) -> Kernel:
        """Return the kernel that packs ``dtype`` on ``device``."""
        key = dtype, device, keep_positive
        kernel = self._kernels.get(key)
        if kernel is None:
            config = self.config
            bits = 1 if dtype is torch.bool else 8
            kernel = bind(config.impl, CARRIER[dtype], bits, config.group_size, self.stochastic, keep_positive, device)
            self._kernels[key] = kernel
        return kernel

    def next_seed(self) -> int:
        """Return a seed of its own for each packed tensor."""
        self._packed += 1
        return (self.config.seed + self._packed * 0x9E3779B97F4A7C15) % 2**64

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's qualified name, for an error."""
        root = self._root() if self._root is not None else None
        for name, candidate in root.named_parameters() if root is not None else ():
            if candidate is parameter:
                return f"parameter {name!r}"
        return f"a parameter of shape {tuple(parameter.shape)}"

    def _stack(self) -> list[Frame | None]:
        stack: list[Frame | None] | None = getattr(self._frames, "stack", None)
        if stack is None:
            stack = self._frames.stack = []
        return stack

    def frame(self) -> Frame | None:
        """Return the frame of the innermost forward in progress in this thread."""
        stack = self._stack()
        return stack[-1] if stack else None

    def open(self, module: Module | None, *, active: bool = True, caller: FrameType | None = None) -> None:
        """Activate the hooks for a forward of ``module``, or step aside where they must not be.

        Torch runs a module's last hooks after an exception, but not after KeyboardInterrupt and its like. ``caller``,
        the running frame that would call :meth:`close`, lets the next forward notice what was left open.

        Every call is to be followed by one of :meth:`close`, also where this raises or is not active.

        Raises
        ------
        HookConflictError
            If other hooks are active and the configuration says so.
        """
        _close_abandoned()
        stack = self._stack()
        stack.append(None)
        if not active or self.paused or os.environ.get("PYACTCOMP_DISABLE") == "1":
            return
        if not saved_tensor_hooks_enabled() or inside_functorch() or self._conflicts():
            return
        if module is not None:
            self._root = ref(module)
        frame = Frame(self, module, self._new_recorder(module))
        frame.open(caller)
        stack[-1] = frame

    def close(self) -> None:
        """Undo the last :meth:`open` of this thread."""
        stack = self._stack()
        frame = stack.pop() if stack else None
        if frame is not None:
            frame.close()
            if frame.recorder is not None and frame.recorder.saved:
                self.recorder = frame.recorder

    def drop(self, frame: Frame) -> None:
        """Close a frame of this thread that was abandoned, and forget those opened inside it."""
        stack = self._stack()
        if frame in stack:
            del stack[stack.index(frame) :]
        frame.close()

    def _new_recorder(self, module: Module | None) -> Recorder | None:
        if self.recorder is not None or not torch.is_grad_enabled():
            return None
        return Recorder(module)

    def _conflicts(self) -> bool:
        top = top_saved_tensor_hooks()
        if top is None or isinstance(getattr(top[0], "__self__", None), Frame):
            return False
        if self.config.on_conflict == "skip":
            return True
        name = f"{top[0].__module__}.{getattr(top[0], '__qualname__', type(top[0]).__name__)}"
        if top[0].__module__ == "torch.utils.checkpoint":
            advice = (
                "compressing inside a checkpointed function would silently disable the checkpointing; open pyactcomp "
                "outside of it (compress the whole model)"
            )
        else:
            advice = "only the innermost pair runs, so one of the two would silently do nothing; use one of them"
        raise HookConflictError(
            f"other saved-tensor hooks are active here ({name}): {advice}, or pass on_conflict='skip' to step aside"
        )

    def warn_of_compiled_graph(self) -> None:
        """Warn, once, if the tensor being packed is saved by a compiled graph."""
        frame = sys._getframe()
        for _ in range(4):
            caller = frame.f_back
            if caller is None:
                return
            frame = caller
            if "_functorch" in frame.f_code.co_filename:
                self.warned_of_compile = True
                warnings.warn(
                    "a graph compiled by torch.compile runs under pyactcomp's hooks: results are right, but what it "
                    "saves is kept as it is, since it does not tell activations from masks. Leave the modules that "
                    "hold most activations eager, or let torch.compile decide what to save.",
                    stacklevel=3,
                )
                return
