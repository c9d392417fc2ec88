"""Stored forms: the objects that autograd holds in place of saved tensors. Each can be restored any number of times.

Longer than 400 lines: the forms share versions, readers and memory, and hold each other.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from abc import abstractmethod
from collections import deque
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from ..codec.kernels import Kernel
from ..codec.layouts import Layout, layout_of
from ..errors import PyactcompError
from ..readers.forms import AS_SHAPE, CODES, EXACT, ITSELF, RELATIVE, Form
from ..readers.observer import Version, observer
from ..torch_private import StoredForm, current_raw_stream, running_node


class Saved(Protocol):
    """A stored form of a saved tensor."""

    def restore(self) -> Tensor:
        """Return a tensor with the values, shape, strides, dtype and device of the original."""


def _modified(what: str, version: int, expected: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}, is at version {version}; expected version {expected} instead."
    )


class ModifiedError(RuntimeError):
    """Autograd's own error for a tensor written to after the forward."""


def check_version(tensor: Tensor, version: int) -> None:
    """Raise autograd's own error if the tensor's version is no longer ``version``."""
    if tensor._version != version:
        raise ModifiedError(_modified(f"[{tensor.type()} {list(tensor.shape)}]", tensor._version, version))


def check_unchanged(version: Version, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> None:
    """Raise autograd's own error if the tensor of a version counter was written to; the rest describes the tensor."""
    if version.moved:
        kind = torch.empty(0, dtype=dtype, device=device).type()
        raise ModifiedError(_modified(f"[{kind} {list(shape)}]", version.current, version.saved))


class Versioned(StoredForm):
    """Base of stored forms with only the version counter of the saved tensor, so the tensor can be freed."""

    __slots__ = ("_device", "_dtype", "_seen")

    def __init__(self, tensor: Tensor) -> None:
        self._seen = observer().version(tensor)
        self._dtype = tensor.dtype
        self._device = tensor.device

    @property
    def moved(self) -> bool:
        """Whether the tensor was written to since."""
        return self._seen.moved

    def check(self, shape: torch.Size) -> None:
        """Raise autograd's own error if the tensor, of shape ``shape``, was written to since."""
        check_unchanged(self._seen, self._dtype, self._device, shape)


def check_reader(form: Form, shape: torch.Size) -> None:
    """Raise PyactcompError if the table of readers says that the running node needs more than ``form``.

    Only if backward itself unpacks: code in a node may look at another node's saved tensors. Warn, once, if backward
    records a graph: its result is then no gradient for an optimizer, but a value that the loss reads.
    """
    node = observer().contradiction(form.need)
    if node is not None:
        _refuse(node, form, shape)
    if torch.is_grad_enabled() and form.need in (CODES, RELATIVE) and running_node() is not None:
        warn_of_differentiated_gradients()


@functools.cache
def warn_of_differentiated_gradients() -> None:
    """Warn that a gradient used as a value is off; once a process, or again after ``cache_clear()``."""
    warnings.warn(
        "a backward with create_graph=True reads tensors in codes or 16 bits: its gradients are off by up to 1 %. A "
        "loss that reads them as values (forces, gradient penalties, inner steps of meta-learning) is off too, and its "
        "gradients are off by more, the more the smaller the loss is. Compress such a model with mode='lossless', or "
        "skip the modules.",
        stacklevel=3,
    )


def _refuse(node: str, form: Form, shape: torch.Size) -> None:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _UNPACKING:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_globals.get("__name__") in _BACKWARD:
        raise PyactcompError(
            f"{node} needs a saved tensor of shape {tuple(shape)} more exactly than in the form it was stored in, "
            f"{form.name}. Please report this; until then pass skip=[...] with the module that runs the operator, or "
            "mode='lossless'."
        )


_UNPACKING = frozenset({__name__, f"{__package__}.unpacking"})
_BACKWARD = frozenset({"torch.autograd.graph", "torch.autograd"})


class Kept(StoredForm):
    """A tensor held unpacked, with the version check that autograd omits under hooks.

    A leaf is held by itself, as in torch: ZeRO-3 gathers a parameter for a forward, frees the memory by assigning to
    ``.data``, and gathers the parameter again for backward. The memory of any other tensor is held without the graph:
    an operator that saves its own output would otherwise hold itself, out of gc's reach.
    """

    __slots__ = ("__weakref__", "_memory", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.version = tensor._version
        if tensor.is_leaf:
            self.tensor = tensor
            self._memory = _reference(tensor)
        else:
            self.tensor = observer().bare(tensor)
            self._memory = None

    @property
    def layout(self) -> Layout:
        """Layout of the tensor."""
        return layout_of(self.tensor)

    @property
    def unchanged(self) -> bool:
        """Whether the tensor was not written to since."""
        return self.tensor._version == self.version

    @property
    def is_leaf(self) -> bool:
        """Whether the tensor is a leaf with memory, whose ``.data`` may change."""
        return self._memory is not None

    @property
    def has_its_memory(self) -> bool:
        """Whether a leaf's ``.data`` still is what was saved."""
        return self._memory is not None and self._memory() is self.tensor.untyped_storage()

    def restore(self) -> Tensor:
        """Return the tensor, or raise autograd's error if it was written to."""
        check_version(self.tensor, self.version)
        return self.tensor


def _reference(tensor: Tensor) -> ref[torch.UntypedStorage] | None:
    """Return a weak reference to a tensor's storage; None for a tensor without one, as a sparse one or a wrapper."""
    try:
        return ref(tensor.untyped_storage())
    except RuntimeError:
        return None


class LeafMemory(Kept):
    """The memory of a leaf, or a copy, for a recipe: read whatever the leaf's ``.data`` becomes; held by no node."""

    __slots__ = ()


class Names(Protocol):
    """Names parameters in errors."""

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's name."""


class Recast(Versioned):
    """Autocast's copy of a parameter, cast again from the live parameter."""

    __slots__ = ("_layout", "_names", "_of_parameter", "_offset", "_parameter")

    def __init__(self, copy: Tensor, parameter: Tensor, names: Names) -> None:
        super().__init__(copy)
        self._parameter = parameter
        self._of_parameter = parameter._version
        self._layout = layout_of(copy)
        self._offset = copy.storage_offset()
        self._names = names

    def restore(self) -> Tensor:
        """Cast the live parameter again, or raise an error if the parameter or the copy was written to."""
        self.check(self._layout.shape)
        version = self._parameter._version
        if version != self._of_parameter:
            name = self._names.name_of(self._parameter)
            raise PyactcompError(
                _modified(name, version, self._of_parameter)
                + f" Autocast's {self._dtype} copy of the parameter was not kept, and the parameter has changed "
                "between forward and backward: run backward before the optimizer's step, or keep the copies with "
                "keep_weight_copies=True."
            )
        copy = self._parameter.detach().to(self._dtype)
        return copy.as_strided(self._layout.shape, self._layout.stride, self._offset)


def stream_of(tensor: Tensor) -> int:
    """Return the current stream of a tensor's device as an integer; 0 on other devices than CUDA's."""
    index = tensor.get_device()
    return current_raw_stream(index) if index >= 0 else 0


class Shared(StoredForm):
    """A stored form that several operators may share, decoded or recomputed in backward.

    The restored tensor stays alive from the first unpacking to the last, so the backward of q, k and v restores their
    common input once. ``recent`` bounds the number of restored tensors alive at a time.
    """

    __slots__ = ("__weakref__", "_index", "_pending", "_recent", "_restored", "layout", "stream", "uses")

    def __init__(self, layout: Layout, index: int, stream: int, recent: Recent) -> None:
        self.layout = layout
        # Index of the CUDA device; -1 on other devices.
        self._index = index
        self.stream = stream
        self.uses = 1
        self._pending = 0
        self._restored: Tensor | None = None
        self._recent = recent

    @abstractmethod
    def _make(self) -> Tensor:
        """Decode or recompute the tensor on the current stream."""

    def _make_on_another_stream(self) -> Tensor:
        """Make the tensor on a stream other than the packing stream."""
        current = torch.cuda.current_stream(self._index)
        if self.stream == 0:
            packing: Any = torch.cuda.default_stream(self._index)
        else:
            packing = torch.cuda.ExternalStream(self.stream, device=self._index)  # type: ignore[no-untyped-call]
        current.wait_stream(packing)
        made = self._make()
        self._hold_for(current, packing)
        return made

    def _hold_for(self, current: torch.cuda.Stream, packing: torch.cuda.Stream) -> None:
        """Let the packing stream wait, since freed inputs return to that stream's pool and may still be read."""
        packing.wait_stream(current)

    def restore(self) -> Tensor:
        """Return the tensor in the layout of the first saved tensor."""
        if self._index >= 0 and current_raw_stream(self._index) != self.stream:
            return self._make_on_another_stream()
        return self._make() if self.uses == 1 else self._restore_shared()

    def _restore_shared(self) -> Tensor:
        if self._pending == 0:
            self._pending = self.uses
        self._pending -= 1
        restored = self._restored
        if restored is None:
            restored = self._make()
            if self._pending:
                self._restored = restored
                if len(self._recent) == self._recent.maxlen:
                    oldest = self._recent[0]()
                    if oldest is not None and oldest is not self:
                        oldest._restored = None
                self._recent.append(ref(self))
        elif self._pending == 0:
            self._restored = None
        return restored


Recent = deque[ref[Shared]]
"""The shared forms restored last; their restored tensors may still be alive."""


class Storing(NamedTuple):
    """How tensors of one layout are stored in a form.

    Attributes
    ----------
    layout : Layout
        Layout of the tensor.
    dtype, carrier : torch.dtype
        Dtype of the tensor, and the dtype in which the kernel reads and writes.
    form : Form
    kernel : Kernel
    nbytes : int
        Size of the buffer in bytes.
    like : Tensor
        Meta tensor with the layout and the carrier dtype.
    """

    layout: Layout
    dtype: torch.dtype
    carrier: torch.dtype
    form: Form
    kernel: Kernel
    nbytes: int
    like: Tensor

    @classmethod
    def of(
        cls, layout: Layout, dtype: torch.dtype, carrier: torch.dtype, form: Form, kernel: Kernel, nbytes: int
    ) -> Storing:
        """Return the storing for a layout."""
        like = torch.empty_strided(layout.shape, layout.stride, dtype=carrier, device="meta")
        return cls(layout, dtype, carrier, form, kernel, nbytes, like)

    def laid_out(self, layout: Layout) -> Storing:
        """Return the same storing for another layout with as many elements."""
        return Storing.of(layout, self.dtype, self.carrier, self.form, self.kernel, self.nbytes)


class Region(Shared):
    """A packed buffer: the elements of one dense tensor in storage order.

    Several saved tensors may be views of one region. If a later reader needs more, the region is stored anew for all.
    """

    __slots__ = ("_packed", "_storing", "_version", "address", "dtype", "form", "storage")

    def __init__(self, source: Tensor, storing: Storing, seed: int, stream: int, recent: Recent) -> None:
        super().__init__(storing.layout, source.get_device(), stream, recent)
        self.dtype = storing.dtype
        # A storage's Python object lives exactly as long as the storage, so a live reference proves the same memory. An
        # address would prove nothing: the original is freed once packed.
        self.storage = ref(source.untyped_storage())
        self.address = source.data_ptr()
        self._version = observer().version(source)
        self.store(source, storing, seed)

    def store(self, source: Tensor, storing: Storing, seed: int) -> None:
        """Pack ``source`` as ``storing`` says; a later call may pass another shape, and the first layout stays."""
        if storing.layout != self.layout:
            storing = storing.laid_out(self.layout)
        buffer = observer().buffer(source, storing.nbytes)
        carrier, kernel = storing.carrier, storing.kernel
        kernel.encode(source if carrier is self.dtype else source.detach().to(carrier), buffer, seed)
        self.form = storing.form
        self._storing: Storing | None = storing
        self._packed = buffer

    def hold(self, source: Tensor) -> None:
        """Hold the original instead of codes; ``source`` is the same memory in any shape."""
        self.form, self._storing = ITSELF, None
        self._packed = source.detach().as_strided(self.layout.shape, self.layout.stride)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._packed.nbytes

    @property
    def narrowed(self) -> bool:
        """Whether the buffer holds the exact elements in a narrower dtype."""
        return self.form is ITSELF and self._storing is not None

    @property
    def unchanged(self) -> bool:
        """Whether the original was not written to since."""
        return not self._version.moved

    def still_holds(self, source: Tensor, storage: torch.UntypedStorage, stream: int) -> bool:
        """Return whether the codes provably match ``source``, a tensor at the same address with as many elements."""
        version = self._version
        return (
            self.storage() is storage
            and not version.moved
            and version.saved == source._version
            and self.dtype is source.dtype
            and self.stream == stream
        )

    def restore(self) -> Tensor:
        """Return the restored tensor in the layout packed first."""
        if self._version.moved:
            check_unchanged(self._version, self.dtype, self._packed.device, self.layout.shape)
        if self.form.need != EXACT:
            check_reader(self.form, self.layout.shape)
        return super().restore()

    def _hold_for(self, current: torch.cuda.Stream, packing: torch.cuda.Stream) -> None:
        self._packed.record_stream(current)

    def _make(self) -> Tensor:
        storing = self._storing
        if storing is None:
            return self._packed
        out = observer().empty_as(storing.like, self._packed)
        storing.kernel.decode(self._packed, out)
        return out if storing.carrier is self.dtype else out.to(self.dtype)


class View(StoredForm):
    """A view of a packed region or of a recomputed output."""

    __slots__ = ("__weakref__", "_offset", "layout", "region")

    def __init__(self, region: Shared, layout: Layout, offset: int) -> None:
        self.region = region
        self.layout = layout
        self._offset = offset

    def restore(self) -> Tensor:
        """Restore the region, and return the view."""
        return self.region.restore().as_strided(self.layout.shape, self.layout.stride, self._offset)


class Same(Versioned):
    """A saved tensor with the values of another stored one, such as an equal cast, but a version counter of its own."""

    __slots__ = ("_shape", "stored")

    def __init__(self, stored: Saved, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.stored = stored
        self._shape = tensor.size()

    def restore(self) -> Tensor:
        """Restore the tensor, or raise autograd's error if it was written to."""
        self.check(self._shape)
        return self.stored.restore()


class Shapeless(Versioned):
    """A saved tensor whose values backward never reads, only the shape."""

    __slots__ = ("_layout",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._layout = layout_of(tensor)

    def restore(self) -> Tensor:
        """Return uninitialised memory in backward; elsewhere NaN, so that nobody mistakes garbage for values."""
        self.check(self._layout.shape)
        check_reader(AS_SHAPE, self._layout.shape)
        # Allocate all elements in the saved layout: CUDA's kernels copy an input with gaps or repeats.
        out = torch.empty_strided(self._layout.shape, self._layout.stride, dtype=self._dtype, device=self._device)
        return out if running_node() is not None else out.fill_(math.nan)


class Pending(StoredForm):
    """A saved tensor whose form is decided later; kept until then."""

    __slots__ = ("stored",)

    def __init__(self, stored: Saved) -> None:
        self.stored = stored

    def restore(self) -> Tensor:
        """Return the tensor."""
        return self.stored.restore()


class Gathered(Versioned):
    """A saved tensor with gaps between elements, packed from a dense copy."""

    __slots__ = ("_layout", "_offset", "_storage", "region")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.region = region
        self._layout = layout_of(tensor)
        self._offset = tensor.storage_offset()
        self._storage = ref(tensor.untyped_storage())

    @property
    def form(self) -> Form:
        """Form of the packed copy."""
        return self.region.form

    @property
    def layout(self) -> Layout:
        """Layout of the saved tensor, with the gaps."""
        return self._layout

    def restore(self) -> Tensor:
        """Return the restored elements in the original strides."""
        self.check(self._layout.shape)
        dense = self.region.restore()
        out = dense.new_empty_strided(self._layout.shape, self._layout.stride)
        return out.copy_(dense)


class Distributed(Versioned):
    """A DTensor whose local tensor is in a stored form.

    A write to the DTensor moves the DTensor's version counter alone.
    """

    __slots__ = ("_local", "_spec")

    def __init__(self, local: Saved, tensor: Any) -> None:
        super().__init__(tensor)
        self._local = local
        self._spec = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def restore(self) -> Tensor:
        """Return the DTensor around the restored local tensor, or raise autograd's error if it was written to."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self._spec
        self.check(shape)
        restored: Tensor = DTensor.from_local(
            self._local.restore(), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return restored
