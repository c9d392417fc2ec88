"""A step that ran out of memory runs again on the next rung, as if it had begun there."""

from __future__ import annotations

import copy
import gc
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_worker import run as in_processes
from memory_cap import Capped, Memory
from same_values import same
from torch import Tensor, nn

import pyactcomp

EPS = torch.finfo(torch.float32).eps
WIDTH, TOKENS, ROWS = 64, 128, 16
# Of one activation of a whole batch.
ACTIVATION = 4 * WIDTH * TOKENS * ROWS


class Block(nn.Module):
    """Keeps some six activations: of a norm, a product, GELU, dropout and a product."""

    def __init__(self, memory: Memory, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TOKENS) if norm else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.cap = Capped(memory)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cap(self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))))  # type: ignore[no-any-return]


def model(memory: Memory, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(memory, norm) for _ in range(4)))


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).square().mean()  # type: ignore[no-any-return]


def batch(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def ladder(memory: Memory, *rungs: str, norm: bool = False, **options: Any) -> pyactcomp.Ladder:
    net = model(memory, norm)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return pyactcomp.Ladder(net, optimizer, rungs, blocks=list(net), **options)


def state(found: pyactcomp.Ladder) -> Any:
    return copy.deepcopy([found.model.state_dict(), found.optimizer.state_dict()])


def peak(rung: str) -> int:
    """Return the highest memory of a step on a rung, the second of two."""
    memory = Memory()
    alone = ladder(memory, rung)
    alone.step(batch(), loss)
    base, memory.peak = memory.used, 0
    alone.step(batch(), loss)
    return memory.peak - base


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    for rung in ("keep", "int8", "half"):  # what torch imports and allocates for good
        peak(rung)
    return {rung: peak(rung) for rung in ("keep", "int8", "int8+checkpoint", "half")}


def test_every_rung_takes_less_than_the_one_before(peaks: dict[str, int]) -> None:
    assert peaks["keep"] > 1.5 * peaks["int8"]
    assert peaks["int8"] > 1.2 * peaks["int8+checkpoint"]
    assert peaks["keep"] > 1.5 * peaks["half"]


class Failing(Memory):
    """Runs out of memory at the n-th check from now on, once for each number."""

    def __init__(self, *checks: int) -> None:
        super().__init__()
        self.checks = list(checks)
        self.count = 0

    def check(self) -> None:
        self.count += 1
        if self.count in self.checks:
            raise torch.OutOfMemoryError("CUDA out of memory.")


# In the first block, in the third, in backward and at its end; each rung and each place with a scaler and without.
@pytest.mark.parametrize(
    ("check", "rung", "scaled"),
    [
        (check, rung, bool((i + j) % 2))
        for i, check in enumerate((1, 3, 5, 8))
        for j, rung in enumerate(("keep", "lossless", "int8", "int8+checkpoint", "half"))
    ],
)
def test_recovered_step_is_the_step_begun_on_that_rung(check: int, rung: str, scaled: bool) -> None:
    def scaler() -> Any:
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)} if scaled else {}

    norm = rung == "lossless"
    direct = ladder(Failing(), rung, norm=norm, **scaler())
    climbed = ladder(Failing(check), "keep", rung, norm=norm, **scaler())
    results = []
    for each in (direct, climbed):
        torch.manual_seed(7)
        results.append([each.step(batch(seed), loss) for seed in (1, 2)])
        assert all(p.grad is None for p in each.model.parameters())
    assert [climb.rung for climb in climbed.climbs] == ["keep"]
    assert climbed.rung.name == rung
    assert same(*results)
    assert same(state(direct), state(climbed))
    if scaled:
        assert direct._scaler.state_dict() == climbed._scaler.state_dict()


def test_parts_of_a_batch_give_the_gradients_of_the_whole() -> None:
    whole, parts = (ladder(Failing(), rung) for rung in ("keep", "quarter"))
    gradients = []
    for each in (whole, parts):
        each.model.eval()  # dropout of a part differs from that of the whole
        each._before_step = lambda each=each: gradients.append([p.grad.clone() for p in each.model.parameters()])
        each.step(batch()[: ROWS - 3], loss)
    for exact, got in zip(*gradients, strict=True):
        # A sum in another order: each of at most rows * tokens terms is rounded once more.
        assert (got - exact).abs().max() <= 2**-24 * (ROWS * TOKENS) ** 0.5 * 8 * exact.abs().max()


def test_weights_of_parts_are_the_callers() -> None:
    """A mean over tokens: parts with few of them count less."""
    mask = (torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 7 < 3) & (torch.arange(ROWS) < 9)[:, None]
    data = {"x": batch(), "mask": mask, "name": "kept"}

    def over_tokens(net: nn.Module, part: dict[str, Any]) -> Tensor:
        assert part["name"] == "kept"
        return net(part["x"])[part["mask"]].square().mean()  # type: ignore[no-any-return]

    values = []
    for rung in ("keep", "half"):
        each = ladder(Failing(), rung, weight=lambda part: float(part["mask"].sum()))
        each.model.eval()
        values.append(each.step(data, over_tokens))
    # A sum of positive squares by halves, in two orders: a rounding for each halving.
    count = int(mask.sum()) * WIDTH
    assert torch.allclose(*values, rtol=math.log2(count) * EPS, atol=0)


def test_ladder_climbs_rung_by_rung_under_a_cap(peaks: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    found = ladder(memory, "keep", "int8", "int8+checkpoint", "half", "quarter", "eighth")
    found.step(batch(), loss)
    memory.cap = memory.used + (peaks["int8"] + peaks["int8+checkpoint"]) // 2
    with caplog.at_level(logging.WARNING, "pyactcomp"):
        found.step(batch(), loss)
    assert [(climb.step, climb.rung) for climb in found.climbs] == [(1, "keep"), (1, "int8")]
    assert found.rung.name == "int8+checkpoint"
    texts = [record.message for record in caplog.records]
    assert len(texts) == 6
    assert texts[0].startswith("out of memory in step 1 on rung keep: CUDA out of memory.")
    assert texts[1].startswith("alive there: weights 0.3 MiB, gradients")
    assert texts[2] == "the step runs again on rung int8 (2 of 6)"
    found.step(batch(), loss)
    assert len(found.climbs) == 2


def test_last_rung_raises_with_all_that_was_tried_and_the_training_is_as_before() -> None:
    memory = Memory()
    found = ladder(memory, "keep", "int8", "half")
    found.step(batch(), loss)
    before, generator = state(found), torch.get_rng_state()
    memory.cap = 1
    with pytest.raises(torch.OutOfMemoryError, match=r"rungs: keep, int8, half\).*smaller batch"):
        found.step(batch(), loss)
    assert same(state(found), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in found.model.parameters())
    memory.cap = None
    found.step(batch(), loss)
    assert [climb.rung for climb in found.climbs] == ["keep", "int8", "half"]


def test_twenty_failures_leave_nothing_allocated() -> None:
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(each, Tensor) for each in gc.get_objects() if type(each).__module__ != "unittest.mock")

    memory = Failing()
    rungs = [pyactcomp.Rung(f"rung {number}") for number in range(21)]
    net = model(memory)
    found = pyactcomp.Ladder(net, torch.optim.AdamW(net.parameters()), rungs)
    found.step(batch(), loss)
    count, used = tensors(), memory.used
    # One check in backward of each run fails.
    memory.checks = [memory.count + 6 * run for run in range(1, 21)]
    found.step(batch(), loss)
    assert len(found.climbs) == 20
    assert tensors() == count
    assert memory.used - used < ACTIVATION


class Tight(torch.optim.SGD):
    """Runs out of memory as often as told, before or after the first weight has changed."""

    def __init__(self, parameters: Any, failures: int, late: bool) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.failures, self.late = failures, late

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameter = self.param_groups[0]["params"][0]
        if self.failures:
            self.failures -= 1
            if self.late:
                parameter.data.mul_(2)
            self.state[parameter]["momentum_buffer"] = torch.ones(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        super().step(closure)


def test_optimizer_that_had_not_begun_steps_again() -> None:
    results = []
    for failures in (0, 1):
        net = model(Failing())
        found = pyactcomp.Ladder(net, Tight(net.parameters(), failures, late=False), ["keep"])
        torch.manual_seed(3)
        found.step(batch(), loss)
        results.append(state(found))
        assert found.climbs == []
    assert same(*results)


@pytest.mark.parametrize(
    ("failures", "late", "words"), [(2, False, "CUDA out of memory"), (1, True, "had begun to change")]
)
def test_optimizer_that_cannot_step_raises(failures: int, late: bool, words: str) -> None:
    net = model(Failing())
    found = pyactcomp.Ladder(net, Tight(net.parameters(), failures, late), ["keep"])
    with pytest.raises(torch.OutOfMemoryError, match=words):
        found.step(batch(), loss)


def test_rungs_that_do_not_serve_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = pyactcomp.Ladder(net, torch.optim.SGD(net.parameters(), lr=1.0))
    assert [name.partition(":")[0] for name in found.left_out] == ["int8+checkpoint", "half", "quarter", "eighth"]
    assert "blocks=" in found.left_out[0]
    assert "batch norms" in found.left_out[1]
    with pytest.raises(ValueError, match="rungs must name at least one"):
        pyactcomp.Ladder(net, torch.optim.SGD(net.parameters(), lr=1.0), ["half"])
    with pytest.raises(ValueError, match="rungs must be one of"):
        pyactcomp.Ladder(net, torch.optim.SGD(net.parameters(), lr=1.0), ["int4"])
    with pytest.raises(TypeError, match="optimizer must be"):
        pyactcomp.Ladder(net, None)  # type: ignore[arg-type]


def _train(rank: int, backend: str) -> dict[str, Any]:
    net = nn.Linear(8, 8)
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    found = pyactcomp.Ladder(net, torch.optim.SGD(net.parameters(), lr=0.5), ["keep", "lossless", "half"])
    failing = {(1, 0): 1, (2, 1): 0}  # run and rank
    runs = 0

    def of_rank(net: nn.Module, part: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if failing.pop((runs - 1, rank), None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return net(part).square().mean()  # type: ignore[no-any-return]

    for step in range(3):
        found.step(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)), of_rank)
    return {
        "weight": net.weight.detach().clone(),
        "climbs": [(climb.step, climb.rung, climb.failure is None) for climb in found.climbs],
    }


def test_two_processes_climb_together(tmp_path: Path) -> None:
    one, other = in_processes(_train, "gloo", 2, tmp_path)
    assert torch.equal(one["weight"], other["weight"])
    assert one["climbs"] == [(1, "keep", False), (1, "lossless", True)]
    assert other["climbs"] == [(1, "keep", True), (1, "lossless", False)]
    # The same training in one process, by the mean over both batches.
    net = nn.Linear(8, 8)
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):
        data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        net(torch.cat(data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # In each of three steps a gradient sums 8 rows in another order, of outputs that sum 8 inputs. A step moves a
    # weight by less than its size, and shrinks what earlier steps were off.
    weight = net.weight.detach()
    bound = 3 * (8 + 8) * EPS * float(weight.abs().max())
    off = float((one["weight"] - weight).abs().max())
    assert off <= bound, (off, bound)
    assert not dist.is_initialized()


class Counted(nn.Module):
    """A block of a model, with a check of the memory at its end."""

    def __init__(self, block: nn.Module, memory: Memory) -> None:
        super().__init__()
        self.block, self.cap = block, Capped(memory)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.cap(self.block(*args, **kwargs))  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", [1, 2, 3, 4], ids=["first block", "second block", "backward", "end of backward"])
@pytest.mark.parametrize("rung", ["int8", "int8+checkpoint"])
def test_a_trainers_step_runs_again_as_one_begun_on_that_rung(check: int, rung: str, tmp_path: Path) -> None:
    direct, _ = trained(tmp_path, Failing(), (rung,))
    climbed, climbs = trained(tmp_path, Failing(check), ("keep", rung))
    assert [climb.rung for climb in climbs] == ["keep"]
    assert same(direct, climbed)


@pytest.mark.parametrize("check", [5, 7, 8], ids=["forward", "backward", "end of backward"])
def test_gradients_of_earlier_micro_batches_stay(check: int, tmp_path: Path) -> None:
    whole, _ = trained(tmp_path, Failing(), ("keep",), gradient_accumulation_steps=2)
    rungs = ("keep", pyactcomp.Rung("again"))
    again, climbs = trained(tmp_path, Failing(check), rungs, gradient_accumulation_steps=2)
    assert [climb.step for climb in climbs] == [1]
    assert same(whole, again)


def trained(directory: Path, memory: Memory, rungs: Any, **more: Any) -> tuple[Any, list[pyactcomp.Climb]]:
    """Return the weights after two steps of a trainer, and what its ladder climbed."""
    text = pytest.importorskip("works_with_text", reason="Hugging Face transformers is not installed")
    trainers = pytest.importorskip("trainers", reason="the Trainer needs accelerate")
    climb = pytest.importorskip("pyactcomp.integrations.transformers").climb
    net = text.built(text.llama)
    for layer in net.model.layers:
        layer.mlp = Counted(layer.mlp, memory)
    args = trainers.arguments(text.transformers.TrainingArguments, directory, **more)
    args.max_steps = 2
    trainer = text.transformers.Trainer(net, args, train_dataset=2 * trainers.rows())
    climbing = climb(trainer, rungs)
    trainer.train()
    return net.state_dict(), climbing.climbs


def test_a_loop_of_its_own_takes_no_parts_of_a_batch() -> None:
    found = ladder(Memory(), "keep", "half")
    with pytest.raises(ValueError, match="leave half out of rungs"):
        found.gradients(lambda: None)
