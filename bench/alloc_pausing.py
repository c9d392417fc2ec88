"""Giving memory back for a while: 60 GiB without contents, a training's state with them, and a loop that needs both.

The peers: plain PyTorch, which copies each storage to pinned memory and frees the storage, and torch_memory_saver.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .alloc_methods import NATIVE, OURS, SAVER
from .alloc_workloads import Decoder, Experts, generate
from .rows import Row, quantile

WORKLOADS = ("pause_drop", "pause_state", "pause_loop")
"""Without contents; with contents; training and generation by turns, natively without pauses too."""

Keep = Literal["cpu", "drop"]


@dataclass(frozen=True)
class Sizes:
    """``drop`` and ``cache`` count units; a decoder is (hidden, layers, heads, shared heads, inner, vocabulary)."""

    unit: int
    drop: int
    repeats: int
    state: tuple[int, int, int, int, int, int]
    experts: int
    trained: tuple[int, int, int, int, int, int]
    batch: tuple[int, int]
    cache: int
    tokens: int
    cycles: int


FULL = Sizes(
    1 << 30, 60, 5, (1024, 24, 16, 4, 2048, 32000), 16, (1536, 12, 12, 4, 4096, 32000), (8, 1024), 40, 16, 50
)  # fmt: skip
TINY = Sizes(1 << 20, 4, 2, (32, 2, 2, 2, 64, 64), 2, (32, 2, 2, 2, 64, 64), (2, 16), 4, 2, 3)


class Saver(Protocol):
    """Pauses and resumes the tensors made in a region of a tag."""

    def region(self, tag: str, keep: Keep) -> AbstractContextManager[Any]:
        """Return the context in which the tag's tensors are made."""

    def own(self, tag: str, keep: Keep, tensors: list[Tensor]) -> None:
        """Take note of the tag's tensors."""

    def pause(self, tag: str) -> None: ...
    def resume(self, tag: str) -> None: ...


class ByHand:
    """Plain PyTorch: each storage is copied to pinned memory and freed, then allocated again and copied back."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._tags: dict[str, tuple[Keep, list[Tensor]]] = {}
        self._sizes: dict[int, int] = {}
        self._kept: dict[int, Tensor] = {}

    def region(self, tag: str, keep: Keep) -> AbstractContextManager[Any]:
        return nullcontext()

    def own(self, tag: str, keep: Keep, tensors: list[Tensor]) -> None:
        self._tags[tag] = keep, tensors

    def pause(self, tag: str) -> None:
        keep, tensors = self._tags[tag]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._sizes[id(tensor)] = storage.nbytes()
            if keep == "cpu":
                if id(tensor) not in self._kept:
                    self._kept[id(tensor)] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._cuda)
                self._kept[id(tensor)].copy_(_bytes(tensor), non_blocking=True)
        if self._cuda:
            torch.cuda.synchronize()
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
        if self._cuda:
            torch.cuda.empty_cache()

    def resume(self, tag: str) -> None:
        keep, tensors = self._tags[tag]
        for tensor in tensors:
            tensor.untyped_storage().resize_(self._sizes[id(tensor)])
            if keep == "cpu":
                _bytes(tensor).copy_(self._kept[id(tensor)], non_blocking=True)
        if self._cuda:
            torch.cuda.synchronize()


class Ours:
    """Tags of this project's allocator."""

    def region(self, tag: str, keep: Keep) -> AbstractContextManager[Any]:
        from pyactcomp import allocator

        return allocator.tag(tag, keep=keep)

    def own(self, tag: str, keep: Keep, tensors: list[Tensor]) -> None:
        """Nothing to note: the allocator knows its blocks."""

    def pause(self, tag: str) -> None:
        from pyactcomp import allocator

        allocator.pause(tag)

    def resume(self, tag: str) -> None:
        from pyactcomp import allocator

        allocator.resume(tag)


class Theirs:
    """Regions of torch_memory_saver."""

    def __init__(self) -> None:
        from torch_memory_saver import torch_memory_saver

        self._saver = torch_memory_saver

    def region(self, tag: str, keep: Keep) -> AbstractContextManager[Any]:
        return self._saver.region(tag, enable_cpu_backup=keep == "cpu")  # type: ignore[no-any-return]

    def own(self, tag: str, keep: Keep, tensors: list[Tensor]) -> None:
        """Nothing to note: the library knows its segments."""

    def pause(self, tag: str) -> None:
        torch.cuda.synchronize()  # theirs starts at once
        self._saver.pause(tag)

    def resume(self, tag: str) -> None:
        self._saver.resume(tag)


def saver(method: str, device: str) -> Saver:
    """Return the way of a method to give memory back."""
    if method == OURS:
        return Ours()
    return Theirs() if method == SAVER else ByHand(device)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view of a storage's bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def used_bytes(device: str) -> int:
    """Return the bytes of the device in use, by the driver's count."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _reserved(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


def _resident_bytes() -> int:
    """Return the host memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _timed(call: Callable[[str], None], tag: str) -> float:
    begin = time.perf_counter()
    call(tag)
    return time.perf_counter() - begin


def link(device: str, nbytes: int) -> tuple[float, float]:
    """Return the bytes per second of the host link to the host and from it: the best of five copies each."""
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((pinned, there), (there, pinned)):
        times = []
        for _ in range(5):
            used_bytes(device)  # waits
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            used_bytes(device)
            times.append(time.perf_counter() - begin)
        rates.append(nbytes / min(times))
    return rates[0], rates[1]


def cycles(way: Saver, tag: str, count: int, reserved: int, device: str) -> Row:
    """Return the seconds of each pause and resume, and the least share of ``reserved`` bytes that a pause released."""
    paused, resumed, released = [], [], []
    for _ in range(count):
        used = used_bytes(device)
        paused.append(_timed(way.pause, tag))
        released.append(used - used_bytes(device))
        resumed.append(_timed(way.resume, tag))
    return {
        "pause_s": [round(seconds, 5) for seconds in paused],
        "resume_s": [round(seconds, 5) for seconds in resumed],
        "reserved_bytes": reserved,
        "released_share": min(released) / reserved if reserved else None,
    }


def measure_drop(way: Saver, sizes: Sizes, device: str) -> Row:
    """Return the row of memory whose contents are dropped."""
    before = _reserved(device)
    with way.region("dropped", "drop"):
        tensors = [torch.zeros(sizes.unit, dtype=torch.uint8, device=device) for _ in range(sizes.drop)]
    way.own("dropped", "drop", tensors)
    row = cycles(way, "dropped", sizes.repeats, _reserved(device) - before, device)
    return {"nbytes": sizes.unit * sizes.drop, "blocks": len(tensors), **row}


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return a training's tensors: parameters and the optimizer's."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [*parameters, *(t for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor))]


def checksums(tensors: list[Tensor]) -> Tensor:
    """Return the sum of each tensor's bytes, on the host."""
    return torch.stack([_bytes(tensor).sum(dtype=torch.int64) for tensor in tensors]).cpu()


def measure_state(way: Saver, sizes: Sizes, device: str) -> Row:
    """Return the row of parameters and AdamW's state of a mixture of experts; contents are compared afterwards."""
    rates = link(device, sizes.unit)
    before = _reserved(device)
    torch.manual_seed(0)
    with way.region("state", "cpu"), torch.device(device):
        model = Decoder(*sizes.state, unit=lambda hidden, inner: Experts(hidden, inner, sizes.experts)).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.losses(torch.randint(sizes.state[-1], (2, 64), device=device)).mean().backward()
    for parameter in model.parameters():
        if parameter.grad is None:  # an expert without a token
            parameter.grad = torch.zeros_like(parameter)
    with way.region("state", "cpu"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = state_of(optimizer)
    way.own("state", "cpu", tensors)
    expected = checksums(tensors)
    row = cycles(way, "state", sizes.repeats, _reserved(device) - before, device)
    if not torch.equal(checksums(tensors), expected):
        raise RuntimeError("the contents are not those from before the pauses")
    return {
        "nbytes": sum(tensor.untyped_storage().nbytes() for tensor in tensors),
        "blocks": len(tensors),
        "to_host_bytes_per_s": rates[0],
        "from_host_bytes_per_s": rates[1],
        **row,
    }


class Loop:
    """A decoder that trains and generates by turns, with a cache that only generation needs."""

    def __init__(self, way: Saver, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, device
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Decoder(*sizes.trained).bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._train_on(torch.randint(sizes.trained[-1], sizes.batch, device=device), way)
        moments = state_of(self.optimizer)[len(list(self.model.parameters())) :]
        way.own("optimizer", "cpu", moments)
        with way.region("cache", "drop"):
            self.cache = torch.zeros(sizes.unit * sizes.cache, dtype=torch.uint8, device=device)
        way.own("cache", "drop", [self.cache])

    def _train_on(self, tokens: Tensor, way: Saver) -> float:
        loss = self.model.losses(tokens).mean()
        loss.backward()
        with way.region("optimizer", "cpu"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def train(self, way: Saver, number: int) -> float:
        tokens = torch.randint(
            self.sizes.trained[-1], self.sizes.batch, generator=torch.Generator().manual_seed(number)
        )
        return self._train_on(tokens.to(self.device), way)

    def generate(self, number: int) -> int:
        self.cache.fill_(number % 251)  # all of the cache is written
        prompt = torch.full((self.sizes.batch[0], 4), number % 97, device=self.device)
        return int(generate(self.model, prompt, self.sizes.tokens).sum())


def measure_loop(way: Saver, sizes: Sizes, device: str, pauses: bool) -> Row:
    """Return the row of the loop: memory in use after each half, growth over the cycles, the mean result."""
    loop = Loop(way, sizes, device)
    results: list[float] = []
    samples: list[tuple[float, int, int]] = []
    cycle_s: list[float] = []
    host: list[int] = []
    begin = time.perf_counter()

    def turn(away: str, back: str) -> None:
        if pauses:
            if device == "cuda":
                torch.cuda.empty_cache()  # memory without a tag that nothing uses
            way.pause(away)
            way.resume(back)

    def sample(half: int) -> None:
        samples.append((round(time.perf_counter() - begin, 4), used_bytes(device), half))

    if pauses:
        way.pause("cache")
    for number in range(sizes.cycles):
        started = time.perf_counter()
        results.append(loop.train(way, number))
        sample(0)
        turn("optimizer", "cache")
        results.append(loop.generate(number))
        sample(1)
        turn("cache", "optimizer")
        cycle_s.append(time.perf_counter() - started)
        host.append(_resident_bytes())
    early = min(5, sizes.cycles - 1)
    row: Row = {
        "cycles": sizes.cycles,
        "paused": pauses,
        "cycle_s": round(quantile(cycle_s[early:], 0.5), 5),
        "samples": samples,
        "peak_used_bytes": max(used for _, used, _ in samples),
        "device_growth_bytes": samples[-1][1] - samples[2 * early + 1][1],
        "host_growth_bytes": host[-1] - host[early],
        "mean_result": sum(results) / len(results),
    }
    if pauses:
        way.resume("cache")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        loop.train(way, sizes.cycles)
        row["reserved_over_allocated"] = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()
    return row


def measure(workload: str, method: str, tiny: bool, device: str = "cuda") -> Iterator[Row]:
    """Yield a workload's rows."""
    sizes = TINY if tiny else FULL
    if workload == "pause_drop":
        yield measure_drop(saver(method, device), sizes, device)
    elif workload == "pause_state":
        yield measure_state(saver(method, device), sizes, device)
    else:
        for pauses in (False, True) if method == NATIVE else (True,):
            yield measure_loop(saver(method, device), sizes, device, pauses)
