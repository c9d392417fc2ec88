"""Plain data, pickled between both processes: the question, the recorded events and the estimate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .gpus import Gpu

MODES = (
    *("plain", "lossless", "int8", "int8+head", "checkpoint", "int8+checkpoint", "int8+head+checkpoint"),
    *("lossless+offload", "int8+offload", "int8+head+offload", "int8+checkpoint+offload"),
    "int8+head+checkpoint+offload",
)
ALLOCATORS = ("native", "expandable", "pyactcomp")


@dataclass(frozen=True)
class Question:
    """A model, its batch, how it trains, and on which GPU.

    Attributes
    ----------
    model : str or bytes
        As :func:`pyactcomp.estimate` takes it; bytes are a model and its batch, from :mod:`.sending`.
    batch, seq : int or None
    optimizer : str
    dtype, autocast : str or None
        Of the weights; of autocast's regions.
    gpu : Gpu
    """

    model: str | bytes
    batch: int | None
    seq: int | None
    optimizer: str
    dtype: str | None
    autocast: str | None
    gpu: Gpu


@dataclass(frozen=True)
class BlockRun:
    """Where the steady step runs a block, as numbers of events, and how long by the roofline.

    Attributes
    ----------
    name : str
        The qualified name.
    began, ended : int
        Of the forward.
    done : int
        At the last gradient of a parameter.
    seconds : tuple of float
        Of the forward, and of the backward.
    """

    name: str
    began: int
    ended: int
    done: int
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Recorded:
    """Findings of a child process for one mode: bytes by part, and the allocator's events.

    ``convolves`` says whether convolutions ran, whose workspaces are not among the events. ``blocks`` are those that
    repeat, each run once by the steady step and trained, in the order of the forward.
    """

    batch: int
    seq: int | None
    parts: dict[str, int]
    columns: tuple[bytes, bytes, bytes, bytes]
    marks: dict[str, int]
    labels: tuple[str, ...]
    gradients: tuple[int, ...]
    notes: tuple[str, ...]
    convolves: bool = False
    blocks: tuple[BlockRun, ...] = ()


@dataclass(frozen=True)
class ModeEstimate:
    """The memory of training in one mode, in bytes.

    Attributes
    ----------
    mode : str
        One of :data:`MODES`; ``head`` is ``compress(model, fuse_head=True)``, ``offload`` its ``offload=1.0``.
    batch, seq : int, int or None
    weights, gradients, optimizer, inputs : int
        Parameters and buffers; their gradients; the optimizer's state; the batch.
    activations : int
        Tensors alive from forward to backward besides these, at the end of forward.
    workspaces : int
        Memory that cuBLAS keeps.
    context : int
        Memory of CUDA outside the allocator.
    peak_allocated : int
        The peak of a steady step.
    first_step : int
        The peak of the first step, before there is state.
    peak_reserved : dict of str to int
        The most that each allocator takes from the driver in three steps: native, expandable, pyactcomp.
    fits : dict of str to bool
        Whether the context and the reserved memory fit on the GPU, by allocator.
    at_peak : tuple
        Pairs of module or phase, and the bytes alive at the steady peak; largest first.
    curve : tuple
        Pairs of allocated and reserved bytes along the steady step, under the native allocator.
    largest_batch, longest_seq : int or None
        The largest that fit under the pyactcomp allocator, if asked for.
    notes : tuple of str
        Assumptions of the estimate.
    pinned : int
        Pinned memory of the host that offload takes; 0 without.
    """

    mode: str
    batch: int
    seq: int | None
    weights: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    workspaces: int
    context: int
    peak_allocated: int
    first_step: int
    peak_reserved: dict[str, int]
    fits: dict[str, bool]
    at_peak: tuple[tuple[str, int], ...]
    curve: tuple[tuple[int, int], ...] = field(repr=False)
    largest_batch: int | None = None
    longest_seq: int | None = None
    notes: tuple[str, ...] = ()
    pinned: int = 0


@dataclass(frozen=True)
class Estimate:
    """The memory of training a model, by mode; :func:`pyactcomp.estimate` returns it.

    Attributes
    ----------
    model : str
    gpu : str
        The GPU's name.
    memory : int
        The GPU's memory, in bytes.
    modes : tuple of ModeEstimate
    notes : tuple of str
        The usual modes that are left out, each with the reason.
    """

    model: str
    gpu: str
    memory: int
    modes: tuple[ModeEstimate, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, mode: str) -> ModeEstimate:
        """Return the estimate of a mode.

        Raises
        ------
        KeyError
            If it was not asked for.
        """
        for each in self.modes:
            if each.mode == mode:
                return each
        raise KeyError(f"{mode!r} was not estimated; there are {', '.join(each.mode for each in self.modes)}")

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data, for JSON."""
        return asdict(self)
