"""Stored forms: the objects that autograd holds in place of saved tensors. Each can be restored any number of times.

Most are classes of the library (``csrc/engine``), of which this module tells what Python reads; it loads the library on
first use. The classes at the end are made where Python packs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..codec.kernels import Kernel
from ..codec.layouts import Layout
from ..readers.forms import Form
from ..readers.observer import Observer, observer
from ..torch_private import StoredForm, never_traced

PLAIN = (Tensor, Parameter)
"""Tensor types to pack directly; of other types, only a DTensor's local tensor is packed."""

Named = TypeVar("Named", bound=Callable[..., object])

NAMES: dict[str, object] = {}
"""What the library asks of Python by name: constants, and functions for what happens rarely."""


def for_library(function: Named) -> Named:
    """Let the library call a function, by its name, where something rare happens.

    What the library calls is never traced: a saved tensor is packed also where torch.compile looks at each new frame.
    """
    NAMES[function.__name__] = never_traced(function)
    return function


@functools.cache
def library() -> Observer:
    """Return the library that packs and restores."""
    native = observer()
    native.configure_engine(NAMES)
    return native


def stored_forms() -> list[StoredForm]:
    """Return the stored forms alive, apart from those of the classes below, which Python's garbage collector knows."""
    return library().stored_forms() if library.cache_info().currsize else []


_CLASSES = frozenset(
    "FromRecipe Kept Recast Recipe Region Same Shapeless Sharing Storing".split()
    + "Versioned View Decisions Hooks".split()
)


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        # The next look-up finds it without a call.
        return globals().setdefault(name, getattr(library(), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Saved(Protocol):
    """A stored form of a saved tensor."""

    def restore(self) -> Tensor:
        """Return a tensor with the values, shape, strides, dtype and device of the original."""


if TYPE_CHECKING:

    class Storing:
        """How tensors of one dtype are stored in a form; the carrier is the dtype that the kernel reads and writes."""

        dtype: torch.dtype
        carrier: torch.dtype
        form: Form
        kernel: Kernel
        nbytes: int

        def __init__(
            self, dtype: torch.dtype, carrier: torch.dtype, form: Form, kernel: Kernel, nbytes: int
        ) -> None: ...

    class Sharing:
        """What the stored forms of one forward know of each other, without holding one."""

    class Versioned(StoredForm):
        """The version counter of a saved tensor, without the tensor."""

        moved: bool

        def __init__(self, tensor: Tensor) -> None: ...

        def check(self, shape: torch.Size) -> None:
            """Raise autograd's own error if the tensor, of shape ``shape``, was written to since."""

        def restore(self) -> Tensor:
            """Return the tensor, or raise autograd's error if it was written to."""

    class Kept(StoredForm):
        """A tensor held unpacked, with the version check that autograd omits under hooks."""

        tensor: Tensor
        version: int
        layout: Layout
        unchanged: bool
        is_leaf: bool
        has_its_memory: bool

        def __init__(self, tensor: Tensor) -> None: ...
        def restore(self) -> Tensor:
            """Return the tensor, or raise autograd's error if it was written to."""

    class Shared(StoredForm):
        """A stored form that several operators may share, decoded or recomputed in backward."""

        layout: Layout
        stream: int
        uses: int
        dtype: torch.dtype

        def restore(self) -> Tensor:
            """Return the tensor, or raise autograd's error if it was written to."""

    class Region(Shared):
        """A packed buffer: the elements of one dense tensor in storage order."""

        form: Form
        nbytes: int
        narrowed: bool
        unchanged: bool
        buffer: Tensor | None

        def is_of(self, tensor: Tensor) -> bool:
            """Return whether a tensor has the memory that was packed."""

    class Recipe:
        """How backward recomputes an output.

        Attributes
        ----------
        dtype : torch.dtype
            The output's.
        operands : tuple of Tensor
            Tensors read unpacked: a write before backward raises autograd's error.
        depth : int
            Length of the longest chain of recipes, this one included: 1 if no operand is recomputed.
        computes : bool
            Whether the recipe can recompute the output: not once backward has freed a stored operand.
        casts : bool
            Whether autocast's casts of the output are recomputed too.
        exact : bool
            Whether the recipe gives the output to the bit.
        """

        dtype: torch.dtype
        operands: tuple[Tensor, ...]
        depth: int
        computes: bool
        casts: bool
        exact: bool

        def __init__(
            self,
            out: Tensor,
            compute: Callable[..., Tensor] | None,
            stored: tuple[Tensor, ...],
            operands: tuple[Tensor, ...],
        ) -> None: ...
        def compute(self, dtype: torch.dtype) -> Tensor:
            """Recompute the output in the original layout, or raise autograd's error if an operand was written to."""

        def serves(self, tensor: Tensor) -> bool:
            """Return whether ``tensor`` still equals the recomputed output: same storage, and no write since."""

        def forms(self) -> tuple[object, ...]:
            """Return the stored forms to hold as long as :meth:`compute` may be called; None for each freed one."""

    class FromRecipe(Shared):
        """A saved tensor recomputed in backward from a recipe: the recipe's output, or a cast of the output."""

        recipe: Recipe

    class View(StoredForm):
        """A view of a packed region or of a recomputed output."""

        region: Shared
        layout: Layout

        def __init__(self, region: Shared, layout: Layout, offset: int) -> None: ...
        def restore(self) -> Tensor:
            """Return the tensor, or raise autograd's error if it was written to."""

    class Same(Versioned):
        """A saved tensor with the values of another stored one, but a version counter of its own."""

        stored: Saved

        def __init__(self, stored: Saved, tensor: Tensor) -> None: ...

    class Shapeless(Versioned):
        """A saved tensor whose values backward never reads, only the shape."""

    class Recast(Versioned):
        """Autocast's copy of a parameter, cast again from the live parameter."""

    class Decisions:
        """How tensors are stored, decided once for each reading, maker, partner and layout."""

    class Hooks:
        """The hooks of one forward: pack a saved tensor."""

        frame: Any
        recorder: Any
        sharing: Sharing
        skipping: int
        waits: bool
        offloads: bool

        def __init__(
            self,
            frame: Any,
            packing: Any,
            module: Any,
            recorder: Any,
            decisions: Decisions,
            min_bytes: int,
            lossless: bool,
            stochastic: bool,
            gathers: bool,
            casts_left: int,
        ) -> None: ...
        def pack(self, tensor: Tensor) -> Saved:
            """Return the stored form of a saved tensor: the pack hook."""

        def pack_plain(self, tensor: Tensor, saved: Tensor) -> Saved:
            """Pack a plain tensor; ``saved`` is the one in the graph, the DTensor around it or itself."""

        def pack_for(self, tensor: Tensor, saved: Tensor, reading: Any, form: Form) -> Saved:
            """Pack a tensor for its reader in a form, or one at least as exact."""

        def store(self, tensor: Tensor, reading: Any, form: Form) -> Saved:
            """Store a tensor in a form, as nothing recomputes it."""

        def region(self, tensor: Tensor, storing: Storing) -> tuple[Region, int]:
            """Return the region of a dense tensor, and by how many bytes the stored memory grew."""

        def drop(self) -> None:
            """Let go of the frame: the forward has ended."""


class Pending(StoredForm):
    """A saved tensor whose form is decided later; kept until then."""

    __slots__ = ("stored",)

    def __init__(self, stored: Saved) -> None:
        self.stored = stored

    @never_traced
    def restore(self) -> Tensor:
        """Return the tensor."""
        return self.stored.restore()


NAMES["PENDING"] = Pending


class Distributed(StoredForm):
    """A DTensor whose local tensor is in a stored form.

    A write to the DTensor moves the DTensor's version counter alone.
    """

    __slots__ = ("_local", "_seen", "_spec")

    def __init__(self, local: Saved, tensor: Any) -> None:
        self._seen: Versioned = library().Versioned(tensor)
        self._local = local
        self._spec = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    @never_traced
    def restore(self) -> Tensor:
        """Return the DTensor around the restored local tensor, or raise autograd's error if it was written to."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self._spec
        self._seen.check(shape)
        restored: Tensor = DTensor.from_local(
            self._local.restore(), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return restored
