"""Unpacking: any number of times, from any thread, with the layout of the original; and when hooks are active."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import pyactcomp
from pyactcomp import torch_private
from pyactcomp.codec.reference import error_bound
from pyactcomp.compress import paused
from pyactcomp.engine.rare import warn_of_differentiated_gradients


def activation(rows: int) -> Tensor:
    """Return what a hidden layer gets: a tensor that requires grad and is no leaf."""
    return torch.randn(rows, 64, requires_grad=True) * 1


class Probe(torch.autograd.Function):
    """Saves a tensor and hands what comes back to ``seen``."""

    @staticmethod
    def forward(ctx, anchor, x, seen):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.seen = seen
        return anchor * 1.0

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.seen.append(ctx.saved_tensors[0])
        return grad, None, None


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "channels_last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1, :].expand(-1, 8, -1),
    "sliced": lambda x: x[:, ::2, 1:],
    "small slice": lambda x: x[:, 0, :3],
    "offset": lambda x: x[3:],
    "scalar": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
    "overlapping": lambda x: x.flatten().as_strided((100, 16), (4, 1)),
    "one element a dimension": lambda x: x[:, 2:3, 4:5],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_dtype_and_values_come_back(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16, 64)
    x = x > 0 if dtype is torch.bool else x.to(dtype).requires_grad_() * 1
    y = LAYOUTS[layout](x)
    seen: list[Tensor] = []
    anchor = torch.zeros((), requires_grad=True)
    with pyactcomp.compressed(min_bytes=0) as c:
        loss = Probe.apply(anchor, y, seen)
    loss.backward()
    got = seen[0].detach()
    assert got.dtype == dtype
    assert got.shape == y.shape
    assert got.stride() == y.stride()
    assert got.device == y.device
    if dtype is torch.bool:
        assert torch.equal(got, y)
        return
    # The widest group in any of these layouts spans the whole tensor.
    x, y = x.detach(), y.detach()
    widest = float((x.max() - x.min()).double())
    largest = float(x.abs().max())
    out = torch.finfo(dtype).eps * largest / 2
    step = widest / 255 * (1 + 2**-7)
    assert float((got.double() - y.double()).abs().max() if y.numel() else 0.0) <= step / 2 + 2 * 2**-23 * largest + out
    assert pyactcomp.report(c).tensors[0].shape == tuple(y.shape)


def test_a_second_backward_gives_the_same_gradients() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), min_bytes=0)
    loss = model(torch.randn(32, 64)).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_double_backward_matches_within_the_format() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)

    def second_derivative() -> Tensor:
        (g,) = torch.autograd.grad((x * 2).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    exact = second_derivative()
    warn_of_differentiated_gradients.cache_clear()
    with pyactcomp.compressed(min_bytes=0), pytest.warns(UserWarning, match="create_graph=True reads tensors in codes"):
        got = second_derivative()
    with pyactcomp.compressed(min_bytes=0):
        second_derivative()  # once is enough
    # d2/dx2 = 4 * 6 (2x). The saved 2x is restored in the first backward and packed once more there, so two errors add
    # up; the second one's steps are larger by less than their own size / 255. Beside them float32 rounds a few times.
    rounded = 2**-21 * exact.abs().double()
    bound = 4 * 6 * 2 * (1 + 2 / 255) * error_bound((2 * x).detach().flatten()).view_as(x) + rounded
    assert bool(((got - exact).abs() <= bound).all())


@pytest.mark.parametrize("options", [{"mode": "lossless"}, {"skip": [nn.Linear, nn.Tanh]}], ids=["lossless", "skipped"])
def test_exact_forces_are_no_reason_to_warn(options: dict[str, Any]) -> None:
    warn_of_differentiated_gradients.cache_clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(32, 64, requires_grad=True)

    def gradients() -> list[Tensor]:
        (force,) = torch.autograd.grad(model(x * 1).sum(), x, create_graph=True)
        return list(torch.autograd.grad((force - 1).square().sum(), list(model.parameters())[:3]))

    exact = gradients()
    pyactcomp.compress(model, min_bytes=0, **options)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), exact, strict=True))


def test_backward_from_another_thread() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    x = torch.randn(32, 64, requires_grad=True)
    model(x * 1).sum().backward()
    expected = model.weight.grad.clone()
    model.zero_grad()
    loss = model(x * 1).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(model.weight.grad, expected)


def test_forwards_in_two_threads_keep_their_hooks_apart() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    plain = nn.Linear(64, 64)
    inside, done = threading.Event(), threading.Event()
    seen: list[object] = []

    def wait(*_: object) -> None:
        inside.set()
        done.wait(10)

    model.register_forward_hook(wait)
    thread = threading.Thread(target=lambda: model(torch.randn(8, 64)))
    thread.start()
    assert inside.wait(10)
    seen.append(torch_private.top_saved_tensor_hooks())
    plain(torch.randn(8, 64)).sum().backward()
    done.set()
    thread.join()
    assert seen == [None]


def test_gradients_see_infinities_and_nan() -> None:
    w = torch.ones(256, requires_grad=True)
    x = torch.randn(256)
    x[3], x[70], x[200] = float("inf"), -float("inf"), float("nan")
    leaf = x.clone().requires_grad_()
    with pyactcomp.compressed(min_bytes=0):
        loss = (w * (leaf * 1)).sum()
    loss.backward()
    assert torch.equal(w.grad.isinf(), x.isinf())
    assert torch.equal(w.grad.isnan(), x.isnan())
    finite = x.isfinite()
    # Flagged groups have 252 levels in place of 255.
    bound = error_bound(x) * 255 / 252 * 1.01
    assert bool(((w.grad - x).abs().double() <= bound)[finite].all())


def test_evaluation_no_grad_and_other_models_are_untouched() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64), nn.GELU()), min_bytes=0)
    other = nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    with torch.no_grad():
        model(x)
    assert pyactcomp.report(model).note
    model.eval()
    model(x).sum().backward()
    assert "model.train()" in pyactcomp.report(model).note
    model.train()
    model(x)
    other(x).sum().backward()
    assert len(pyactcomp.report(model).tensors) > 0
    assert torch_private.top_saved_tensor_hooks() is None


def test_a_forward_that_changes_its_mode_leaves_no_hook() -> None:
    class Sleepy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.eval()
            return x.sin()

    model = pyactcomp.compress(Sleepy(), min_bytes=0)
    model(torch.randn(8, requires_grad=True))
    assert torch_private.top_saved_tensor_hooks() is None


@pytest.mark.parametrize("where", ["forward", "earlier pre-hook", "later pre-hook", "forward hook"])
def test_an_exception_leaves_no_hook_behind(where: str) -> None:
    class Broken(nn.Module):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            self.maybe("forward")
            return nn.functional.silu(x)

        def maybe(self, here: str) -> None:
            if self.broken and here == where:
                raise ZeroDivisionError(here)

    model = pyactcomp.compress(Broken(), min_bytes=0)
    model.register_forward_pre_hook(lambda m, _: m.maybe("later pre-hook"))
    model.register_forward_pre_hook(lambda m, _: m.maybe("earlier pre-hook"), prepend=True)
    model.register_forward_hook(lambda m, *_: m.maybe("forward hook"))
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        model(x * 1)
    assert torch_private.top_saved_tensor_hooks() is None
    model.broken = False
    model(x * 1).sum().backward()
    assert [t.kept for t in pyactcomp.report(model).tensors] == [None]
    assert torch_private.top_saved_tensor_hooks() is None


def test_disable_in_the_environment_makes_everything_a_no_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    model = nn.Linear(64, 64)
    x = torch.randn(32, 64)
    exact = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
    pyactcomp.compress(model, min_bytes=0)
    assert torch.equal(torch.autograd.grad(model(x).square().sum(), model.weight)[0], exact)
    with pyactcomp.compressed(min_bytes=0):
        assert torch_private.top_saved_tensor_hooks() is None


def test_functorch_transforms_step_aside() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    x = torch.randn(8, 64)
    parameters = dict(model.named_parameters())

    def loss(p: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (row,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(8):
        exact = torch.autograd.grad(loss(parameters, x[i]), model.bias)[0]
        # Nothing is packed: each element of the gradient is a sum over 64 inputs, in another order under vmap.
        assert (per_sample["bias"][i] - exact).norm() <= 64 * torch.finfo(torch.float32).eps * exact.norm()


@pytest.mark.parametrize("options", [{}, {"pre_dispatch": True}], ids=str)
@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_a_traced_step_computes_what_it_does_when_run(mode: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softmax(-1))
    pyactcomp.compress(model, mode=mode, min_bytes=1)
    x = torch.randn(32, 64)

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with pyactcomp.compressed(mode=mode, min_bytes=1):
            loss = torch.where(x * 1.0 > 0, x * 2, x * 3).square().sum() + model(x).square().sum()
        return torch.autograd.grad(loss, x)[0]

    with paused(model):
        exact = torch.autograd.grad(step_of_torch(model, leaf := x.clone().requires_grad_()), leaf)[0]
    traced = make_fx(step, **options)(x)
    assert (traced(x) - exact).norm() <= 1e-5 * exact.norm()


def step_of_torch(model: nn.Module, x: Tensor) -> Tensor:
    return torch.where(x * 1.0 > 0, x * 2, x * 3).square().sum() + model(x).square().sum()


def test_a_trace_inside_a_context_reads_what_was_written() -> None:
    x = torch.randn(64, 64)

    def step(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.where(x * 1.0 > 0, x * 2, x * 3).square().sum(), x)[0]

    with pyactcomp.compressed(mode="lossless", min_bytes=1):
        traced = make_fx(step)(x)
    assert torch.equal(traced(x), step(x))


def test_other_dispatch_modes_do_not_stop_compression() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), min_bytes=0, fuse=False)
    with FlopCounterMode(display=False):
        model(torch.randn(8, 64)).sum().backward()
    report = pyactcomp.report(model)
    assert report.stored_bytes < 0.5 * report.unique_bytes


# Torch scripts formulas of its own for it.
scripts = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@scripts
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_forward_mode_derivatives_are_those_of_torch(mode: str, fuse: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.0), nn.Linear(64, 64))
    x, tangent = torch.randn(256, 64), torch.ones(256, 64)

    def derivatives() -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            out, along = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent)))
            gradient = torch.autograd.grad(out.square().sum(), model[0].weight)[0]
        return out, along, gradient

    exact = derivatives()
    pyactcomp.compress(model, mode=mode, fuse=fuse, min_bytes=0)
    for got, expected in zip(derivatives(), exact, strict=True):
        assert torch.equal(got, expected)


@scripts
def test_a_dual_level_inside_a_context_is_stepped_aside_for() -> None:
    x, weight = torch.randn(64, 64), torch.randn(64, 64).requires_grad_()
    with pyactcomp.compressed(min_bytes=0), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        out, along = forward_ad.unpack_dual((dual @ weight).tanh())
    slope = 1 - (x @ weight).tanh().square().detach()
    # The same operators; the slope, at most 1, and its product are rounded four times.
    eps = 4 * torch.finfo(torch.float32).eps
    product = torch.ones_like(x) @ weight
    assert bool(((along - product * slope).abs() <= eps * product.abs()).all())
    gradient = torch.autograd.grad(out.sum(), weight)[0]
    assert bool(((gradient - x.t() @ slope).abs() <= eps * x.abs().sum(0)[:, None]).all())


def test_disabled_hooks_are_respected() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    x = torch.randn(8, 64)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(x).sum().backward()
    assert pyactcomp.report(model).note


def test_foreign_hooks_are_named() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(pyactcomp.HookConflictError, match=r"save_on_cpu.*use one of them"),
    ):
        model(torch.randn(8, 64))
    assert torch_private.top_saved_tensor_hooks() is None
    model(torch.randn(8, 64)).sum().backward()


def test_a_context_inside_a_checkpointed_block_raises_or_steps_aside() -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(8, 64, requires_grad=True)

    def block(x: Tensor, on_conflict: str) -> Tensor:
        with pyactcomp.compressed(min_bytes=0, on_conflict=on_conflict):
            return layer(x).sin()

    with pytest.raises(pyactcomp.HookConflictError, match="checkpoint"):
        torch.utils.checkpoint.checkpoint(block, x, "raise", use_reentrant=False)
    assert torch_private.top_saved_tensor_hooks() is None

    runs = []
    layer.register_forward_hook(lambda *_: runs.append(1))
    torch.utils.checkpoint.checkpoint(block, x, "skip", use_reentrant=False).sum().backward()
    # Once in forward and once in the recomputation that the context would have disabled.
    assert len(runs) == 2


def test_our_own_context_around_a_compressed_model_is_no_conflict() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    with pyactcomp.compressed(model, min_bytes=0) as c:
        loss = nn.functional.silu(model(torch.randn(32, 64))).sum()
    loss.backward()
    assert [t.kept for t in pyactcomp.report(c).tensors if t.shape == (32, 64)] == [None]
    assert len(pyactcomp.report(model).tensors) > 0


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent_and_compressed(how: str) -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64), nn.GELU()), min_bytes=0, skip=[nn.GELU])
    before = list(model.state_dict())
    model(activation(8)).sum().backward()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert list(twin.state_dict()) == before == ["0.weight", "0.bias"]
    assert pyactcomp.report(twin).note
    twin(activation(16)).sum().backward()
    shapes = {t.shape for t in pyactcomp.report(twin).tensors if t.kept is None}
    assert shapes == {(16, 64)}
    assert {t.module for t in pyactcomp.report(twin).tensors if t.kept == pyactcomp.engine.reasons.SKIPPED} == {"1"}
    pyactcomp.decompress(twin)
    assert len(pyactcomp.report(model).tensors) > 0


def test_profiler_shows_pack_and_unpack() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(activation(32)).sum().backward()
    names = {event.key: event.count for event in profile.key_averages()}
    assert names["pyactcomp::pack"] == names["pyactcomp::unpack"] == 2  # input and weight


def test_stochastic_rounding_differs_between_tensors_and_repeats_with_the_seed() -> None:
    x = torch.randn(64, 64)
    leaf, layer = x.clone().requires_grad_(), torch.eye(64).requires_grad_()

    def run(seed: int) -> tuple[Tensor, Tensor]:
        a, b = (torch.zeros(64, 64, requires_grad=True) for _ in range(2))
        with pyactcomp.compressed(min_bytes=0, rounding="stochastic", seed=seed):
            loss = (a * (leaf @ layer)).sum() + (b * (leaf @ layer)).sum()
        loss.backward()
        return a.grad, b.grad

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    assert bool(((first[0] - x).abs().double() <= error_bound(x.flatten(), stochastic=True).view_as(x)).all())


def test_streams_and_rng_of_torch_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    with pyactcomp.compressed(min_bytes=0, rounding="stochastic"):
        torch.zeros(4096, requires_grad=True).exp().sum().backward()
    assert torch.equal(torch.rand(4), expected)
