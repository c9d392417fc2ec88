"""The library tells which operator saves a tensor; where it is missing, pyactcomp says how to build it."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from observer_checks import leaf, library
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.cli import examine
from pyactcomp.engine.packing import Packing
from pyactcomp.readers.forms import AS_CODES, ITSELF, POSITIVE, PROBABILITY, Form, Reading
from pyactcomp.readers.observer import Observer
from pyactcomp.torch_private import extensions


@pytest.fixture
def watching() -> Observer:
    """Return the library, which the engine asks as well."""
    return library()


@contextmanager
def saves(of: Observer) -> Iterator[list[tuple[Tensor, Reading | None]]]:
    """Collect what is saved in a block, with what an observer says of it."""
    seen: list[tuple[Tensor, Reading | None]] = []

    def pack(tensor: Tensor) -> Tensor:
        of.note_save()
        seen.append((tensor, of.facts(tensor)[0]))
        return tensor

    of.start()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield seen
    finally:
        of.stop()


def named(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the operator and the operand of all that a call saves, as the library names them."""
    with saves(library()) as seen:
        call()
    return [(reading.operator, reading.operand) for _, reading in seen if reading is not None]


def distance(got: list[Tensor], exact: list[Tensor]) -> float:
    moved = sum(float((a - b).double().square().sum()) for a, b in zip(got, exact, strict=True))
    return float((moved / sum(float(b.double().square().sum()) for b in exact)) ** 0.5)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


A, B, C = leaf(8, 8), leaf(8, 8), leaf(8, 8)
NAMED: dict[str, tuple[Callable[[], object], list[tuple[str, str]]]] = {
    "addcmul": (lambda: torch.addcmul(A, B, C), [("aten::addcmul", "tensor2"), ("aten::addcmul", "tensor1")]),
    "addmm": (lambda: F.linear(A, B, C[0]), [("aten::addmm", "mat1"), ("aten::addmm", "mat2")]),
    "einsum": (lambda: torch.einsum("ij,kj->ik", A, B), [("aten::bmm", "mat2"), ("aten::bmm", "self")]),
    "tanh": (lambda: A.tanh(), [("aten::tanh", "result")]),
    "gelu": (lambda: F.gelu(A), [("aten::gelu", "self")]),
    "cross_entropy": (
        lambda: F.cross_entropy(A, torch.arange(8)),
        [("aten::_log_softmax", "result"), ("aten::nll_loss_forward", "self")],
    ),
    "amax": (lambda: A.amax(0), [("aten::amax", "any operand")] * 2),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_library_names_the_operator_and_the_operand(name: str) -> None:
    call, expected = NAMED[name]
    found = named(call)
    assert set(expected) <= set(found)
    assert {operator for operator, _ in found} == {operator for operator, _ in expected}


def test_it_names_them_under_a_profiler_and_under_autocast() -> None:
    plain = named(lambda: F.linear(A, B, C[0]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert named(lambda: F.linear(A, B, C[0])) == plain
    with torch.autocast("cpu", torch.bfloat16):
        assert set(named(lambda: F.linear(A, B, C[0]))) == set(plain)


def test_in_place_operators_read_their_result_or_what_was_before() -> None:
    with saves(library()) as seen:
        torch.relu_(A * 1)
        torch.sigmoid_(A * 1)
        (A * 1).mul_(B)
        (A * 1).div_(B)
        (A * 1).addcdiv_(B, C)
    found = [(r.operator, r.form) for _, r in seen if r is not None]
    assert found[:2] == [("aten::relu", POSITIVE), ("aten::sigmoid", PROBABILITY)]
    # Both operands of the product, the divisor and the dividend, which a copy of it stands for, and addcdiv's.
    assert found[2:4] == [("aten::mul", AS_CODES)] * 2
    assert {form for operator, form in found if operator == "aten::div"} == {ITSELF}
    assert {form for operator, form in found if operator == "aten::addcdiv"} == {ITSELF}


class WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = WithContext.backward


class RunsOperators(torch.autograd.Function):
    """Its forward records a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = inner.amax(1, keepdim=True) + y.detach()
        ctx.save_for_backward(inner, out)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        inner, out = ctx.saved_tensors
        return torch.autograd.grad(out, inner, grad)[0], None


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        (x * 2).exp()
        raise ZeroDivisionError

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize("function", [WithContext, WithSetup], ids=lambda f: f.__name__)
def test_a_function_written_in_python_is_named_by_its_class(function: type[torch.autograd.Function]) -> None:
    assert named(lambda: function.apply(A, B)) == [(f"{__name__}.{function.__name__}", "saved")] * 2


@pytest.mark.parametrize("function", [WithContext, WithSetup, RunsOperators], ids=lambda f: f.__name__)
def test_an_unknown_function_keeps_what_it_saves(function: type[torch.autograd.Function], watching: Observer) -> None:
    exact = torch.autograd.grad(function.apply(A, B).square().sum(), A)
    with pyactcomp.compressed(min_bytes=0) as c:
        out = function.apply(A * 1, B * 1)
    assert torch.equal(torch.autograd.grad(out.square().sum(), A)[0], exact[0])
    unknown = [tensor for tensor in pyactcomp.report(c).tensors if tensor.unknown_reader is not None]
    assert [tensor.stored_bytes for tensor in unknown] == [A.nbytes] * len(unknown) != []


def test_operators_inside_a_function_are_named_by_themselves() -> None:
    found = [operator for operator, _ in named(lambda: RunsOperators.apply(A, B))]
    name = f"{__name__}.RunsOperators"
    assert found == ["aten::amax", "aten::amax", name, name]


def test_an_exception_leaves_no_call_behind(watching: Observer) -> None:
    with saves(watching) as seen:
        for failing in (lambda: torch.mm(A, leaf(3, 3)), lambda: Fails.apply(A), lambda: torch.amax(A, 7)):
            with pytest.raises((RuntimeError, ZeroDivisionError, IndexError)):
                failing()
            assert watching.facts(A)[0] is None
        seen.clear()
        F.gelu(A)
    ((tensor, reading),) = seen
    assert tensor is A
    assert reading is not None
    assert (reading.operator, reading.operand) == ("aten::gelu", "self")
    assert watching.facts(A)[0] is None


def test_starts_and_stops_are_counted(watching: Observer) -> None:
    def counted() -> int:
        before = watching.progress()[0]
        torch.relu(A)
        return watching.progress()[0] - before

    assert counted() == 0
    watching.start()
    watching.start()
    assert counted() > 0
    watching.stop()
    assert counted() > 0
    watching.stop()
    assert counted() == 0
    watching.stop()  # one too many does nothing
    watching.start()
    assert counted() > 0
    watching.stop()
    assert counted() == 0


def test_nothing_is_observed_after_a_forward_even_one_that_raises(watching: Observer) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError

    model = pyactcomp.compress(nn.Sequential(nn.Linear(8, 8), nn.GELU(), Broken()), min_bytes=0)
    with pytest.raises(ZeroDivisionError):
        model(A * 1)
    before = watching.progress()
    F.gelu(A).sum().backward()
    assert watching.progress() == before


def test_other_threads_are_not_observed(watching: Observer) -> None:
    found: list[object] = []
    watching.start()
    try:
        thread = threading.Thread(
            target=lambda: found.extend((torch.relu(A), watching.progress(), watching.facts(A)[0]))
        )
        thread.start()
        thread.join()
    finally:
        watching.stop()
    assert found[1:] == [(0, 0, 0), None]


def test_threads_with_a_model_each_do_not_disturb_each_other(watching: Observer) -> None:
    torch.manual_seed(0)
    makers = [
        lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.Softmax(-1)),
        lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Sigmoid()),
    ]
    models = [pyactcomp.compress(make(), min_bytes=0, fuse=False) for make in makers]
    x = torch.randn(128, 64)
    alone = [gradients(model, x) for model in models]
    together: list[list[list[Tensor]]] = [[] for _ in models]
    threads = [
        threading.Thread(target=lambda i=i: together[i].extend(gradients(models[i], x) for _ in range(10)))
        for i in range(len(models))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, found in zip(alone, together, strict=True):
        assert len(found) == 10
        assert all(torch.equal(a, b) for got in found for a, b in zip(got, expected, strict=True))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LogSoftmax(-1))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_a_checkpoints_second_run_is_like_the_first(use_reentrant: bool, watching: Observer) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(use_reentrant)
    model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(128, 64)
    assert 0 < distance(gradients(model, x), gradients(plain, x)) <= GRADIENT_BOUND
    assert watching.facts(x)[0] is None


def test_a_context_inside_a_compressed_model_and_around_it(watching: Observer) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(128, 64)
    exact = gradients(model, x)
    pyactcomp.compress(model, min_bytes=0, fuse=False)
    model.zero_grad()
    with pyactcomp.compressed(model, min_bytes=0) as c:
        loss = F.mish(model(x)).mul(1).square().mean()
        nothing = watching.facts(x)[0]
    loss.backward()
    assert nothing is None
    assert next(t.kept for t in pyactcomp.report(c).tensors if t.shape == (128, 64)) is None
    assert 0 < distance(gradients(model, x), exact) <= GRADIENT_BOUND
    before = watching.progress()
    torch.relu(x)
    assert watching.progress() == before


def test_decisions_are_counted_where_they_are_made_of_floats(watching: Observer) -> None:
    x = torch.rand(8)

    def decisions(call: Callable[[], object]) -> int:
        before = watching.progress()[1]
        call()
        return watching.progress()[1] - before

    watching.start()
    try:
        for call in (lambda: x.topk(2), lambda: x.argmax(), lambda: x > 0, lambda: x.sort(), lambda: x.round()):
            assert decisions(call) >= 1
        for call in (lambda: x * 2, lambda: F.gelu(x), lambda: x.sum(), lambda: x.softmax(0), lambda: x.view(2, 4)):
            assert decisions(call) == 0
        assert decisions(lambda: torch.linalg.vector_norm(x, -math.inf)) == 1
        assert decisions(lambda: torch.linalg.vector_norm(x)) == 0
        # An operator with a derivative takes the largest element for its own use.
        assert decisions(lambda: x.logsumexp(0)) == 0
    finally:
        watching.stop()


def test_integers_are_compared_without_a_decision() -> None:
    of = library()
    of.start()
    try:
        before = of.progress()[1]
        torch.arange(8).ge(3)
        torch.ones(8, dtype=torch.bool).nonzero()
        assert of.progress()[1] == before
    finally:
        of.stop()


def test_decisions_before_the_running_call_are_known_inside_it() -> None:
    of = library()
    inside: list[tuple[int, int, int]] = []

    class Decides(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            x.argmax()
            inside.append(of.progress())
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    of.start()
    try:
        A.argmax()
        before = of.progress()[1]
        Decides.apply(A)
    finally:
        of.stop()
    ((_, decisions, at_its_start),) = inside
    assert (decisions, at_its_start) == (before + 1, before)


# Contradictions, which backward finds.


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what amax reads be stored as a factor is."""
    right = Packing.form_for

    def wrong(packing: Packing, tensor: Tensor, reading: Reading, *facts: Any) -> Form:
        return AS_CODES if "amax" in reading.operator else right(packing, tensor, reading, *facts)

    monkeypatch.setattr(Packing, "form_for", wrong)


@pytest.mark.usefixtures("mistaken")
def test_a_node_that_needs_more_than_was_stored_says_so() -> None:
    x = leaf(64, 64)
    with pyactcomp.compressed(min_bytes=0):
        loss = (x * 1).amax(0).sum()
    with pytest.raises(
        pyactcomp.PyactcompError, match=r"AmaxBackward0 needs .*\(64, 64\).*codes.*skip=.*mode='lossless'"
    ):
        loss.backward()


@pytest.mark.usefixtures("mistaken")
def test_code_that_looks_at_what_another_node_saved_may_do_so() -> None:
    x = leaf(64, 64)
    seen: list[Tensor] = []
    with pyactcomp.compressed(min_bytes=0):
        y = F.gelu(x * 1)
        top = torch.logsumexp(y, 0)  # reads its operand as it is
        loss = top.sum()
    gelu, node = y.grad_fn, top.grad_fn
    assert gelu is not None
    assert node is not None
    seen.append(gelu._saved_self.detach())  # type: ignore[attr-defined]
    node.register_prehook(lambda grads: seen.append(gelu._saved_self.detach()))  # type: ignore[attr-defined]
    loss.backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_a_slice_that_was_written_to_is_read_under_another_nodes_name(watching: Observer) -> None:
    torch.manual_seed(0)
    x, w = leaf(64, 64), leaf(32, 64)

    def loss() -> Tensor:
        y = x * 1
        y[:32].mul_(w * 1)
        return y.square().sum()

    exact = torch.autograd.grad(loss(), (x, w))
    with pyactcomp.compressed(min_bytes=0):
        compressed = loss()
    assert 0 < distance(list(torch.autograd.grad(compressed, (x, w))), list(exact)) <= GRADIENT_BOUND


# A library for another torch.


def test_a_library_for_another_torch_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    module, _ = extensions.load("_observer")
    monkeypatch.setattr(module, "BUILT_FOR", "1.0.0")
    found, reason = extensions.load("_observer")
    assert found is None
    assert reason is not None
    assert "is built for torch 1.0.0, and this is" in reason
    assert "pyactcomp build-observer" in reason
    assert str(examine.examine()["observer"]).startswith(reason)


def test_a_library_that_is_not_built_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_folders", lambda name: [])
    monkeypatch.delitem(sys.modules, "pyactcomp._observer", raising=False)
    found, reason = extensions.load("_observer")
    assert found is None
    assert reason == (
        f"its observer of operators is not built for torch {torch.__version__}: run pyactcomp build-observer"
    )


def test_operators_called_inside_one_with_a_derivative_are_not_observed_but_for_a_profiler() -> None:
    built, x = library(), leaf(4, 8)
    x.roll(1, 0)

    def calls(operation: Callable[[], object]) -> int:
        built.start()
        try:
            operation()  # tells how many it calls
            before = built.progress()[0]
            operation()
            return built.progress()[0] - before
        finally:
            built.stop()

    assert calls(lambda: x.roll(1, 0)) == 1
    assert calls(lambda: F.linear(x, x)) > 1  # a composition: the operators inside save
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        inside = calls(lambda: x.roll(1, 0))
    assert inside == sum(event.count for event in profile.key_averages()) / 2 > 3
    with pytest.raises(RuntimeError, match="dims"):
        calls(lambda: x.roll((1, 1, 1), (0, 1)))
    assert calls(lambda: x * x) == 1
