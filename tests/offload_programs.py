"""Programs that train on a link without a device, and what must hold after them.

Both ends of the link are host memory, and a copy runs as early, as late or as randomly as the events allow. Memory that
is read before its copy has run holds other bytes.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp import _core
from pyactcomp.engine import offloading

KIB = 1024
CPU = torch.device("cpu")
WHEN = ("early", "late", "random")


class Delayed:
    """The link of a test, and the configurations that use it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.link: Any = None

    def use(self, when: str = "late", seed: int = 0, window: int = 16 * KIB, **options: Any) -> Any:
        """Let the CPU be a device whose copies run so, and hold so many bytes on it."""
        self.link = _core.DelayedLink(when, seed, **options)
        self._patch.setitem(offloading.links, CPU, self.link)
        self._patch.setattr(offloading, "WINDOW", window)
        offloading.reason_without_link.cache_clear()
        return self.link


@pytest.fixture(name="delayed")
def delayed_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Delayed]:
    yield Delayed(monkeypatch)
    monkeypatch.undo()
    offloading.reason_without_link.cache_clear()


def only() -> dict[str, int]:
    """Return the statistics of the one configuration in use."""
    gc.collect()
    found = [each.statistics()["cpu"] for each in offloading.all_alive() if each.statistics()]
    assert len(found) == 1
    return found[0]


def check_clean() -> dict[str, int]:
    """Assert that nothing is alive and no block of host memory is taken; return the statistics."""
    found = only()
    assert {name: found[name] for name in ("alive", "device_bytes", "host_bytes")} == {
        "alive": 0,
        "device_bytes": 0,
        "host_bytes": 0,
    }
    return found


class Block(nn.Module):
    """A residual block with an attention and a gate, as those of a language model."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = (nn.Linear(*s) for s in ((width, 2 * width),) * 2 + ((2 * width, width),))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, 4, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, tokens, width)))
        y = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int = 4, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


Run = Callable[[nn.Module], None]
DATA = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(3))


def one(model: nn.Module) -> None:
    model(DATA).square().mean().backward()


def twice(model: nn.Module) -> None:
    loss = model(DATA).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def accumulate(model: nn.Module) -> None:
    for _ in range(3):
        one(model)


def crossed(model: nn.Module) -> None:
    """Two graphs alive, the first goes back first; then a pipeline."""
    a, b = model(DATA).square().mean(), model(DATA).abs().mean()
    a.backward()
    c = model(DATA).mean()
    b.backward()
    c.backward()


def one_forward_one_backward(model: nn.Module) -> None:
    """A stage's schedule in a pipeline: four microbatches warm up, eight in all."""
    alive = [model(DATA * (i + 1)).square().mean() for i in range(4)]
    for i in range(4, 8):
        alive.pop(0).backward()
        alive.append(model(DATA * (i + 1)).square().mean())
    for loss in alive:
        loss.backward()


def broken(model: nn.Module) -> None:
    """A forward that raises, one that is dropped, a backward that raises; then a whole step."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        one(model)
    handle.remove()
    model(DATA).sum()
    out = model.blocks[1].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        one(model)
    out.remove()
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    one(model)


def checkpointed(model: nn.Module) -> None:
    model.checkpointed = True
    try:
        one(model)
    finally:
        model.checkpointed = False


def part(model: nn.Module) -> None:
    """Gradients of some parameters alone, then of all."""
    loss = model(DATA).square().mean()
    found = torch.autograd.grad(loss, list(model.blocks[-1].parameters()), retain_graph=True)
    loss.backward()
    for parameter, grad in zip(model.blocks[-1].parameters(), found, strict=True):
        parameter.grad += grad


RUNS = (one, twice, accumulate, crossed, one_forward_one_backward, broken, checkpointed, part)


def gradients(model: nn.Module, run: Run) -> list[Tensor]:
    """Return the gradients of all parameters after ``run``."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    run(model)
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(found: list[Tensor], wanted: list[Tensor], what: object = None) -> None:
    assert all(map(torch.equal, found, wanted)), what


def compressed(model: nn.Module, **options: Any) -> nn.Module:
    return pyactcomp.compress(model, **{"min_bytes": 2 * KIB, **options})


@functools.cache
def wanted(mode: str, run: Run) -> tuple[Tensor, ...]:
    """Return the gradients without offload."""
    model = compressed(Model(), mode=mode)
    one(model)  # the report
    return tuple(gradients(model, run))


def play(model: nn.Module, data: Tensor, seed: int) -> list[Tensor]:
    """Return the gradients of a random program: forwards, backwards in any order, graphs retained, dropped, or read by
    a part of the parameters alone."""
    draw = random.Random(seed)
    for parameter in model.parameters():
        parameter.grad = None
    alive: list[Tensor] = []
    for _ in range(draw.randint(2, 6)):
        move = draw.choice(("forward", "forward", "backward", "retain", "drop", "part"))
        if move == "forward" or not alive:
            alive.append(model(data[: draw.randint(1, 2), : draw.randint(8, 48)] * draw.random()).square().mean())
            continue
        place = draw.randrange(len(alive))
        if move == "part":
            last = list(model.blocks[-1].parameters())
            for parameter, grad in zip(last, torch.autograd.grad(alive[place], last, retain_graph=True), strict=True):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        elif move != "drop":
            alive[place].backward(retain_graph=move == "retain")
        if move not in ("retain", "part"):
            del alive[place]
    return [torch.zeros(0) if parameter.grad is None else parameter.grad for parameter in model.parameters()]


def play_many(delayed: Delayed, start: int, count: int) -> tuple[float, float]:
    """Check that programs give the gradients without offload and leave nothing alive; return how many tensors left,
    and how many came back."""
    mode = "lossless" if start % 100 == 0 else "int8"
    plain = compressed(Model(3, 32, dropout=0.0), mode=mode)
    data = DATA[..., :32]
    draw = random.Random(start)
    left = brought = 0.0
    for first in range(start, start + count, 50):
        link = delayed.use(draw.choice(WHEN), first, window=draw.choice((1, 8 * KIB, 40 * KIB, 120 * KIB)))
        model = compressed(Model(3, 32, dropout=0.0), mode=mode, offload=draw.choice((1.0, 1.0, 0.6)))
        for seed in range(first, min(first + 50, start + count)):
            assert_equal(play(model, data, seed), play(plain, data, seed), (first, seed))
        found = check_clean()
        left, brought = left + found["left"], brought + found["brought"]
        del model
        gc.collect()
        assert (link.pinned, link.live_events) == (0, 0)
    return left, brought


def main() -> None:
    """Play as many programs as the command line says: `python tests/offload_programs.py 10000`."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    total = [0.0, 0.0]
    with pytest.MonkeyPatch.context() as patch:
        delayed = Delayed(patch)
        for start in range(0, int(sys.argv[1]), 500):
            total = [a + b for a, b in zip(total, play_many(delayed, start, 500), strict=True)]
    sys.stdout.write(
        f"{sys.argv[1]} programs: gradients equal, nothing alive; {total[0]:.0f} tensors left, {total[1]:.0f} back\n"
    )


if __name__ == "__main__":
    main()
