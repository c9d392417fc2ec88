"""Suite `overhead`: host time per saved tensor of pack and unpack, through the public context.

Each link of a chain applies SiLU, which saves one tensor, its input. It then adds a constant, which saves nothing: the
result of SiLU itself would be computed again from its input, not stored. The host
time of forward and backward, with and without compression, differs by one pack and one unpack per tensor. The tensors
are so small that the device keeps up; ``drain_us``, what is left to wait for once the host is done, is recorded as
evidence.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import pyactcomp

from . import overhead_models
from .rows import Options, Row, failure, quantile

NBYTES = 256 << 10
"""Twice the size below which tensors are kept as they are; the device is done with one in a few microseconds."""
WIDTH = 1024
LENGTH, TINY_LENGTH = 2000, 50
ROUNDS = 7
CHAIN = "silu-chain"
Context = Callable[[], AbstractContextManager[object]]
Operator = Callable[[Tensor], Tensor]
Times = tuple[float, float, float]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def chain(operator: Operator, x: Tensor, length: int, context: Context, device: str) -> Times:
    """Return the host's microseconds per operation of forward, backward, and of waiting for the device after both."""
    upstream = torch.ones_like(x)
    x.grad = None
    _synchronize(device)
    marks = [time.perf_counter()]
    with context():
        y = x
        for _ in range(length):
            y = operator(y)
    marks.append(time.perf_counter())
    _synchronize(device)
    marks.append(time.perf_counter())
    y.backward(upstream)
    marks.append(time.perf_counter())
    _synchronize(device)
    marks.append(time.perf_counter())
    forward, drain, backward, second_drain = ((end - begin) * 1e6 / length for begin, end in itertools.pairwise(marks))
    return forward, backward, drain + second_drain


def _per_call_us(function: Callable[[], object], calls: int, device: str) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    elapsed = time.perf_counter() - begin
    _synchronize(device)
    return elapsed * 1e6 / calls


def launches(x: Tensor, calls: int, device: str) -> Row:
    """Return the host time of what every pack and unpack cannot do without: an allocation and a launch each."""
    module = importlib.import_module(f"pyactcomp.codec.kernels.{'cuda' if device == 'cuda' else 'cpu'}")
    if (reason := module.unavailable_reason()) is not None:
        raise ImportError(reason)
    kernel = module.bind(x.dtype, 8, 64, False, False, x.device)
    nbytes = pyactcomp.codec.quantize(x).nbytes
    packed = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    restored = torch.empty_like(x)
    parts = {
        "allocate_us": lambda: torch.empty(nbytes, dtype=torch.uint8, device=x.device),
        "encode_us": lambda: kernel.encode(x, packed, 0),
        "decode_us": lambda: kernel.decode(packed, restored),
    }
    for part in parts.values():
        _per_call_us(part, calls, device)
    rounds = {name: [_per_call_us(part, calls, device) for _ in range(ROUNDS)] for name, part in parts.items()}
    return {name: quantile(samples, 0.5) for name, samples in rounds.items()}


class Chains:
    """A chain that saves one tensor per operator and one that saves nothing, each with and without compression."""

    def __init__(self, device: str, length: int) -> None:
        self.device, self.length = device, length
        torch.manual_seed(0)
        self.x = torch.randn(NBYTES // 2 // WIDTH, WIDTH, dtype=torch.bfloat16, device=device).requires_grad_()
        # One context for all: its first forward records what a report needs, which the later ones do not.
        self.compressed = pyactcomp.compressed()
        self._check()
        self.saving()

    def _check(self) -> None:
        """Raise unless each link's tensor is stored in 8 bits: all but the first one's, which is a leaf."""
        links = 4
        gradients = []
        for context in (nullcontext, lambda: self.compressed):
            chain(self._link, self.x, links, context, self.device)
            gradients.append(self.x.grad)
        exact, found = gradients
        if exact is None or found is None or torch.equal(exact, found):
            raise RuntimeError(
                "the gradient with compression is the exact one: nothing was compressed, nothing to time"
            )
        expected = (links - 1) * pyactcomp.codec.quantize(self.x.detach()).nbytes
        if (stored := pyactcomp.report(self.compressed).stored_bytes) != expected:
            raise RuntimeError(f"{links} links store {stored} bytes, not {expected}: not each packs one tensor")

    def _link(self, y: Tensor) -> Tensor:
        return F.silu(y) + 1.0

    def _both(self, operator: Operator, context: Context | None = None) -> tuple[Times, Times]:
        plain = chain(operator, self.x, self.length, nullcontext, self.device)
        ours = chain(operator, self.x, self.length, context or (lambda: self.compressed), self.device)
        return plain, ours

    def saving(self, context: Context | None = None) -> tuple[Times, Times]:
        """Return the times of the links, plain and in another context: compressed, unless one is given."""
        return self._both(self._link, context)

    def nothing_ns(self) -> float:
        """Return the host's nanoseconds that compression adds to the forward of an operator that saves nothing."""
        plain, ours = self._both(lambda y: y + 1.0)
        return (ours[0] - plain[0]) * 1e3


def _beyond(plain: Sequence[Times], ours: Sequence[Times]) -> Row:
    """Return what forward and backward of the same rounds take beyond the plain ones, for a tensor."""
    pack, unpack = ([b[i] - a[i] for a, b in zip(plain, ours, strict=True)] for i in (0, 1))
    return {
        "pack_us": quantile(pack, 0.5),
        "unpack_us": quantile(unpack, 0.5),
        "sum_us": quantile([a + b for a, b in zip(pack, unpack, strict=True)], 0.5),
        "samples_pack_us": pack,
        "samples_unpack_us": unpack,
    }


def measure(options: Options) -> Row:
    """Return the figures of one row."""
    device = options.device
    length, rounds = (TINY_LENGTH, 3) if options.tiny else (LENGTH, ROUNDS)
    chains = Chains(device, length)
    plain, ours = zip(*(chains.saving() for _ in range(rounds)), strict=True)
    with torch.no_grad():
        breakdown = launches(chains.x.detach(), length, device)
    return {
        "tensors": length,
        "nbytes": NBYTES,
        **_beyond(plain, ours),
        "drain_us": quantile([b[2] for b in ours], 0.5),
        "plain_forward_us": quantile([a[0] for a in plain], 0.5),
        "plain_backward_us": quantile([a[1] for a in plain], 0.5),
        **breakdown,
    }


def measure_hook(options: Options) -> Row:
    """Return the figures of a hook in Python that hands on what it gets: what a host takes for the least of hooks."""
    length, rounds = (TINY_LENGTH, 3) if options.tiny else (LENGTH, ROUNDS)
    chains = Chains(options.device, length)
    context = partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x, lambda x: x)
    plain, hooked = zip(*(chains.saving(context) for _ in range(rounds)), strict=True)
    return {"tensors": length, "nbytes": NBYTES, **_beyond(plain, hooked)}


def measure_transformer(options: Options) -> Row:
    """Return the CPU time of a small transformer's step, whose tensors are the CPU's on any machine."""
    model, batch = overhead_models.transformer(2 if options.tiny else overhead_models.BLOCKS)
    return overhead_models.measure(model, batch, "cpu", 3 if options.tiny else 30, time.process_time)


def measure_tiny_tensors(options: Options) -> Row:
    """Return the host time of a step that saves 5,000 tensors of 2 KiB."""
    model, batch = overhead_models.tiny_tensors(10 if options.tiny else overhead_models.PAIRS)
    return overhead_models.measure(model, batch, options.device, 3 if options.tiny else ROUNDS)


ROWS: dict[tuple[str, str], Callable[[Options], Row]] = {
    (CHAIN, "int8"): measure,
    (CHAIN, "python hook"): measure_hook,
    ("transformer-12x32", "int8"): measure_transformer,
    ("tiny-5000", "int8"): measure_tiny_tensors,
}
"""What is measured of each workload and method."""


def run(options: Options) -> None:
    """Measure each row once per commit."""
    store = options.store("overhead")
    for (workload, method), measured in ROWS.items():
        key: Row = {"workload": workload, "method": method, "scale": options.scale}
        if (store.has(**key) and not options.again) or not options.selects(workload, method):
            continue
        if not options.budget.allows(0.0):
            print("overhead: not started, the budget is used up")
            return
        torch.manual_seed(0)
        try:
            row: Row = {"status": "ok", **measured(options)}
        except (ImportError, RuntimeError) as problem:
            row = failure(problem)
        store.append({"suite": "overhead", **key, **row})
        names = ("pack_us", "unpack_us", "sum_us", "drain_us", "allocate_us", "encode_us", "decode_us", "time_x")
        figures = "  ".join(f"{name} {row[name]:.2f}" for name in names if name in row)
        print(f"overhead {workload} {method} {row['status']} {figures}{row.get('reason', '')}", flush=True)
