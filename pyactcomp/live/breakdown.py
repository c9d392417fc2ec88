"""``memory()``: what the memory of a device is used for, right now."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..engine.saved import stored_forms
from ..torch_private import StoredForm
from .device import Blocks, Cuda, find_device
from .held import alive, kept_in, memory_of, nodes_from, of_modules, of_optimizers, saved_in


@dataclass(frozen=True)
class Memory:
    """What the memory of one device is used for, in bytes.

    ``allocated`` is ``weights + gradients + optimizer + packed + kept + temporary``, ``reserved`` is ``allocated +
    cached``, and ``used`` is ``context + reserved + others``, each to the byte.

    Attributes
    ----------
    device : str
        As in ``"cuda:0"``, or ``"cpu"``, of which the figures from ``temporary`` on are None.
    weights, gradients, optimizer : int
        Parameters and buffers; the gradients of parameters; the states of optimizers.
    packed, kept : int
        Activations: memory held for backward as codes, bits or 16 bits by this package, and as it is.
    host : int
        Activations of a CUDA device that hooks, such as ``save_on_cpu``, moved to the host: not in ``allocated``.
    temporary : int or None
        All other tensors: inputs, outputs, workspaces, and memory that libraries hold.
    allocated, cached, reserved : int or None
        torch's ``memory_allocated``; memory that the allocator holds and nobody uses; the sum.
    context : int or None
        The CUDA context and the driver's own; all other processes too where ``others`` is None.
    others : int or None
        Other processes on this device, by NVML; None without ``nvidia-ml-py``, and in a container that hides them.
    used, total : int or None
        Memory in use on the whole device, and its size.
    """

    device: str
    weights: int
    gradients: int
    optimizer: int
    packed: int
    kept: int
    host: int = 0
    temporary: int | None = None
    allocated: int | None = None
    cached: int | None = None
    reserved: int | None = None
    context: int | None = None
    others: int | None = None
    used: int | None = None
    total: int | None = None

    @property
    def activations(self) -> int:
        """Bytes on the device held for backward: ``packed + kept``."""
        return self.packed + self.kept

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    def json(self) -> str:
        """Return the attributes as a line of JSON."""
        return json.dumps(self.as_dict())

    def rows(self) -> list[tuple[int, str, int]]:
        """Return the lines of the table: depth, name and bytes, without figures that nobody tells."""
        lines = [
            (0, "context" if self.others is not None else "context and other processes", self.context),
            (0, "allocated", self.allocated),
            (1, "weights", self.weights),
            (1, "gradients", self.gradients),
            (1, "optimizer state", self.optimizer),
            (1, "activations, packed", self.packed),
            (1, "activations, kept", self.kept),
            (1, "temporary and other", self.temporary),
            (0, "cached, free", self.cached),
            (0, "other processes", self.others),
            (0, f"used of {_gib(self.total)} GiB" if self.total is not None else "used", self.used),
            (0, "on the host: activations", self.host or None),
        ]
        return [(depth, name, size) for depth, name, size in lines if size is not None]

    def __str__(self) -> str:
        rows = [(f"{'  ' * depth}{name}", f"{size / 2**20:,.2f}") for depth, name, size in self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        head = f"{self.device.ljust(widths[0])}  {'MiB'.rjust(widths[1])}"
        return "\n".join([head, *(f"{name.ljust(widths[0])}  {size.rjust(widths[1])}" for name, size in rows)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left;padding-left:{1 + depth}em'>{html.escape(name)}</td>"
            f"<td>{size / 2**20:,.2f}</td></tr>"
            for depth, name, size in self.rows()
        )
        return f"<table><tr><th style='text-align:left'>{html.escape(self.device)}</th><th>MiB</th></tr>{rows}</table>"


def memory(
    model: Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | int | str | None = None,
) -> Memory:
    """Return what the memory of a device is used for, right now.

    Call between forward and backward to see activations. A storage counts once, for the first use of the list: weights,
    gradients, optimizer state, packed, kept, temporary. On CUDA a storage counts with the whole block that the
    allocator gave for it.

    Parameters
    ----------
    model : Module, optional
        Whose weights and gradients to count; by default those of all modules alive in this process.
    optimizer : Optimizer, optional
        By default all optimizers alive.
    device : torch.device, int or str, optional
        By default the model's device; without a model the current CUDA device if CUDA is in use, else the CPU.

    Returns
    -------
    Memory
        Plain data; printed as a table, and shown as one in a notebook.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type, or names no device of this machine.

    Notes
    -----
    The call looks at each object that Python's garbage collector knows, at each node of live autograd graphs and, on
    CUDA, at a snapshot of the allocator: some 10 to 500 ms. Nothing is synchronised, and no stored tensor is restored.
    What functions in C++ save, and objects after ``gc.freeze()``, count as temporary.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Linear(1024, 1024, bias=False)
    >>> loss = model(torch.ones(256, 1024)).sum()
    >>> m = pyactcomp.memory(model)
    >>> m.weights, m.gradients, m.kept           # the layer saves its input, and the program holds a loss of 4 bytes
    (4194304, 0, 1048580)
    """
    check_arguments("memory()", model, optimizer)
    return measure(model, optimizer, find_device(device, model))


def check_arguments(call: str, model: object, optimizer: object) -> None:
    """Raise TypeError unless a call got a module and an optimizer, or None."""
    for given, kind in ((model, Module), (optimizer, torch.optim.Optimizer)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{call} expects a {kind.__module__}.{kind.__name__}, got {type(given).__name__}")


def measure(model: Module | None, optimizer: torch.optim.Optimizer | None, device: Cuda | None) -> Memory:
    """Return the memory of a device, None for the CPU; see :func:`memory`."""
    found = alive(Tensor, StoredForm, Module, torch.optim.Optimizer)
    modules = model.modules() if model is not None else (each for each in found if isinstance(each, Module))
    every = [each for each in found if isinstance(each, torch.optim.Optimizer)]
    optimizers = every if optimizer is None else [optimizer]
    forms = [*stored_forms(), *(each for each in found if isinstance(each, StoredForm))]
    results = [each for each in found if isinstance(each, Tensor) and not each.is_leaf]
    weights, gradients = of_modules(modules)
    codes, saved = saved_in(nodes_from(results))
    codes += [buffer for form in forms if (buffer := getattr(form, "buffer", None)) is not None]
    kept = [*saved, *results, *(tensor for form in forms for tensor in kept_in(form))]

    blocks = Blocks([], []) if device is None else device.blocks()
    claim = _Claim(device, blocks)
    parts = [claim.bytes_of(each) for each in (weights, gradients, of_optimizers(optimizers), codes, kept)]
    of_tensors = Memory("cpu" if device is None else device.name, *parts)
    if device is None:
        return of_tensors
    reserved = device.counters().reserved
    used, total = device.used_and_total()
    others = device.other_processes()
    return replace(
        of_tensors,
        host=_Claim(None, Blocks([], [])).bytes_of([*codes, *kept]),
        temporary=blocks.allocated - sum(parts),
        allocated=blocks.allocated,
        cached=reserved - blocks.allocated,
        reserved=reserved,
        context=used - reserved - (others or 0),
        others=others,
        used=used,
        total=total,
    )


class _Claim:
    """Counts memory on one device, each block once, for who asks first."""

    def __init__(self, device: Cuda | None, blocks: Blocks) -> None:
        self._holds = _on_the_cpu if device is None else device.holds
        self._blocks = blocks
        self._claimed: set[int] = set()

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the blocks of tensors that nobody claimed before."""
        total = 0
        for tensor in tensors:
            for device, address, nbytes in memory_of(tensor):
                if self._holds(device):
                    start, size = self._blocks.block_of(address, nbytes)
                    total += 0 if start in self._claimed else size
                    self._claimed.add(start)
        return total


def _on_the_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
