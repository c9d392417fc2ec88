"""The search for a batch size and the ladder on a GPU with little memory: a cap on what this process may reserve."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from same_values import same
from torch import Tensor, nn

import pyactcomp
from pyactcomp.snapshots import explain

pytestmark = pytest.mark.gpu

WIDTH, TOKENS = 1024, 1024
CAP = 4 << 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(8))).cuda()


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def cap() -> Iterator[None]:
    """Let this process reserve at most ``CAP`` bytes."""
    gc.collect()
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("budget", [CAP, "3GiB"])
def test_found_batch_is_the_largest_and_leaves_no_trace(cap: None, budget: int | str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(size: int) -> None:
        loss(net, torch.randn(size, TOKENS, WIDTH, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()

    before, allocated = copy.deepcopy(net.state_dict()), torch.cuda.memory_allocated()
    generator = torch.cuda.get_rng_state()
    found = pyactcomp.find_batch_size(step, net, optimizer, budget=budget)
    assert found.peak_bytes is not None
    assert found.budget is not None
    assert found.peak_bytes <= found.budget
    assert same(net.state_dict(), before)
    assert not optimizer.state
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    # cuBLAS keeps a workspace for each thread that multiplies: 32 MiB at most.
    del before
    assert torch.cuda.memory_allocated() - allocated <= 2 * (32 << 20)
    # A tenth more does not fit: over the budget, or out of memory. What is reserved grows by whole segments, not along
    # the line through the trials, which may cost one sample.
    larger = found.size + max(1, found.size // 10) + 1
    try:
        torch.cuda.reset_peak_memory_stats()
        step(larger)
        step(larger)
        assert torch.cuda.max_memory_reserved() > found.budget
    except torch.OutOfMemoryError:
        pass


@pytest.mark.parametrize("rung", ["lossless", "int8", "int8+checkpoint", "half"])
def test_step_climbs_under_a_cap_and_equals_the_step_begun_there(cap: None, rung: str, tmp_path: Path) -> None:
    def ladder(*rungs: str) -> pyactcomp.Ladder:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return pyactcomp.Ladder(net, optimizer, rungs, blocks=list(net), snapshot=tmp_path)

    def fits(size: int, *rungs: str) -> bool:
        each = ladder(*rungs)
        try:
            each.step(torch.randn(size, TOKENS, WIDTH, device="cuda"), loss)
        except torch.OutOfMemoryError:
            return False
        finally:
            del each
            gc.collect()
            torch.cuda.empty_cache()
        return True

    size = next(size for size in range(2, 64) if not fits(size, "keep"))
    batch = torch.randn(size, TOKENS, WIDTH, device="cuda")
    for path in tmp_path.iterdir():
        path.unlink()
    climbed = ladder("keep", rung)
    result = climbed.step(batch, loss)
    assert [climb.rung for climb in climbed.climbs] == ["keep"]
    [written] = tmp_path.iterdir()
    assert explain(written).live_bytes > 0
    weights = {name: value.cpu() for name, value in climbed.model.state_dict().items()}
    del climbed
    gc.collect()
    torch.cuda.empty_cache()
    direct = ladder(rung)
    assert torch.equal(direct.step(batch, loss), result)
    assert same({name: value.cpu() for name, value in direct.model.state_dict().items()}, weights)
