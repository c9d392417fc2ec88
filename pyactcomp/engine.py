"""The saved-tensor hooks of one forward: what each saved tensor becomes."""

from __future__ import annotations

import functools
import sys
import warnings
from collections import deque
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module

from . import format as fmt
from .codec import bind
from .config import Config
from .errors import ImplementationUnavailableError
from .kernels import Kernel
from .layouts import Layout, layout_of
from .narrow import NarrowKernel, is_exact_cast
from .policy import (
    CARRIER,
    CAST,
    LOSSLESS,
    NO_GRAD,
    OTHER_LAYOUT,
    OVERLAPPING,
    PLAIN,
    RECAST,
    RECTIFIERS,
    REDONE,
    SAME_CAST,
    Policy,
    cast_parameter,
    local_tensor,
    producer,
)
from .record import Recorder
from .redo import Recipe, cast_recipe, source_of, source_of_cast
from .saved import Distributed, Gathered, Kept, Packs, Recast, Recent, Region, Saved, View, unpack, unpack_profiled
from .seeds import Seeds
from .torch_private import (
    current_raw_stream,
    never_traced,
    profiler_enabled,
    source_dtype,
    transformed,
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
_narrow_kernel = functools.lru_cache(maxsize=8)(NarrowKernel)
# Imported where something was compiled; a look at who calls costs more than most of what a hook does.
_AOT_AUTOGRAD = "torch._functorch.aot_autograd"


class Packing:
    """How the forwards of one configuration pack: kernels, seeds, and the names in their errors."""

    def __init__(self, config: Config, seeds: Seeds | None = None) -> None:
        self.config = config
        self.seeds = Seeds(config.seed) if seeds is None else seeds
        self.stochastic = config.rounding == "stochastic"
        self.lossless = config.mode == "lossless"
        self.warned_of_compile = False
        self.root: ref[Module] | None = None
        self._kernels: dict[tuple[torch.dtype, torch.device, bool], Kernel] = {}

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

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's qualified name, for an error."""
        root = self.root() if self.root is not None else None
        for name, candidate in root.named_parameters() if root is not None else ():
            if candidate is parameter:
                return f"parameter {name!r}"
        return f"a parameter of shape {tuple(parameter.shape)}"

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


class Frame:
    """The hooks of one forward pass."""

    __slots__ = (
        "_caller",
        "_casts_left",
        "_context",
        "_copies",
        "_module",
        "_recent",
        "_regions",
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
        self._regions: dict[tuple[int, int], ref[Region]] = {}
        self._recent: Recent = deque(maxlen=_RECENTLY_RESTORED)
        # Without loss most are stored as they are, and a report tells why each is.
        self._copies = not packing.lossless or recorder is not None
        self._casts_left = 0 if packing.config.keep_weight_copies else _MOST_CASTS
        hooks = (self.pack_profiled, unpack_profiled) if profiler_enabled() else (self.pack, unpack)
        self._context: Any = torch.autograd.graph.saved_tensors_hooks(*hooks)

    def open(self, caller: FrameType | None) -> None:
        """Activate the hooks, for as long as ``caller`` runs if it is given."""
        self._caller = caller
        self._context.__enter__()

    def close(self) -> None:
        """Deactivate the hooks; what they packed stays."""
        self._caller = None
        # The context knows the hooks, which are bound to this frame: no cycle is to outlive the forward.
        context, self._context = self._context, None
        context.__exit__()
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
            self.policy = Policy(self._module, self.packing.config.min_bytes)
        self.policy.exact.append(reason)

    def leave_exact(self) -> None:
        """Leave such a module."""
        if self.policy is not None and self.policy.exact:
            self.policy.exact.pop()

    @never_traced
    def pack_profiled(self, tensor: Tensor) -> Saved:
        """Pack as a range of its own in a profile."""
        with torch.profiler.record_function("pyactcomp::pack"):
            return self.pack(tensor)

    @never_traced
    def pack(self, tensor: Tensor) -> Saved:
        """Turn a tensor that autograd saves into what is held instead: the hook that autograd calls."""
        if transformed():
            return Kept(tensor)
        if type(tensor) in PLAIN:
            if self.recorder is None and self._surely_kept(tensor):
                return Kept(tensor)
            return self._pack_plain(tensor, tensor)
        local = local_tensor(tensor)
        if local is not tensor and type(local) in PLAIN:
            return Distributed(self._pack_plain(local, tensor), tensor)
        return self._keep(tensor, f"tensor subclass {type(tensor).__name__}")

    def _surely_kept(self, tensor: Tensor) -> bool:
        """Return whether a tensor is kept whatever it is, where nobody asks for the reason."""
        dtype = tensor.dtype
        if not dtype.is_floating_point and dtype is not torch.bool:
            return True
        return tensor.layout is torch.strided and tensor.nbytes < self.packing.config.min_bytes

    def _pack_plain(self, tensor: Tensor, saved: Tensor) -> Saved:
        """Pack a plain tensor; ``saved`` is what autograd knows of it, the DTensor around it or itself."""
        if self.policy is None:
            self.policy = Policy(self._module, self.packing.config.min_bytes)
        reason = self.policy.reason_to_keep(tensor, saved, self._copies or tensor.dtype is torch.bool)
        if reason is not None:
            if reason is NO_GRAD and _AOT_AUTOGRAD in sys.modules and not self.packing.warned_of_compile:
                self.packing.warn_of_compiled_graph()
            return self._keep(tensor, reason)
        name, node = producer(saved)
        if name == CAST and node is not None and self._casts_left:
            self._casts_left -= 1
            parameter = cast_parameter(node)
            if parameter is not None:
                if not _is_fresh_cast(tensor, parameter, node):
                    return self._keep(tensor, OTHER_LAYOUT)
                if self.recorder is not None:
                    self.recorder.add(tensor, RECAST)
                return Recast(tensor, parameter, self.packing)
        if node is not None and saved is tensor:
            if name == CAST:
                return self._pack_cast(tensor, node)
            source = source_of(tensor, node)
            if source is not None:
                return self._redone(tensor, *source)
        return self._store(tensor, name, node)

    def _pack_cast(self, copy: Tensor, node: Node) -> Saved:
        """Pack what a cast made, once for all casts of one tensor to one dtype, as autocast makes for q, k and v."""
        whole = copy if copy._base is None else copy._base
        known = cast_recipe(whole, node)
        source = source_of_cast(whole, node, known)
        if source is not None:
            return self._redone(copy, *source)
        if known is None:
            return self._store(copy, CAST, node)
        copies = known[0].copies
        part = copy.dtype, copy.storage_offset(), layout_of(copy)
        reference = copies.get(part)
        stored = None if reference is None else reference()
        if stored is not None:
            if isinstance(stored, Region):
                stored.uses += 1
            if self.recorder is not None:
                self.recorder.add(copy, SAME_CAST)
            return stored
        new = self._store(copy, CAST, node)
        if isinstance(new, (Kept, Region)):
            first: Kept | Region = new
            copies[part] = ref(first)
        return new

    def _store(self, tensor: Tensor, name: str, node: Node | None) -> Saved:
        """Store a tensor that cannot be had for less."""
        if self.packing.lossless and tensor.dtype is not torch.bool:
            return self._narrow(tensor, node if name == CAST else None)
        try:
            # Only the sign of what ReLU produced decides about its gradient.
            positive = name in RECTIFIERS or getattr(node, "keep_positive", False)
            kernel = self.packing.kernel(tensor.dtype, tensor.device, positive)
        except ImplementationUnavailableError:
            unserved = f"device {tensor.device}: impl={self.packing.config.impl!r} does not serve it"
            return self._keep(tensor, unserved)
        return self._compress(tensor, kernel)

    def _redone(self, tensor: Tensor, recipe: Recipe, out: Tensor, dtype: torch.dtype) -> Saved:
        """Return what computes a tensor again: an output in a dtype, or a view of it."""
        shared = recipe.redone(out, dtype, self._stream_of(tensor), self._recent)
        if self.recorder is not None:
            self.recorder.add(tensor, REDONE)
        layout = layout_of(tensor)
        return shared if shared.layout == layout else View(shared, layout, int(tensor.storage_offset()))

    def _narrow(self, tensor: Tensor, cast: Node | None) -> Saved:
        """Store a tensor without loss: in the dtype that it was cast from, if that is the narrower one."""
        # Nothing is cast exactly to less than four bytes.
        dtype = None if cast is None or tensor.dtype.itemsize < 4 else source_dtype(cast)
        whole = tensor if tensor._base is None else tensor._base
        if (
            dtype is None
            or not is_exact_cast(dtype, tensor.dtype)
            or whole._version != 0
            or whole.grad_fn is not cast
            or not layout_of(whole).dense
        ):
            return self._keep(tensor, LOSSLESS)
        kernel = _narrow_kernel(dtype, self.packing.config.impl in ("auto", "triton"))
        region, new = self._region(whole, kernel, whole.numel() * dtype.itemsize)
        if self.recorder is not None:
            self.recorder.add(tensor, None, region.nbytes if new else 0)
        if whole is tensor:
            return region
        return View(region, layout_of(tensor), int(tensor.storage_offset()))

    def _stream_of(self, tensor: Tensor) -> int:
        index = tensor.get_device()
        return current_raw_stream(index) if index >= 0 else 0

    def _compress(self, tensor: Tensor, kernel: Kernel) -> Saved:
        layout = layout_of(tensor)
        if layout.dense:
            region, new = self._region(tensor, kernel)
            if self.recorder is not None:
                self.recorder.add(tensor, None, region.nbytes if new else 0)
            return region if region.layout == layout else View(region, layout, 0)
        return self._compress_with_gaps(tensor, layout, kernel)

    def _compress_with_gaps(self, tensor: Tensor, layout: Layout, kernel: Kernel) -> Saved:
        source = _without_expanded(tensor, layout)
        offset = 0
        gathered = False
        if not layout_of(source).dense:
            base = tensor._base
            if base is not None and _shared_by_siblings(base, source):
                offset = int(tensor.storage_offset() - base.storage_offset())
                source = base
            elif _overlaps(layout):
                return self._keep(tensor, OVERLAPPING)
            else:
                gathered = True
                source = tensor.detach().contiguous()
        region, new = self._region(source, kernel)
        if self.recorder is not None:
            self.recorder.add(tensor, None, region.nbytes if new else 0)
        return Gathered(region, tensor) if gathered else View(region, layout, offset)

    def _region(self, source: Tensor, kernel: Kernel, nbytes: int | None = None) -> tuple[Region, bool]:
        """Return the packed region of a dense tensor, and whether it is new or held the same values already."""
        stream = self._stream_of(source)
        numel = source.numel()
        key = source.data_ptr(), numel
        known = self._regions.get(key)
        if known is not None:
            region = known()
            if region is not None and region.still_holds(source, source.untyped_storage(), stream):
                region.uses += 1
                return region, False
        if nbytes is None:
            bits = 1 if source.dtype is torch.bool else 8
            nbytes = _packed_nbytes(numel, bits, self.packing.config.group_size)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=source.device)
        seed = self.packing.seeds.next() if self.packing.stochastic else 0
        region = Region(source, kernel, CARRIER[source.dtype], buffer, seed, stream, self._recent)
        self._regions[key] = ref(region)
        return region, True

    def _keep(self, tensor: Tensor, reason: str) -> Kept:
        if self.recorder is not None:
            self._record_kept(tensor, reason, self.recorder)
        return Kept(tensor)

    def _record_kept(self, tensor: Tensor, reason: str, recorder: Recorder) -> None:
        """Record a tensor that is kept; codes that a fused function keeps stand for the tensor that they pack."""
        packs: Packs | None = getattr(tensor, "_pyactcomp_packs", None)
        if packs is None:
            recorder.add(tensor, reason)
        else:
            recorder.add_codes(packs, tensor.nbytes)


def _is_fresh_cast(copy: Tensor, parameter: Tensor, cast: Node) -> bool:
    """Return whether ``copy`` is, or is a view of, what casting ``parameter`` again gives, and was not written to."""
    whole = copy if copy._base is None else copy._base
    return (
        whole.grad_fn is cast
        and whole._version == 0
        and whole.dtype is copy.dtype
        and whole.storage_offset() == 0
        and whole.size() == parameter.size()
        # A cast keeps the strides of a dense tensor unless it is told to lay it out otherwise.
        and whole.stride() == parameter.stride()
        and parameter.device == copy.device
        and type(parameter) in PLAIN
        and layout_of(parameter).dense
    )


def _shared_by_siblings(base: Tensor, view: Tensor) -> bool:
    """Return whether to pack the base of a view with gaps: q, k and v of one projection then share it."""
    return (
        type(base) in PLAIN
        and base.dtype is view.dtype
        and base.untyped_storage() is view.untyped_storage()
        and base.numel() <= _LARGEST_BASE * view.numel()
        and layout_of(base).dense
    )


def _without_expanded(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the tensor with each dimension that repeats one element (stride 0) narrowed to it."""
    for dim, step in enumerate(layout.stride):
        if step == 0 and layout.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _overlaps(layout: Layout) -> bool:
    """Return whether elements may share memory, by the test that sorted strides skip all smaller dimensions."""
    extent = 1
    for step, length in sorted((s, n) for s, n in zip(layout.stride, layout.shape, strict=True) if n != 1):
        if step < extent:
            return True
        extent = step * (length - 1) + extent
    return False
