"""Seeds of stochastic rounding: no two tensors of a step share one, and a run repeats them."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyactcomp
from pyactcomp import codec, functional
from pyactcomp.codec.seeds import Seeds, second_of
from pyactcomp.engine import packing
from pyactcomp.functional import Codes

OPTIONS: dict[str, Any] = {"rounding": "stochastic", "min_bytes": 0, "seed": 3}


class Noted:
    """A kernel that notes the seeds it is given."""

    def __init__(self, kernel: Any, seeds: list[int]) -> None:
        self._kernel, self._seeds = kernel, seeds
        self.packed_nbytes = kernel.packed_nbytes

    def encode(self, x: Tensor, packed: Tensor, seed: int) -> None:
        self._seeds.append(seed % 2**64)  # operators take it as a signed integer
        self._kernel.encode(x, packed, seed)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        self._kernel.decode(packed, out)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return what the seeds of packed tensors, booleans aside, are appended to."""
    seeds: list[int] = []
    bind = codec.bind

    def noting(impl: Any, dtype: torch.dtype, *form: Any) -> Any:
        kernel = bind(impl, dtype, *form)
        return kernel if dtype is torch.bool else Noted(kernel, seeds)

    monkeypatch.setattr(codec, "bind", noting)
    monkeypatch.setattr(packing, "bind", noting)
    return seeds


class Mixed(nn.Module):
    """Fused modules, among them one that packs two tensors, and operators whose tensors the hooks pack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.gelu = nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()
        self.last = nn.Linear(64, 64)
        self.again = False

    def block(self, x: Tensor) -> Tensor:
        return self.last(self.gelu(self.norm(self.first(x)).sin())).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return x


def compressed_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return pyactcomp.compress(Mixed(), **OPTIONS | options)


def step(model: nn.Module) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model(x).sum().backward()


def test_a_step_of_fused_and_packed_tensors_repeats_no_seed(drawn: list[int]) -> None:
    model = compressed_model()
    step(model)
    step(model)
    # The codes of norm and GELU of three blocks.
    assert len(drawn) == 2 * 3 * 2
    assert len(set(drawn)) == len(drawn)


def test_two_models_of_one_seed_share_none(drawn: list[int]) -> None:
    models = [compressed_model(), compressed_model()]
    models.append(copy.deepcopy(models[0]))
    models.append(pickle.loads(pickle.dumps(models[0])))
    for model in models:
        step(model)
    with pyactcomp.compressed(**OPTIONS):
        torch.nn.functional.silu(torch.randn(64, requires_grad=True).mul(1))
    assert len(set(drawn)) == len(drawn) == 4 * 6 + 1


def test_the_same_run_draws_the_same(drawn: list[int]) -> None:
    runs = []
    for _ in range(2):
        del drawn[:]
        step(compressed_model())
        runs.append(drawn[:])
    assert runs[0] == runs[1]
    del drawn[:]
    step(compressed_model(seed=4))
    assert not set(drawn) & set(runs[0])


def test_two_tensors_of_one_call_have_seeds_of_their_own(drawn: list[int]) -> None:
    gate, up = (torch.randn(64, requires_grad=True) for _ in range(2))
    functional.silu_mul(gate, up, codes=Codes(rounding="stochastic", seed=5))
    assert drawn == [5, second_of(5)]


def test_calls_without_a_seed_have_each_their_own(drawn: list[int]) -> None:
    x = torch.randn(64, requires_grad=True)
    for _ in range(3):
        functional.gelu(x, codes=Codes(bits=4))
        functional.silu_mul(x, x * 2, codes=Codes(rounding="stochastic"))
    assert len(set(drawn)) == len(drawn) == 9


def test_a_checkpointed_block_may_draw_others_when_it_runs_again(drawn: list[int]) -> None:
    """What is saved the first time is thrown away unread; values and gradients see one run's codes alone."""
    model = compressed_model()
    model.again = True  # type: ignore[assignment]
    step(model)
    assert len(set(drawn)) == len(drawn)
    weight = model.get_parameter("first.weight")
    assert weight.grad is not None
    got, exact = weight.grad.clone(), pyactcomp.decompress(model)
    weight.grad = None
    step(exact)
    # Half a step and more, as rounding up and down is, of a range of six deviations, in four tensors of three blocks.
    assert (got - weight.grad).norm() <= 12 * 6 / 255 * weight.grad.norm()


def test_sequences_do_not_meet_and_come_again() -> None:
    first, second = Seeds(1), Seeds(1)
    numbers = [first.next() for _ in range(1000)] + [second.next() for _ in range(1000)]
    numbers += [second_of(number) for number in numbers]
    assert len(set(numbers)) == 4000
    assert all(0 <= number < 2**64 for number in numbers)
    del second
    third = Seeds(1)
    assert third.next() == numbers[1000]
    assert Seeds(2).next() != numbers[0]


def test_threads_draw_no_seed_twice() -> None:
    seeds, interval = Seeds(9), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            parts = list(threads.map(lambda _: [seeds.next() for _ in range(2000)], range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len({number for part in parts for number in part}) == 16_000
