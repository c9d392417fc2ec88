"""Bad input: an error that says what was got and what to do, and nothing left installed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp import HookConflictError, PyactcompError
from pyactcomp.errors import ImplementationUnavailableError
from pyactcomp.torch_private import saved_tensor_hooks_enabled, top_saved_tensor_hooks

CAUGHT = (TypeError, ValueError, PyactcompError)

OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bits": 8}, TypeError, "unexpected keyword argument 'bits'"),
    ({"mod": "int8"}, TypeError, "unexpected keyword argument 'mod'"),
    ({"budget": "20GiB"}, TypeError, r"got budget='20GiB'.*compress\(.*plan\(model, batch, budget='20GiB'\)\)"),
    ({"budget": 5, "mode": "lossless"}, TypeError, r"takes no budget, got budget=5: .*plan\(model, batch, budget=5\)"),
    ({"mode": "fp8"}, ValueError, r"mode must be one of \('int8', 'lossless'\), got 'fp8'"),
    ({"group_size": 100}, ValueError, r"group_size must be one of \(64, 128, 256\), got 100"),
    ({"rounding": "floor"}, ValueError, "rounding must be one of .*'nearest', 'stochastic'.*got 'floor'"),
    ({"impl": "gpu"}, ValueError, "impl must be one of .*got 'gpu'"),
    ({"seed": -1}, ValueError, "seed must be at least 0 .*got -1"),
    ({"seed": "7"}, TypeError, "seed must be an integer, got '7'"),
    ({"min_bytes": "1MiB"}, TypeError, "min_bytes must be an integer, got '1MiB'"),
    ({"min_bytes": -5}, ValueError, "min_bytes must be at least 0 .*got -5"),
    ({"skip": "0"}, TypeError, r"skip must be a sequence .*write skip=\['0'\]"),
    ({"skip": [3]}, TypeError, "skip takes module names .*got 3"),
    ({"skip": ["head"]}, ValueError, "skip names no module of this model: 'head'.*named_modules"),
    ({"skip": [nn.Conv2d]}, ValueError, "skip names a type of which the model has no module: Conv2d"),
    ({"skip": ["0", nn.Conv2d]}, ValueError, "Conv2d"),
    ({"on_conflict": "warn"}, ValueError, "on_conflict must be one of .*got 'warn'"),
    ({"keep_weight_copies": 2}, ValueError, "keep_weight_copies must be one of .*got 2"),
]


@pytest.fixture(autouse=True)
def no_hooks_of_an_earlier_test() -> Iterator[None]:
    """Take away what a failed test left active, so that the tests after it speak for themselves."""
    yield
    while top_saved_tensor_hooks() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def hook_counts(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]


def assert_nothing_installed(model: nn.Module | None = None) -> None:
    assert top_saved_tensor_hooks() is None
    assert saved_tensor_hooks_enabled()
    if model is not None:
        assert set(hook_counts(model)) == {(0, 0)}
        assert all(not m._forward_hooks_always_called for m in model.modules())


def assert_steps_exactly_like_a_plain_model(model: nn.Module) -> None:
    """A step of the model, compressed or not, gives the plain model's output, and gradients close to its."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
            hooks.clear()
    x = torch.randn(2048, 64)
    results = []
    for candidate in (plain, model):
        output = candidate(x)
        parameters = list(candidate.parameters())
        results.append((output.detach(), torch.autograd.grad(output.square().mean(), parameters)))
    assert torch.equal(results[0][0], results[1][0])
    for exact, got in zip(results[0][1], results[1][1], strict=True):
        # Linear layers save their inputs in 8 bits.
        assert float((got - exact).norm()) <= GRADIENT_BOUND * float(exact.norm())


# Options.


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=lambda value: str(value)[:30])
def test_compress_refuses_wrong_options_and_installs_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = perceptron()
    with pytest.raises(error, match=message):
        pyactcomp.compress(model, **options)
    assert_nothing_installed(model)
    # The refused attempt does not count as a compression.
    pyactcomp.compress(model)
    pyactcomp.decompress(model)
    assert_nothing_installed(model)


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=lambda value: str(value)[:30])
def test_compressed_refuses_wrong_options_and_installs_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = perceptron()
    with pytest.raises(error, match=message), pyactcomp.compressed(model, **options):
        pytest.fail("the block must not be entered")
    assert_nothing_installed(model)


def test_skip_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call compressed\(model, skip="):
        pyactcomp.compressed(skip=[nn.Linear])


@pytest.mark.parametrize("model", [None, 3, "model", torch.zeros(3), [nn.Linear(1, 1)]], ids=repr)
def test_what_is_no_module_is_refused(model: Any) -> None:
    got = type(model).__name__
    for call in (pyactcomp.compress, pyactcomp.decompress, pyactcomp.report):
        with pytest.raises(TypeError, match=rf"expect.* a torch\.nn\.Module.*, got {got}"):
            call(model)
    if model is not None:
        with pytest.raises(TypeError, match=rf"compressed expects a torch\.nn\.Module or nothing, got {got}"):
            pyactcomp.compressed(model)


# Implementations.


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can be used here")
@pytest.mark.parametrize("call", [pyactcomp.compress, pyactcomp.compressed], ids=["compress", "compressed"])
def test_cuda_where_there_is_none_is_refused(call: Callable[..., Any]) -> None:
    model = perceptron()
    with pytest.raises(ImplementationUnavailableError) as caught:
        call(model, impl="cuda")
    message = str(caught.value)
    assert "impl='cuda' cannot be used for cpu: " in message
    assert len(message.split(": ", 1)[1]) > 10
    assert_nothing_installed(model)


@pytest.mark.gpu
def test_cpu_for_a_model_on_cuda_is_refused() -> None:
    model = perceptron().cuda()
    with pytest.raises(ImplementationUnavailableError, match="impl='cpu' cannot be used for cuda"):
        pyactcomp.compress(model, impl="cpu")
    assert_nothing_installed(model)


# Twice.


def test_compressing_twice_is_refused() -> None:
    model = pyactcomp.compress(perceptron())
    before = hook_counts(model)
    with pytest.raises(PyactcompError, match=r"compressed already; call pyactcomp\.decompress first"):
        pyactcomp.compress(model)
    assert hook_counts(model) == before
    assert_steps_exactly_like_a_plain_model(model)
    pyactcomp.decompress(model)
    assert_nothing_installed(model)


def test_a_root_around_a_compressed_module_is_refused() -> None:
    model = nn.Sequential(perceptron(), nn.ReLU())
    pyactcomp.compress(model[0])
    before = hook_counts(model)
    with pytest.raises(PyactcompError, match=r"a module in it, is compressed already"):
        pyactcomp.compress(model)
    assert hook_counts(model) == before
    pyactcomp.decompress(model[0])
    assert_nothing_installed(model)
    pyactcomp.compress(model)


def test_a_module_of_a_compressed_root_is_refused() -> None:
    model = pyactcomp.compress(nn.Sequential(perceptron(), nn.ReLU()))
    before = hook_counts(model)
    for module in (model[0], model[0][0]):
        with pytest.raises(PyactcompError, match="part of a model that is compressed already"):
            pyactcomp.compress(module)
    assert hook_counts(model) == before
    pyactcomp.decompress(model)
    pyactcomp.compress(model[0])


def test_a_model_that_shares_a_module_with_a_compressed_one_is_refused() -> None:
    shared, x = perceptron(), torch.randn(64, 64)
    first, second = nn.Sequential(nn.Linear(64, 64), shared), nn.Sequential(shared, nn.ReLU())
    exact = torch.autograd.grad(first(x).sin().sum(), list(first.parameters()))
    pyactcomp.compress(first, mode="lossless", min_bytes=0)
    refused = r"module '0' \(Sequential\) of this Sequential .* holds both models, or call pyactcomp\.decompress"
    with pytest.raises(PyactcompError, match=refused):
        pyactcomp.compress(second, min_bytes=0)
    assert_nothing_installed(second[1])
    got = torch.autograd.grad(first(x).sin().sum(), list(first.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))
    both = nn.ModuleList([pyactcomp.decompress(first), second])
    pyactcomp.decompress(pyactcomp.compress(both))
    pyactcomp.compress(second)
    pyactcomp.decompress(second)


def test_a_module_of_a_deleted_compressed_model_is_compressed() -> None:
    shared = perceptron()
    model = nn.Sequential(shared, nn.ReLU())
    model.__dict__["cycle"] = model
    pyactcomp.compress(model)
    del model
    pyactcomp.decompress(pyactcomp.compress(shared))
    assert_nothing_installed(shared)


def test_a_copy_of_a_compressed_model_is_compressed_too() -> None:
    original = pyactcomp.compress(perceptron())
    model = copy.deepcopy(original)
    with pytest.raises(PyactcompError, match="compressed already"):
        pyactcomp.compress(model)
    pyactcomp.decompress(original)
    assert_nothing_installed(original)
    assert_steps_exactly_like_a_plain_model(model)
    pyactcomp.decompress(model)
    assert_nothing_installed(model)


def test_modules_of_other_models_may_be_compressed_side_by_side() -> None:
    shared = nn.Linear(64, 64)
    first = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64)))
    second = pyactcomp.compress(nn.Sequential(shared))
    assert_steps_exactly_like_a_plain_model(first)
    assert_steps_exactly_like_a_plain_model(second)


def test_a_compressed_model_that_is_gone_refuses_nothing() -> None:
    inner = perceptron()
    outer = pyactcomp.compress(nn.Sequential(inner))
    del outer
    pyactcomp.compress(inner)
    assert hook_counts(inner)[0] == (1, 1)
    assert_steps_exactly_like_a_plain_model(inner)
    pyactcomp.decompress(inner)
    assert_nothing_installed(inner)
    assert [type(module) for module in inner.modules()] == [type(module) for module in perceptron().modules()]


def test_a_module_of_a_copy_takes_the_options_it_is_compressed_with() -> None:
    """No list of compressed models has the copy, and the fused modules in it have the original's options."""
    model = copy.deepcopy(pyactcomp.compress(nn.Sequential(perceptron(), nn.ReLU())))
    inner = pyactcomp.compress(model[0], fuse=False)
    assert pyactcomp.report(inner).fused == ()
    assert type(inner[1]) is nn.GELU
    assert_steps_exactly_like_a_plain_model(model)
    pyactcomp.decompress(model)
    assert_nothing_installed(model)


def test_decompressing_what_is_not_compressed_is_refused() -> None:
    model = perceptron()
    with pytest.raises(PyactcompError, match=r"Sequential is not compressed; call pyactcomp\.compress"):
        pyactcomp.decompress(model)
    pyactcomp.compress(model)
    with pytest.raises(PyactcompError, match="Linear is not compressed"):
        pyactcomp.decompress(model[0])
    pyactcomp.decompress(model)
    with pytest.raises(PyactcompError, match="not compressed"):
        pyactcomp.decompress(model)


# A forward that raises.


class Raises(nn.Module):
    """A model whose forward raises, in the root or in a module of it, once it is told to."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.layers = perceptron()
        self.inner = inner
        self.error: BaseException | None = None
        if inner:
            self.layers[1].register_forward_pre_hook(lambda *_: self.throw())

    def throw(self) -> None:
        if self.error is not None:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        if not self.inner:
            self.throw()
        return result


@pytest.mark.parametrize("inner", [False, True], ids=["root", "inner"])
@pytest.mark.parametrize("skip", [(), ("layers",)], ids=["nothing-skipped", "skipping"])
@pytest.mark.parametrize("recorded", [False, True], ids=["first-step", "later-step"])
def test_a_forward_that_raises_leaves_no_hook_active(inner: bool, skip: tuple[str, ...], recorded: bool) -> None:
    error = ArithmeticError("of the test")
    model = Raises(inner)
    plain = copy.deepcopy(hook_counts(model))
    pyactcomp.compress(model, skip=skip, min_bytes=0)
    # Requires grad and is no leaf: packed by the first layer, also where the second raises.
    x = torch.randn(64, 64, requires_grad=True) * 1
    if recorded:
        model(x).sum().backward()
    installed = hook_counts(model)
    model.error = error
    for _ in range(2):
        with pytest.raises(type(error)):
            model(x)
        assert top_saved_tensor_hooks() is None
        # What recorded the first step has taken its hooks away as well.
        assert hook_counts(model) == installed
    # What autograd saves of another computation is saved as it is.
    y = torch.randn(64, 64, requires_grad=True).exp()
    assert torch.equal(y.grad_fn._saved_result, y)  # type: ignore[union-attr]

    model.error = None
    assert_steps_exactly_like_a_plain_model(model)
    report = pyactcomp.report(model)
    assert report.saved_bytes > 0
    assert (report.stored_bytes < report.unique_bytes) == (skip == ())
    pyactcomp.decompress(model)
    assert hook_counts(model) == plain
    assert top_saved_tensor_hooks() is None


@pytest.mark.parametrize("inner", [False, True], ids=["root", "inner"])
@pytest.mark.parametrize("recorded", [False, True], ids=["first-step", "later-step"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=["interrupt", "exit"])
def test_an_interrupted_forward_leaves_no_hook_active(inner: bool, recorded: bool, error: BaseException) -> None:
    """Torch runs a module's last hooks after an exception, but not after KeyboardInterrupt."""
    model, other = Raises(inner), perceptron()
    plain = copy.deepcopy(hook_counts(model))
    pyactcomp.compress(model, skip=("layers",), min_bytes=0)
    pyactcomp.compress(other, min_bytes=0)
    x = torch.randn(64, 64)
    if recorded:
        model(x).sum().backward()
    installed = hook_counts(model)
    for _ in range(2):
        model.error = error
        with pytest.raises(type(error)):
            model(x)
        assert top_saved_tensor_hooks() is None
    other(x).sum().backward()
    assert top_saved_tensor_hooks() is None
    assert hook_counts(model) == installed

    model.error = None
    assert_steps_exactly_like_a_plain_model(model)
    pyactcomp.decompress(model)
    assert hook_counts(model) == plain


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("by", ["the next", "decompress"])
def test_a_forward_interrupted_in_its_hooks_is_cleared_away(by: str) -> None:
    model, other = perceptron(), pyactcomp.compress(perceptron(), min_bytes=0)
    plain = copy.deepcopy(hook_counts(model))
    pyactcomp.compress(model, min_bytes=0)
    x = torch.randn(64, 64)
    hook = model.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    hook.remove()
    assert top_saved_tensor_hooks() is not None
    if by == "decompress":
        pyactcomp.decompress(model)
        assert hook_counts(model) == plain
    else:
        other(x).sum().backward()
    assert top_saved_tensor_hooks() is None


@pytest.mark.parametrize("place", ["forward", "hook"])
def test_decompress_inside_of_a_forward_leaves_no_hook_active(place: str) -> None:
    model, x = Raises(False), torch.randn(64, 64)
    plain = copy.deepcopy(hook_counts(model))
    pyactcomp.compress(model, min_bytes=0)
    where = model if place == "hook" else model.layers[0]
    hook = where.register_forward_hook(lambda *_: pyactcomp.decompress(model) and None)
    model(x).sum().backward()
    assert top_saved_tensor_hooks() is None
    hook.remove()
    assert hook_counts(model) == plain


def test_no_hook_stays_active_in_a_model_whose_last_hooks_were_cleared() -> None:
    model, x = pyactcomp.compress(perceptron(), min_bytes=0), torch.randn(64, 64)
    model._forward_hooks.clear()
    with pytest.warns(UserWarning, match="its forward hooks were cleared"):
        model(x).sum().backward()
    assert top_saved_tensor_hooks() is None
    pyactcomp.decompress(model)


class LeavesHooksActive(nn.Module):
    """Opens hooks in its forward, for the caller to close."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.seen = perceptron(), 0

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.count, lambda tensor: tensor)
        self.hooks.__enter__()
        return y


def test_hooks_that_a_forward_leaves_active_stay_so() -> None:
    model = pyactcomp.compress(LeavesHooksActive(), min_bytes=0)
    y = model(torch.randn(64, 64))
    assert model.seen == 0
    loss = (y.exp() * y).sum()
    assert model.seen == 3
    model.hooks.__exit__()  # type: ignore[no-untyped-call]
    assert top_saved_tensor_hooks() is None
    loss.backward()
    assert model.seen == 3


@pytest.mark.parametrize("error", [ArithmeticError("of the test"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_block_that_raises_leaves_no_hook_active(error: BaseException) -> None:
    model = perceptron()
    context = pyactcomp.compressed(model, skip=[nn.GELU], min_bytes=0)

    @context
    def throw() -> None:
        model(torch.randn(64, 64))
        raise error

    with pytest.raises(type(error)):
        throw()
    assert_nothing_installed(model)
    with context:
        loss = model(torch.randn(64, 64)).sum()
    loss.backward()
    assert_nothing_installed(model)


class Tolerant(nn.Module):
    """A model that goes on where a module of it raised."""

    def __init__(self) -> None:
        super().__init__()
        self.fragile = Raises(inner=False)
        self.last = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ArithmeticError):
            self.fragile(x)
        result: Tensor = self.last(x)
        return result


def test_what_follows_a_skipped_module_that_raised_is_compressed() -> None:
    model = Tolerant()
    pyactcomp.compress(model, skip=["fragile"], min_bytes=0)
    model.fragile.error = ArithmeticError("of the test")
    # Requires grad and is no leaf: the first layer that is not skipped packs it.
    model(torch.randn(64, 64, requires_grad=True) * 1).sum().backward()
    compressed = [t.module for t in pyactcomp.report(model).tensors if t.kept is None]
    assert compressed == ["last.0", "last.1"]


def test_a_backward_that_raises_leaves_no_hook_active() -> None:
    model = pyactcomp.compress(perceptron(), min_bytes=0)
    x = torch.randn(64, 64)
    output = model(x)

    def throw(_: Tensor) -> None:
        raise ArithmeticError("of the test")

    handle = model[2].weight.register_hook(throw)
    with pytest.raises(ArithmeticError, match="of the test"):
        output.sum().backward()
    handle.remove()
    model.zero_grad()
    assert top_saved_tensor_hooks() is None
    assert_steps_exactly_like_a_plain_model(model)


def test_an_input_the_model_cannot_take_leaves_no_hook_active() -> None:
    model = pyactcomp.compress(perceptron(), min_bytes=0)
    for args in ((torch.randn(8, 63),), (), ("text",)):
        with pytest.raises((RuntimeError, TypeError)):
            model(*args)
        assert top_saved_tensor_hooks() is None
    assert_steps_exactly_like_a_plain_model(model)


# Other hooks.


def identity(x: Tensor) -> Tensor:
    return x


def test_other_hooks_are_named_and_left_active() -> None:
    model = pyactcomp.compress(perceptron(), min_bytes=0)
    with torch.autograd.graph.saved_tensors_hooks(identity, identity):
        with pytest.raises(HookConflictError, match=r"identity.*use one of them"):
            model(torch.randn(64, 64))
        with pytest.raises(HookConflictError), pyactcomp.compressed(model):
            pytest.fail("the block must not be entered")
        assert top_saved_tensor_hooks() == (identity, identity)
    assert_steps_exactly_like_a_plain_model(model)
    assert top_saved_tensor_hooks() is None


def test_a_refused_context_leaves_the_model_as_it_was() -> None:
    model = perceptron()
    with torch.autograd.graph.saved_tensors_hooks(identity, identity):
        context = pyactcomp.compressed(model, skip=[nn.GELU])
        with pytest.raises(HookConflictError), context:
            pytest.fail("the block must not be entered")
    assert_nothing_installed(model)
    with context:
        assert top_saved_tensor_hooks() is not None
    assert_nothing_installed(model)


# What is unusual and fine.


def test_a_module_without_parameters_is_fine() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.GELU(), nn.Softmax(dim=1)), min_bytes=0)
    x = torch.randn(64, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    plain = x.detach().requires_grad_()
    (exact,) = torch.autograd.grad(nn.functional.gelu(plain).softmax(dim=1).square().sum(), plain)
    # GELU and softmax restore a matrix from 8 bits.
    assert 0 < float((gradient - exact).norm()) <= GRADIENT_BOUND * float(exact.norm())
    assert pyactcomp.report(model).stored_bytes > 0
    assert str(pyactcomp.decompress(model)) == str(nn.Sequential(nn.GELU(), nn.Softmax(dim=1)))
    assert_nothing_installed(model)


def test_a_module_without_parameters_and_an_implementation_that_cannot_run_never_falls_back() -> None:
    # compress cannot know the device here. The forward must not compress with anything else.
    if torch.cuda.is_available():
        pytest.skip("CUDA can be used here")
    model = pyactcomp.compress(nn.Sequential(nn.Mish(), nn.Mish()), min_bytes=0, impl="cuda")
    x = torch.randn(64, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x * 1).sum(), x)
    plain = x.detach().requires_grad_()
    (exact,) = torch.autograd.grad(nn.functional.mish(nn.functional.mish(plain)).sum(), plain)
    assert torch.equal(gradient, exact)
    (kept,) = (line for line in pyactcomp.report(model).kept if line.unique_bytes)
    assert "impl='cuda'" in kept.name
    assert (kept.tensors, kept.stored_bytes) == (2, 2 * 64 * 64 * 4)


def test_a_module_that_does_nothing_is_fine() -> None:
    model = pyactcomp.compress(nn.Identity())
    x = torch.randn(3)
    assert model(x) is x
    assert "nothing was recorded yet" in pyactcomp.report(model).note
    pyactcomp.decompress(model)
    assert_nothing_installed(model)


def test_an_empty_batch_is_fine() -> None:
    model = pyactcomp.compress(perceptron(), min_bytes=0)
    model(torch.randn(0, 64)).sum().backward()
    assert all(int(p.grad.count_nonzero()) == 0 for p in model.parameters())
    assert top_saved_tensor_hooks() is None


def test_errors_of_state_are_runtime_errors_with_one_base() -> None:
    assert issubclass(PyactcompError, RuntimeError)
    assert issubclass(HookConflictError, PyactcompError)
    assert issubclass(ImplementationUnavailableError, PyactcompError)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, r"got the class Linear: pass an object, Linear\(...\)"),
        (torch.jit.script(nn.Linear(2, 2)), "RecursiveScriptModule, and TorchScript runs no hooks of Python"),
        (3, "expects a torch.nn.Module, got int"),
    ],
)
def test_what_is_no_module_of_python_is_refused(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pyactcomp.compress(model)
