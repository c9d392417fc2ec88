"""The leak check: twelve classic leaks are named by the line that makes them; clean programs raise no alarm."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import leaking_programs as programs
import pytest
import torch
from torch import nn

import pyactcomp
from pyactcomp.live.held import alive
from pyactcomp.live.holders import way_to
from pyactcomp.live.leaks import Leaks, grows
from pyactcomp.live.recorder import Recorder
from pyactcomp.torch_private import on_top


def checked(program: Callable[[Callable[[], None]], None]) -> Leaks:
    with pyactcomp.watch(steps=programs.STEPS) as w:
        program(w.step)
    return w.leaks()


def line_of(program: Any) -> int:
    """Return the number of the line that ends in ``# leaks``, of a function or of the class that it uses."""
    holders = {programs.graph_kept_by_a_metric: programs.Accuracy, programs.buffers_that_grow: programs.Memory}
    lines, first = inspect.getsourcelines(holders.get(program, program))
    return first + next(number for number, line in enumerate(lines) if line.endswith("# leaks\n"))


# Of each program: the way to a leaked tensor, and whether the advice is to let go of the graph.
HELD = {
    programs.list_of_losses: ("losses[1] in list_of_losses()", True),
    programs.graph_kept_by_a_metric: ("metric.total in graph_kept_by_a_metric()", True),
    programs.hook_that_stores_outputs: ("seen[1] in hook_that_stores_outputs()", True),
    programs.closures: ("loss, a variable of the closure closures.<locals>.report.<locals>.<lambda>", True),
    programs.tracebacks: ("kept by the traceback of ValueError: errors[1] in tracebacks()", True),
    programs.batches_kept: ("kept['inputs'][1] in batches_kept()", False),
    programs.retained_graph: ("the graph of running in retained_graph()", True),
    programs.cache_by_id: ("cache[-1][1] in cache_by_id()", False),
    programs.optimizers_made_anew: ("schedules[1].optimizer.state", False),
    programs.hidden_state_not_detached: ("the graph of hidden in hidden_state_not_detached()", True),
    programs.running_average: ("average in running_average()", True),
    programs.buffers_that_grow: ("model._buffers['seen'] in buffers_that_grow()", False),
}


@pytest.mark.parametrize("program", programs.LEAKING, ids=lambda program: program.__name__)
def test_leak_is_named_by_its_line(program: Callable[[Callable[[], None]], None]) -> None:
    with pytest.warns(UserWarning, match="grow from step to step"):
        leaks = checked(program)
    number = line_of(program)
    named = [leak for leak in leaks if f"leaking_programs.py:{number} in" in leak.line]
    assert len(named) == 1, f"line {number} is not among\n{leaks}"
    (leak,) = named
    held, graph = HELD[program]
    assert held in leak.holder
    assert ("x.detach()" in leak.advice) == graph
    assert leak.last > leak.first
    # No line that is innocent: another one made a tensor that the same graph holds.
    assert {other.holder for other in leaks} <= {leak.holder}


@pytest.mark.parametrize("program", programs.CLEAN, ids=lambda program: program.__name__)
def test_clean_program_raises_no_alarm(program: Callable[[Callable[[], None]], None]) -> None:
    leaks = checked(program)
    assert leaks == ()
    assert str(leaks) == "nothing grows from step to step"


def test_leak_tells_what_it_holds() -> None:
    kept = []

    def program(step: Callable[[], None]) -> None:
        weight = torch.randn(256, 1024, requires_grad=True)
        for _ in range(programs.STEPS):
            kept.append(weight.exp().sum())
            step()

    with pytest.warns(UserWarning, match="kept"):
        (leak,) = checked(program)
    assert (leak.shape, leak.dtype, leak.device, leak.grows) == ((), "float32", "cpu", "tensors")
    # Tensors that two more steps have passed since.
    assert (leak.first, leak.last) == (1, programs.STEPS - 2)
    # Each loss holds an exponential of a MiB.
    assert leak.nbytes == programs.STEPS * (2**20 + 4)
    kept.clear()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4], True),
        ([0, 1, 1, 2, 2, 3, 3], True),
        ([5, 5, 5, 5, 5, 5], False),
        ([0, 3, 3, 3, 3, 3], False),  # filled once
        ([0, 1, 2, 3, 3, 3, 3], False),  # filled, and stays
        ([0, 0, 0, 0, 1, 2], False),  # begins late
        ([4, 7, 5, 8, 9, 10], False),  # comes and goes
    ],
)
def test_growth_is_in_each_third(values: list[int], expected: bool) -> None:
    assert grows(values) == expected


class Target:
    pass


class Owner:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> None: ...


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def generator_of(value: Target) -> Any:
    yield
    yield value


def started(value: Target) -> Any:
    generator = generator_of(value)
    next(generator)
    return generator


def with_default(value: Target) -> Any:
    def function(default: Target = value) -> Target:
        return default

    return function


@pytest.mark.parametrize(
    ("make", "get", "way"),
    [
        (lambda t: Owner({"a": [(1, t)]}), lambda root: root.value["a"][0][1], "root.value['a'][0][1] in test_ways()"),
        (Slots, lambda root: root.value, "root.value in test_ways()"),
        (lambda t: Owner(t).method, lambda root: root.__self__.value, "root.value in test_ways()"),
        (lambda t: deque([0, t]), lambda root: root[1], "root[1] in test_ways()"),
        (lambda t: {1: {"b" * 50: t}}, lambda root: root[1]["b" * 50], "root[1][...] in test_ways()"),
        (started, lambda root: root.gi_frame.f_locals["value"], "value in generator_of()"),
        (with_default, lambda root: root.__defaults__[0], "[0] of with_default.<locals>.function()"),
    ],
)
def test_ways(make: Callable[[Target], Any], get: Callable[[Any], Target], way: str) -> None:
    root = make(Target())
    found = way_to(get(root))
    assert found.startswith(way)
    del root


def test_ways_from_modules_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "kept", [Target()], raising=False)
    found = way_to(module.kept[0])  # type: ignore[attr-defined]
    assert found == f"kept[0] in the module {__name__}"

    class Shares:
        shared = Target()

    found = way_to(Shares.shared)
    assert found.startswith("Shares.shared in test_ways_from_modules_and_classes()")


def test_way_holds_nothing_after() -> None:
    tensor = torch.zeros(3)
    box = [tensor]
    reference = weakref.ref(tensor)
    gc.collect()
    gc.disable()
    try:
        found = way_to(box[0])
        assert found.startswith("tensor in test_way_holds_nothing_after()")
        del tensor
        box.clear()
        # Neither a copy of this function's variables nor a frame in a cycle holds the tensor.
        assert reference() is None
    finally:
        gc.enable()


def test_recorder_names_the_programs_line() -> None:
    recorder = Recorder()
    recorder.start()
    try:
        made = torch.zeros(3) + 1
        halves = made.chunk(3)
        layer = nn.Linear(3, 3)(made)
        added = made.add_(1)
        line = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    finally:
        recorder.stop()
    after = torch.zeros(3)
    lines = recorder.lines
    assert [lines[each].number for each in (made, *halves, layer)] == [line - 4, *[line - 3] * 3, line - 2]
    assert added is made
    assert lines[made].function == "test_recorder_names_the_programs_line"
    assert lines[made].file == __file__
    assert after not in lines
    assert not on_top(recorder)
    # Tensors are not held.
    reference = weakref.ref(made)
    del made, added, halves, layer
    assert reference() is None


def test_recorder_leaves_gradients_alone() -> None:
    recorder = Recorder()
    x = torch.ones(3, requires_grad=True)
    recorder.start()
    try:
        x.square().sum().backward()
        gradient = x.grad
    finally:
        recorder.stop()
    assert gradient not in recorder.lines
    assert gradient is not None
    assert gradient.tolist() == [2, 2, 2]


def test_recorder_below_a_mode_of_the_program_stays_idle() -> None:
    recorder = Recorder()
    recorder.start()
    mode = torch.device("cpu")
    with mode:
        recorder.stop()
        made = torch.zeros(3)
        assert made not in recorder.lines
    assert on_top(recorder)
    recorder.stop()
    assert not on_top(recorder)


def test_compressed_model_packs_the_same_under_a_check() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    pyactcomp.compress(model, min_bytes=0)
    x = torch.randn(32, 64)

    def step() -> tuple[int, list[torch.Tensor]]:
        model.zero_grad()
        out = model(x).sum()
        packed = pyactcomp.memory(model).packed
        out.backward()
        return packed, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = step()
    with pyactcomp.watch(model, steps=8) as w:
        found = step()
        w.step()
    assert found[0] == expected[0] > 0
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_check_runs_a_compiled_function() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).relu()

    compiled = torch.compile(function, backend="aot_eager")
    x = torch.randn(8)
    expected = compiled(x)
    with pyactcomp.watch(steps=8) as w:
        for _ in range(8):
            assert torch.equal(compiled(x), expected)
            w.step()
    assert w.leaks() == ()
    assert torch.equal(compiled(x), expected)


def test_alive_skips_objects_with_a_false_class() -> None:
    class Pretends:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("asked for its class")

    pretends = Pretends()
    found = alive(torch.Tensor)
    assert all(type(each) is not Pretends for each in found)
    del pretends
