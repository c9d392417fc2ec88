"""The largest batch under a budget: right, in few trials, and without a trace of the trials."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from memory_cap import Capped, Memory
from same_values import same
from torch import Tensor, nn

import pyactcomp
from pyactcomp.climb import BatchSize, batch_size
from pyactcomp.climb.failures import attempt, is_out_of_memory

WIDTH = 64


class Training:
    """A model, an optimizer, a scheduler and a scaler, whose step needs memory for each sample."""

    def __init__(self, memory: Memory, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        block = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), Capped(memory))
        blocks = [nn.Sequential(*(copy.deepcopy(each) for each in block[:3]), block[3]) for _ in range(4)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.memory = memory
        self.sizes: list[int] = []

    def step(self, size: int) -> None:
        self.sizes.append(size)
        loss = self.model(torch.randn(size, WIDTH, WIDTH)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.memory.check()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        random.random()

    def state(self) -> Any:
        parts = (self.model, self.optimizer, self.scheduler, self.scaler)
        return copy.deepcopy([each.state_dict() for each in parts])

    def find(self, **options: Any) -> BatchSize:
        others = (self.scheduler, self.scaler)
        return pyactcomp.find_batch_size(self.step, self.model, self.optimizer, others=others, **options)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Let torch import and allocate what it keeps for good, such as oneDNN's primitives."""
    for optimizer in ("AdamW", "SGD"):
        Training(Memory(), optimizer).find(start=64, largest=64)


def affine(size: int) -> int:
    return 1000 + 37 * size


class Affine:
    """A training whose peak is known, run for its sizes alone."""

    def __init__(self, peak: Any = affine) -> None:
        self.model = nn.Linear(1, 1)
        self.sizes: list[int] = []
        self.peak = peak

    def find(self, budget: int | str | None = None, **options: Any) -> BatchSize:
        def measure(run: Any) -> int:
            run()
            return int(self.peak(self.sizes[-1]))

        return pyactcomp.find_batch_size(self.sizes.append, self.model, budget=budget, measure=measure, **options)


@pytest.mark.parametrize("budget", [1037, 1038, 1100, 5000, 123_456, 10**9])
@pytest.mark.parametrize("start", [1, 8])
def test_affine_peaks_need_three_trials_and_give_the_largest_size(budget: int, start: int) -> None:
    training = Affine()
    found = training.find(budget, start=start, largest=10**8)
    assert found.size == (budget - 1000) // 37
    assert affine(found.size) == found.peak_bytes
    # Below the start, halves; then nothing is predicted by a size that does not fit.
    assert len(found.trials) <= 3 or found.size < start
    assert training.sizes == [trial.size for trial in found.trials for _ in range(2)]
    assert found.size in training.sizes


def test_budgets_are_texts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Affine()
    assert training.find("1.5KB").size == (1500 - 1000) // 37
    monkeypatch.setattr(batch_size, "gpu_in_use", lambda: False)
    assert training.find("auto", largest=50).size == 50  # without a GPU nothing is free on it
    with pytest.raises(ValueError, match="budget='1GiB' needs a GPU in use, or measure="):
        pyactcomp.find_batch_size(training.sizes.append, training.model, budget="1GiB")


@pytest.mark.gpu
def test_budgets_are_what_is_free_on_a_gpu_by_default() -> None:
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    for budget in (None, "auto"):
        found = Affine().find(budget, largest=50)
        assert found.budget is not None
        assert found.budget >= free // 2  # others may use the GPU too


@pytest.mark.parametrize("budget", [1037, 1100, 5000, 123_456])
def test_power_of_two_is_the_largest_that_fits(budget: int) -> None:
    found = Affine().find(budget, power_of_two=True)
    best = (budget - 1000) // 37
    assert found.size == 1 << (best.bit_length() - 1)
    assert all(trial.size.bit_count() == 1 for trial in found.trials)
    assert len(found.trials) <= 4


def test_good_estimate_needs_one_trial_and_a_bad_one_is_found_out() -> None:
    assert len(Affine().find(50_000, estimate=affine).trials) == 1
    assert Affine().find(50_000, estimate=affine).size == 49_000 // 37
    for wrong in (lambda size: 10 + 30 * size, lambda size: 3 * size):
        found = Affine().find(50_000, estimate=wrong)
        best = 49_000 // 37
        assert best - best // 32 <= found.size <= best
        assert found.peak_bytes is not None
        assert found.peak_bytes <= 50_000


@pytest.mark.parametrize("budget", [500, 3000, 40_000, 99_999])
def test_peaks_on_no_line_end_in_a_size_that_was_run_and_fits(budget: int) -> None:
    def stairs(size: int) -> int:
        return 300 + 11 * size + 700 * (size // 50) + size * size // 100

    found = Affine(stairs).find(budget)
    assert found.peak_bytes == stairs(found.size) <= budget
    largest = max(size for size in range(1, 10_000) if stairs(size) <= budget)
    # A prediction within a 32nd ends the search.
    assert largest - found.size <= max(1, found.size // 32)


@pytest.mark.parametrize(("optimizer", "warm"), [("AdamW", True), ("SGD", False)])
def test_real_steps_end_at_the_cap_and_leave_the_training_as_before(optimizer: str, warm: bool) -> None:
    memory = Memory()
    training = Training(memory, optimizer)
    if warm:
        training.step(4)
        training.model[0][0].weight.grad = torch.ones(WIDTH, WIDTH)
    before, generators = training.state(), (torch.get_rng_state(), random.getstate())
    tensors = [id(p) for p in training.model.parameters()]
    memory.cap = memory.used + (8 << 20)
    training.find(start=4)
    gc.collect()
    allocated = memory.used
    found = training.find(start=4)
    assert memory.failures > 0
    assert same(training.state(), before)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [id(p) for p in training.model.parameters()] == tensors
    grads = [p.grad is not None for p in training.model.parameters()]
    assert grads == [warm] + [False] * (len(grads) - 1)
    gc.collect()
    # Less than an activation of one sample.
    assert memory.used - allocated < 4 * WIDTH * WIDTH
    # No larger size trains: what was found is the cap's.
    training.step(found.size)
    training.step(found.size)
    with pytest.raises(torch.OutOfMemoryError):
        training.step(found.size + max(2, found.size // 8))


def test_measured_steps_need_three_trials_and_stay_within_the_budget() -> None:
    memory = Memory()
    training = Training(memory)
    training.step(64)
    training.optimizer.state.clear()
    budget = memory.used + (8 << 20)
    found = training.find(budget=budget, measure=memory.measure, start=4)
    assert found.peak_bytes is not None
    assert found.peak_bytes <= budget
    assert len(found.trials) <= 3
    # What is left would not hold a tenth more samples, of at least eight activations each.
    assert budget - found.peak_bytes < 8 * 4 * WIDTH * WIDTH * max(1, found.size // 10)


def test_nothing_fits_names_what_was_tried_and_restores() -> None:
    training = Training(Memory(1))
    before = training.state()
    with pytest.raises(pyactcomp.PyactcompError, match=r"not even a size of 1 .*8: out of memory, 4: out of memory"):
        training.find(start=8)
    assert same(training.state(), before)


def test_other_errors_are_raised_and_the_training_is_as_before() -> None:
    training = Training(Memory())
    before = training.state()

    def step(size: int) -> None:
        training.step(size)
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")

    others = (training.scheduler, training.scaler)
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        pyactcomp.find_batch_size(step, training.model, training.optimizer, others=others)
    assert same(training.state(), before)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"step": 3}, TypeError, "step must be a function"),
        ({"model": None}, TypeError, "model must be a torch.nn.Module"),
        ({"optimizer": 3}, TypeError, "optimizer must be"),
        ({"start": 0}, ValueError, "start must be a whole number from 1, got 0"),
        ({"largest": 2.5}, ValueError, "largest must be"),
        ({"budget": 0, "measure": print}, ValueError, "budget must be a number of bytes above 0"),
        ({"budget": "20 potatoes", "measure": print}, ValueError, "a text like .* got '20 potatoes'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    ran: list[int] = []
    arguments = {"step": ran.append, "model": nn.Linear(1, 1), "optimizer": None, **change}
    with pytest.raises(error, match=words):
        pyactcomp.find_batch_size(**arguments)
    assert ran == []


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (torch.cuda.OutOfMemoryError("HIP out of memory"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed"), False),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("the shop is out of memory cards"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_errors_that_say_memory_ran_out(error: Exception, out: bool) -> None:
    assert is_out_of_memory(error) is out
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is out


def test_nothing_of_a_failed_call_stays_alive() -> None:
    """Neither its variables, nor those of an error that was handled on the way, nor cycles."""
    held: list[weakref.ref[Any]] = []

    def inner(x: Tensor) -> None:
        y = x * 2
        held.append(weakref.ref(y))
        raise ValueError("first")

    def call() -> None:
        x = torch.ones(10)
        loop: list[Any] = [x]
        loop.append(loop)
        held.append(weakref.ref(x))
        try:
            inner(x)
        except ValueError:
            raise torch.OutOfMemoryError("CUDA out of memory.")  # noqa: B904

    outcome = attempt(call)
    assert outcome.failure == "OutOfMemoryError: CUDA out of memory."
    assert len(held) == 2
    assert [each() for each in held] == [None, None]


def test_decorator_runs_the_training_again_with_less() -> None:
    sizes = []
    held: list[weakref.ref[Any]] = []

    @pyactcomp.find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, model: nn.Module, *, rate: float) -> tuple[int, float]:
        assert all(each() is None for each in held)
        x = torch.ones(10)
        held.append(weakref.ref(x))
        sizes.append(batch_size)
        if batch_size > 70:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size, rate

    assert train(nn.Linear(1, 1), rate=0.5) == (64, 0.5)
    assert sizes == [100, 90, 81, 72, 64]


def test_decorator_takes_accelerates_arguments_and_ends() -> None:
    sizes = iter((3, 1, 0))

    @pyactcomp.find_executable_batch_size(starting_batch_size=7, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(pyactcomp.PyactcompError, match="with a batch of one"):
        train()
    with pytest.raises(TypeError, match="gets the batch size as its first argument"):
        train(5)
