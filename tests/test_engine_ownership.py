"""What the engine must never compress: parameters, their views and copies, buffers, integers, small tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.config import Config
from pyactcomp.engine import reasons
from pyactcomp.engine.session import Session
from pyactcomp.report import Report


def reasons_of(report: Report) -> dict[str, int]:
    return {line.name: line.tensors for line in report.kept}


def compressed_shapes(report: Report) -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in report.tensors if tensor.kept is None]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


class Tied(nn.Module):
    """Uses one weight directly, transposed and sliced, and a buffer in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("scale", torch.rand(64, 64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        y = y @ self.weight.t()
        y = y @ self.weight[:, :32]
        return y @ self.scale[:32]


class Chosen(nn.Module):
    """Saves a boolean mask."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0.5 * x)


@pytest.mark.parametrize(
    ("options", "masks", "walks"),
    [({"mode": "int8"}, False, 1), ({"mode": "lossless"}, False, 0), ({"mode": "lossless"}, True, 1)],
    ids=["int8", "lossless", "lossless with masks"],
)
def test_the_model_is_looked_through_only_where_something_is_copied(
    options: dict[str, str], masks: bool, walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most once a forward, and not where floats are kept as they are and there are no masks to store in bits."""
    layers = [nn.Linear(64, 64), Chosen() if masks else nn.Tanh(), nn.Linear(64, 64)]
    model = pyactcomp.compress(nn.Sequential(*layers), min_bytes=0, fuse=False, **options)
    x = torch.randn(512, 64)
    model(x).sum().backward()  # the first forward is recorded, with a reason for each tensor
    looked = Looked()
    monkeypatch.setattr(model, "_buffers", looked)
    for _ in range(3):
        model(x).sum().backward()
    assert looked.times == 3 * walks


class Looked(dict[str, Tensor]):
    """Counts how often its values were asked for."""

    times = 0

    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_parameters_their_views_and_buffers_are_kept() -> None:
    model = pyactcomp.compress(Tied(), min_bytes=0)
    x = torch.randn(48, 64, requires_grad=True)
    model(x).sum().backward()
    report = pyactcomp.report(model)
    # Four operands are the model's own; what is compressed has 48 rows, and x is a leaf that requires grad.
    assert reasons_of(report) == {reasons.PARAMETER: 4, reasons.LEAF: 1}
    assert all(shape[0] == 48 for shape in compressed_shapes(report))
    # The gradient of x passes only through exact weights and the buffer.
    w, s = model.weight.detach(), model.scale
    exact = torch.ones(48, 64) @ s[:32].t() @ w[:, :32].t() @ w @ w.t()
    assert torch.equal(x.grad, exact) or (x.grad - exact).norm() <= 1e-6 * exact.norm()


def test_parameters_are_recognised_without_a_model() -> None:
    model = Tied()
    with pyactcomp.compressed(min_bytes=0) as c:
        model(torch.randn(48, 64)).sum().backward()
    # The first product needs no gradient for its left operand and saves no weight.
    kept = [t.shape for t in pyactcomp.report(c).tensors if t.kept == reasons.PARAMETER]
    assert kept == [(64, 64), (64, 32)]


def test_integers_are_never_changed() -> None:
    index = torch.randint(0, 100, (4096,))
    table = nn.Embedding(100, 32)
    model = pyactcomp.compress(nn.Sequential(table), min_bytes=0)
    model(index).sum().backward()
    assert reasons_of(pyactcomp.report(model))["dtype torch.int64"] == 1
    assert torch.equal(table.weight.grad[:, 0], torch.bincount(index, minlength=100).float())


def test_tensors_below_min_bytes_are_kept_and_at_it_compressed() -> None:
    for elements, kept in ((255, True), (256, False)):
        with pyactcomp.compressed(min_bytes=1024) as c:
            x = torch.randn(elements, requires_grad=True) * 2
            x.exp()
        assert [t.kept == reasons.SMALL for t in pyactcomp.report(c).tensors] == [kept]


def test_four_bit_weights_held_as_bytes_are_kept() -> None:
    class Unpacked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, codes):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(codes)
            return x @ (codes.float() - 8)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (codes,) = ctx.saved_tensors
            return grad @ (codes.float() - 8).t(), None

    class FourBit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(0, 16, (64, 64), dtype=torch.uint8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return Unpacked.apply(x, self.codes)

    model = pyactcomp.compress(FourBit(), min_bytes=0)
    x = torch.randn(32, 64, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(32, 64) @ (model.codes.float() - 8).t())
    assert compressed_shapes(pyactcomp.report(model)) == []


def test_weights_swapped_between_forwards_are_still_recognised() -> None:
    model = pyactcomp.compress(nn.Linear(64, 64), min_bytes=0)
    for _ in range(2):
        model.weight.data = torch.randn(64, 64)
        x = torch.randn(8, 64, requires_grad=True)
        (model(x * 1.0)).sum().backward()
        exact = torch.ones(8, 64) @ model.weight.detach()
        assert (x.grad - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_copies_are_cast_again_and_not_held(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    x = torch.randn(64, 256, requires_grad=True)

    def input_gradient() -> Tensor:
        with torch.autocast("cpu", dtype):
            loss = model(x).float().square().sum()
        return torch.autograd.grad(loss, x)[0]

    exact = input_gradient()
    pyactcomp.compress(model, min_bytes=0)
    got = input_gradient()
    report = pyactcomp.report(model)
    copies = [t for t in report.tensors if t.kept == reasons.RECAST]
    # The first layer's and the second layer's weight, each as a transposed view of its copy.
    assert [t.shape for t in copies] == [(256, 256)] * 2
    assert sum(t.stored_bytes for t in copies) == 0
    assert sum(t.unique_bytes for t in copies) == 2 * 256 * 256 * 2
    # Both weights are exact, and the square is taken outside the model, so nothing lossy is on this path.
    assert torch.equal(got, exact)


def clamped(weight: Tensor) -> Tensor:
    """Return a straight-through estimate: the forward reads what the gradient knows nothing of."""
    copy = weight.to(torch.bfloat16)
    with torch.no_grad():
        copy.clamp_(-0.5, 0.5)
    return copy


def set_through_a_view(weight: Tensor) -> Tensor:
    copy = weight.to(torch.bfloat16)
    view = copy.detach()
    view[:4] = 0
    return copy.flatten(1).view(copy.shape)


def channels_last(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16, memory_format=torch.channels_last)


def contiguous(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16, memory_format=torch.contiguous_format)


def plain_cast(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16)


@pytest.mark.parametrize("mode", ["int8", "lossless"])
@pytest.mark.parametrize(
    ("of", "cast", "again"),
    [
        (torch.contiguous_format, clamped, False),
        (torch.contiguous_format, set_through_a_view, False),
        (torch.contiguous_format, channels_last, False),
        (torch.channels_last, contiguous, False),
        (torch.channels_last, channels_last, True),
        (torch.channels_last, plain_cast, True),
        (torch.contiguous_format, plain_cast, True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_cast_of_a_parameter_is_made_again_only_where_it_is_one(
    of: torch.memory_format, cast: Callable[[Tensor], Tensor], again: bool, mode: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 16, 3, 3, generator=generator).contiguous(memory_format=of))
    x = torch.randn(2, 16, 8, 8, generator=generator).requires_grad_()

    def gradient() -> Tensor:
        return torch.autograd.grad(nn.functional.conv2d(x.bfloat16(), cast(weight)).sum(), x)[0]

    exact = gradient()
    with pyactcomp.compressed(mode=mode, min_bytes=0) as c:
        loss = nn.functional.conv2d(x.bfloat16(), cast(weight)).sum()
    # The weight is all that the gradient of the input reads.
    assert torch.equal(torch.autograd.grad(loss, x)[0], exact)
    assert reasons_of(pyactcomp.report(c)).get(reasons.RECAST, 0) == again
    assert reasons_of(pyactcomp.report(c)).get(reasons.OTHER_LAYOUT, 0) == (not again)


@pytest.mark.parametrize("options", [{"mode": "int8"}, {"mode": "lossless"}, {"fuse": False}], ids=str)
def test_lazy_modules_make_their_parameters_in_the_first_forward(options: dict[str, Any]) -> None:
    def lazy() -> nn.Sequential:
        torch.manual_seed(0)
        unused = nn.LazyLinear(8)
        model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16))
        model[2].extra = unused  # never called
        return model

    x = torch.randn(4, 3, 8, 8)
    plain, ours = lazy(), pyactcomp.compress(lazy(), min_bytes=0, **options)
    for _ in range(2):
        for model in (plain, ours):
            torch.manual_seed(1)
            model.zero_grad()
            model(x).square().sum().backward()
        got, expected = (torch.cat([g.flatten() for g in gradients(model)]) for model in (ours, plain))
        # Eight bits are off by half a step, 1.2 % of a deviation, in each of three layers.
        assert (got - expected).norm() <= (0 if options.get("mode") == "lossless" else 0.04) * expected.norm()
    assert sum(pyactcomp.report(ours).gradient_bytes.values()) == 4 * got.numel()


def test_keep_weight_copies_holds_them() -> None:
    model = pyactcomp.compress(nn.Linear(256, 256), min_bytes=0, keep_weight_copies=True)
    x = torch.randn(64, 256)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    with torch.no_grad():
        model.weight.add_(1)
    loss.backward()
    assert reasons.RECAST not in reasons_of(pyactcomp.report(model))


def test_a_parameter_changed_before_backward_raises_and_is_named() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), min_bytes=0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 64)).float().sum()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(pyactcomp.PyactcompError, match=r"'1\.weight'.*keep_weight_copies=True"):
        loss.backward()


def test_frozen_weights_copies_are_kept_exact_and_reported() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 32))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(16, 96, requires_grad=True)

    def input_gradient() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).float()
        return torch.autograd.grad(y.sum(), x)[0]

    exact = input_gradient()
    pyactcomp.compress(model, min_bytes=0)
    got = input_gradient()
    assert reasons_of(pyactcomp.report(model))[reasons.NO_GRAD] == 2
    assert torch.equal(got, exact)


@pytest.mark.parametrize("masked", [-float("inf"), torch.finfo(torch.float32).min, -1e4])
def test_additive_masks_and_softmax_statistics_are_kept_exact(masked: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))
    mask = torch.zeros(2, 1, 64, 64)
    mask[0, :, :, 40:] = masked

    def gradients() -> tuple[Tensor, ...]:
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return torch.autograd.grad(out.sum(), (q, k, v))

    exact = gradients()
    with pyactcomp.compressed(min_bytes=0) as c:
        got = gradients()
    # q, k and v are leaves, so the mask, the log-sum-exp and the output are all there is to lose.
    assert {t.kept for t in pyactcomp.report(c).tensors} <= {None, reasons.LEAF, reasons.NO_GRAD, "dtype torch.int64"}
    for a, b in zip(got, exact, strict=True):
        # The output takes part in the gradient of the scores; its relative error is that of randn, 0.0055.
        assert (a - b).norm() <= 2 * 0.0055 * b.norm()


def test_searches_for_weight_copies_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyactcomp.engine.frame._MOST_CASTS", 2)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    with pyactcomp.compressed(min_bytes=0) as c, torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(8, 64, requires_grad=True) * 1
        for layer in layers:
            x = layer(x)
    copies = [t for t in pyactcomp.report(c).tensors if t.shape == (64, 64)]
    assert [t.kept == reasons.RECAST for t in copies].count(True) < len(copies)


def test_a_dtensor_is_compressed_by_its_local_tensor() -> None:
    pytest.importorskip("torch.distributed.tensor")
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.randn(64, 64)
        x = DTensor.from_local(local, mesh, [Replicate()]).requires_grad_()
        with pyactcomp.compressed(min_bytes=0) as c:
            nn.functional.silu(x * 2).sum().backward()
        report = pyactcomp.report(c)
        assert [t.kept for t in report.tensors if t.shape == (64, 64)] == [None]
        grad = x.grad.to_local()
        plain = local.clone().requires_grad_()
        (exact,) = torch.autograd.grad(nn.functional.silu(plain * 2).sum(), plain)
        # d/dx = 2 silu'(2x), whose slope is at most silu''(0) = 1/2.
        bound = 2 / 2 * pyactcomp.codec.reference.error_bound((2 * local).flatten()).view(64, 64) + 1e-6
        assert bool(((grad - exact).abs() <= bound).all())
    finally:
        dist.destroy_process_group()


def test_skipped_modules_keep_everything_exact() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    for skip in (["1"], [nn.GELU]):
        pyactcomp.compress(model, min_bytes=0, skip=skip)
        model(torch.randn(32, 64, requires_grad=True) * 1).sum().backward()
        by_module = {t.module: t.kept for t in pyactcomp.report(model).tensors if t.shape == (32, 64)}
        # GELU's result is computed again, exactly, from its input.
        assert by_module == {"0": None, "1": reasons.SKIPPED, "2": reasons.RECOMPUTED}
        pyactcomp.decompress(model)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(64, 64), nn.ModuleList([nn.GELU(), nn.ModuleList([nn.SiLU()])])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1][0](self.layers[0](self.first(x)))


def test_a_skipped_list_of_modules_keeps_the_modules_exact() -> None:
    # Nothing calls the list itself.
    model = pyactcomp.compress(Listed(), min_bytes=0, skip=["layers"])
    model(torch.randn(32, 64, requires_grad=True) * 1).sum().backward()
    by_module = {t.module: t.kept for t in pyactcomp.report(model).tensors if t.shape == (32, 64)}
    assert by_module == {"first": None, "layers.0": reasons.SKIPPED, "layers.1.0": reasons.SKIPPED}


NUMEL = 256 * 64
ONE_BIT = fmt.packed_nbytes(NUMEL, 1, 64)


@pytest.mark.parametrize(
    ("activation", "nbytes"),
    [
        (nn.LeakyReLU(0.01), ONE_BIT),
        (nn.ReLU6(), ONE_BIT),
        (nn.Hardswish(), 4 * NUMEL),
        (nn.PReLU(), 2 * NUMEL),
        (nn.LeakyReLU(0.1, inplace=True), ONE_BIT),
    ],
    ids=str,
)
def test_activations_with_a_kink_are_exact_in_the_bytes_that_they_need(activation: nn.Module, nbytes: int) -> None:
    """One bit where the derivative is a choice of two, bfloat16 where it asks for the sign and a weight for values."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.LayerNorm(64), activation)]
    model = nn.Sequential(*layers)
    x = torch.randn(256, 64)
    verification = pyactcomp.verify(model, x, lambda y: y.square().sum(), min_bytes=0)
    # Six layers of a packed operand and a packed LayerNorm input each, 0.0055 apiece, that add up as noise does; with
    # packed inputs of the activations the error is ten times this.
    assert verification.error <= 0.0055 * 12**0.5
    leaf = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(activation(leaf * 1).square().sum(), leaf)
    with pyactcomp.compressed(activation, min_bytes=0) as c:
        out = activation(leaf * 1)
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
    assert torch.equal(gradient, exact)
    assert pyactcomp.report(c).stored_bytes == nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["int8", "lossless"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.threshold(x, 0.1, -0.2),
        lambda x: F.hardtanh(x, -0.1, 0.3),
        lambda x: x.clamp(-0.1, 0.3),
        lambda x: x.clamp_min(0.1),
        lambda x: x.clamp_max(0.1),
        lambda x: F.hardshrink(x, 0.1),
        lambda x: F.softshrink(x, 0.1),
    ],
    ids=["threshold", "hardtanh", "clamp", "clamp_min", "clamp_max", "hardshrink", "softshrink"],
)
def test_bits_tell_the_side_of_a_bound_in_each_dtype(
    function: Callable[[Tensor], Tensor], mode: str, dtype: torch.dtype
) -> None:
    """No bound is a number of 16 bits, where some operators round it first and some do not: those keep the tensor."""
    bounds = torch.tensor([-0.1, 0.1, 0.3], dtype=torch.float64)
    around = torch.cat([bounds, bounds.float().double(), bounds.bfloat16().double()]).to(dtype)
    beside = [torch.nextafter(around, torch.full_like(around, end)) for end in (-9.0, 9.0)]
    x = torch.cat([around, *beside, torch.linspace(-1, 1, 37, dtype=torch.float64).to(dtype)]).requires_grad_()
    (exact,) = torch.autograd.grad(function(x * 1).sum(), x)
    with pyactcomp.compressed(min_bytes=0, mode=mode) as c:
        out = function(x * 1)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, exact)
    stored = fmt.packed_nbytes(x.numel(), 1, 64) if dtype.itemsize > 2 else x.nbytes
    assert pyactcomp.report(c).stored_bytes == stored


INF = math.inf


@pytest.mark.parametrize(
    "bounds",
    [
        (0.5, None),
        (None, 0.5),
        (0.5, INF),
        (-INF, 0.5),
        (-INF, INF),
        (0.5, 0.5),
        (0.5, 0.5000001),
        (-0.5, 0.5),
        (-INF, None),
    ],
    ids=str,
)
def test_clamps_of_infinities_and_between_near_bounds(bounds: tuple[float | None, float | None]) -> None:
    at = torch.tensor([-INF, -0.5, 0.0, 0.5, INF, math.nan] * 16)
    x = torch.cat([at, *(torch.nextafter(at, torch.full_like(at, end)) for end in (-9.0, 9.0))]).requires_grad_()
    (exact,) = torch.autograd.grad((x * 1).clamp(*bounds).sum(), x)
    with pyactcomp.compressed(min_bytes=0, mode="lossless"):
        out = (x * 1).clamp(*bounds)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits_are_enough_of_sixteen_where_the_bound_is_such_a_number(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, -1, -0.5, 0, 0.5, 1, 3, 6, 7] * 8, dtype=dtype).requires_grad_()
    for function in (F.relu6, F.hardtanh, F.softshrink, lambda x: F.threshold(x, 1, 2), lambda x: x.clamp(-0.5, 3)):
        (exact,) = torch.autograd.grad(function(x * 1).sum(), x)
        with pyactcomp.compressed(min_bytes=0) as c:
            out = function(x * 1)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], exact)
        assert pyactcomp.report(c).stored_bytes == fmt.packed_nbytes(x.numel(), 1, 64)


def test_the_policy_reads_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, refuse)
    session = Session(Config(min_bytes=0))
    session.open(None)
    try:
        x = torch.randn(256, requires_grad=True)
        y = (x * 2).exp().relu()
    finally:
        session.close()
    y.backward(torch.ones(256))
    assert session.recorder is not None
    assert len(session.recorder.saved) > 0


class Around(Tensor):
    """A subclass that stands around a tensor, as quantised weights do: it has no memory of its own."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, **_: object) -> Around:
        made: Any = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner = inner.detach()
        return cast(Around, made)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Around, lambda around: around.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


class Flattened(Around):
    """One that tells what it stands around."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


@pytest.mark.parametrize("mode", ["int8", "lossless"])
@pytest.mark.parametrize("kind", [Around, Flattened])
def test_subclasses_around_tensors_are_kept_and_counted(kind: type[Around], mode: str) -> None:
    weight = torch.randn(64, 64)

    def gradient(**options: Any) -> tuple[Tensor, Any]:
        x = kind(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_())
        model = nn.Linear(64, 64, bias=False)
        model.weight = nn.Parameter(kind(weight))
        with pyactcomp.compressed(model, **options) if options else nullcontext() as c:
            loss = model(x).sin().sum()
        loss.backward()
        return model.weight.grad.inner, c  # type: ignore[union-attr]

    got, c = gradient(mode=mode, min_bytes=0)
    assert torch.equal(got, gradient()[0])
    saved = pyactcomp.report(c).tensors
    assert {tensor.kept for tensor in saved} == {f"tensor subclass {kind.__name__}"}
    # The input, the weight, and what sin reads: each 64 x 64 in float32, held as it is.
    assert [tensor.stored_bytes for tensor in saved] == [64 * 64 * 4] * 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_kept(layout: torch.layout) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(length, 64, requires_grad=True) for length in (3, 5)]
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())

    def gradient() -> Tensor:
        out = model(torch.nested.as_nested_tensor(parts, layout=layout))
        return torch.autograd.grad(out.values().sum(), model[1].weight)[0]

    exact = gradient()
    pyactcomp.compress(model, min_bytes=0)
    assert torch.equal(gradient(), exact)
    reason = reasons.NESTED if layout is torch.strided else "tensor subclass NestedTensor"
    kept = [tensor for tensor in pyactcomp.report(model).tensors if tensor.kept == reason]
    # In the shape that its elements have in memory.
    assert {tensor.shape for tensor in kept} == {(8 * 64,) if layout is torch.strided else (8, 64)}
