"""One tensor saved by several operators is stored once, and only when it is proven to be the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.codec.reference import error_bound
from pyactcomp.engine.saved import library
from pyactcomp.report import Report


def stored(report: Report) -> list[int]:
    return [tensor.stored_bytes for tensor in report.tensors if tensor.kept is None]


def test_a_tensor_saved_by_several_operators_is_stored_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with pyactcomp.compressed(min_bytes=0) as c:
        y = x * 2
        out = F.silu(y) + F.gelu(y) + y.exp() * 0
    assert stored(pyactcomp.report(c))[:2] == [fmt.packed_nbytes(64 * 64, 8, 64), 0]
    assert pyactcomp.report(c).saved_bytes > pyactcomp.report(c).unique_bytes
    out.sum().backward()
    assert x.grad is not None


def test_views_of_one_memory_share_it_whatever_their_shape() -> None:
    with pyactcomp.compressed(min_bytes=0) as c:
        y = torch.randn(32, 64, requires_grad=True) * 2
        views = (y, y.view(64, 32), y.t(), y.view(4, 8, 64).transpose(0, 1))
        graphs = [F.silu(view) for view in views]
    assert stored(pyactcomp.report(c)) == [fmt.packed_nbytes(32 * 64, 8, 64), 0, 0, 0]
    for view, graph in zip(views, graphs, strict=True):
        (gradient,) = torch.autograd.grad(graph.sum(), view)
        (exact,) = torch.autograd.grad(F.silu(view).sum(), view)
        # The slope of silu' is at most silu''(0) = 1/2.
        bound = error_bound(y.detach().flatten()).max() / 2 + 1e-6
        assert gradient.shape == view.shape
        assert float((gradient - exact).detach().abs().max()) <= bound


SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda y: y[:, 64:128],
    "rows of heads": lambda y: y.view(16, 3, 4, 16)[:, 1].transpose(0, 1),
    "transposed": lambda y: y[:, 128:].t(),
    "every other column": lambda y: y[:, ::2],
    "the middle of images": lambda y: y.view(4, 4, 16, 12)[..., 2:10],
    "repeated": lambda y: y.view(16, 3, 64)[:, 1, None].expand(16, 2, 64),
}


def strides_without_gaps(part: Tensor) -> tuple[int, ...]:
    """Return the strides of a slice's elements in their order, one after the other; a repeated one still takes none."""
    distinct = part[tuple(slice(1) if step == 0 else slice(None) for step in part.stride())]
    return torch.empty_like(distinct).expand_as(part).stride()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cut", SLICES)
def test_a_slice_takes_the_bytes_of_its_own_elements(cut: str, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3 * 64, device=device, requires_grad=True)

    def step() -> tuple[list[tuple[int, ...]], Tensor]:
        part = SLICES[cut](x * 1.0)
        out = F.silu(part)
        # A second reader of the slice, whatever the order of its dimensions.
        other = F.gelu(part.transpose(0, 1))
        strides = [each.grad_fn._saved_self.stride() for each in (out, other)]
        return strides, torch.autograd.grad(out.sum() + other.square().sum(), x)[0]

    with pyactcomp.compressed(min_bytes=0) as c:
        strides, got = step()
    _, exact = step()
    part = SLICES[cut](torch.empty(16, 3 * 64))
    elements = SLICES[cut](torch.arange(x.numel(), device=device).view_as(x)).unique().numel()
    assert stored(pyactcomp.report(c))[:2] == [fmt.packed_nbytes(elements, 8, 64), 0]
    # Backward gets memory for these elements alone.
    assert strides == [strides_without_gaps(each) for each in (part, part.transpose(0, 1))]
    # GELU's and SiLU's slopes bend by less than one, and half a step is 2 * 4 sigma / 255 / 2 of the group.
    assert (got - exact).norm() <= GRADIENT_BOUND * exact.norm()


def test_slices_share_what_is_stored_of_the_whole() -> None:
    with pyactcomp.compressed(min_bytes=0) as c:
        y = torch.randn(16, 192, requires_grad=True) * 2
        graphs = [F.silu(y), *(F.gelu(part) for part in y.chunk(3, dim=-1))]
    assert stored(pyactcomp.report(c)) == [fmt.packed_nbytes(16 * 192, 8, 64), 0, 0, 0]
    assert len(graphs) == 4


def test_a_slice_that_a_stricter_reader_reads_too_is_kept_for_both() -> None:
    x = torch.randn(16, 192, requires_grad=True)

    def graph() -> Tensor:
        part = (x * 1.0)[:, 64:128]
        return F.silu(part) + torch.sin(part)  # codes for SiLU, and then the tensor itself

    with pyactcomp.compressed(min_bytes=0):
        compressed = graph()
    got, exact = (torch.autograd.grad(each.sum(), x)[0] for each in (compressed, graph()))
    assert torch.equal(got, exact)


def test_a_freed_tensor_at_the_same_address_is_not_mistaken_for_it() -> None:
    # The allocator hands the memory of the first product to the second; the shapes are equal, the values not. They have
    # 40 MiB, more than malloc ever keeps to itself: the system gives the hole that the first one leaves.
    rows = 40 << 12
    reused = 0
    for _ in range(10):
        with pyactcomp.compressed(min_bytes=0):
            x = torch.full((rows, 64), 3.0, requires_grad=True)
            w = torch.ones(64, 2, requires_grad=True)
            y = x * 1.0
            first = y.data_ptr()
            a = (y @ w).sum()
            del y
            z = x * 2.0
            reused += z.data_ptr() == first
            b = (z @ w).sum()
        (a + b).backward()
        # The sum over rows of y = 3 and of z = 6; a constant of a few bits is packed without error.
        assert torch.equal(w.grad, torch.full_like(w, rows * 9.0))
    assert reused, "the allocator never reused the address, so this test proved nothing"


def test_what_is_stored_anew_in_another_shape_keeps_the_shape_of_the_first() -> None:
    leaf, w = torch.randn(256, 64, requires_grad=True), torch.randn(64, 32, requires_grad=True)

    def loss() -> torch.Tensor:
        x = leaf * 1
        # Codes of a matrix, then 16 bits of the same memory in four dimensions.
        heads = x.view(4, 4, 16, 64)
        return (x @ w).sum() + F.scaled_dot_product_attention(heads, heads, heads).sum()

    exact = torch.autograd.grad(loss(), (leaf, w))
    with pyactcomp.compressed(min_bytes=0):
        value = loss()
    # Of sixteen bits half a unit of the last of eleven, ten times over.
    for got, expected in zip(torch.autograd.grad(value, (leaf, w)), exact, strict=True):
        assert (got - expected).norm() <= 10 * 2**-11 * expected.norm()


def test_a_tensor_changed_between_two_saves_is_stored_again() -> None:
    x = torch.randn(64, 64)
    w = torch.randn(64, 64, requires_grad=True)
    leaf = x.clone().requires_grad_()
    with pyactcomp.compressed(min_bytes=0):
        y = leaf * 1
        first = w * y
        with torch.no_grad():
            y.mul_(2)
        second = w * y
    # The second product saved the doubled values; the first one's operand has changed, as without hooks.
    second_gradient = torch.autograd.grad(second.sum(), w)[0]
    assert bool(((second_gradient - 2 * x).abs() <= error_bound((2 * x).flatten()).view_as(x)).all())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first.sum(), w)


@pytest.mark.parametrize("min_bytes", [0, 2**40], ids=["compressed", "kept"])
@pytest.mark.parametrize("case", ["input", "output", "view", "base"])
def test_an_edit_after_saving_raises_what_autograd_raises(case: str, min_bytes: int) -> None:
    def graph() -> tuple[Tensor, Tensor]:
        x = torch.randn(64, 64, requires_grad=True)
        y = x * 2
        if case == "input":
            return F.silu(y).sum(), y
        if case == "output":
            z = y.exp()
            return z.sum(), z
        if case == "view":
            return F.silu(y.t()).sum(), y
        return F.silu(y).sum(), y.view(-1)

    loss, target = graph()
    with torch.no_grad():
        target.add_(1)
    with pytest.raises(RuntimeError) as plain:
        loss.backward()
    with pyactcomp.compressed(min_bytes=min_bytes):
        loss, target = graph()
    with torch.no_grad():
        target.add_(1)
    with pytest.raises(RuntimeError) as ours:
        loss.backward()
    assert "is at version 1; expected version 0 instead" in str(plain.value)
    assert str(ours.value).split(", which is")[0].split("; expected")[1][:19] == " version 0 instead."
    assert "modified by an inplace operation: [torch.FloatTensor [64, 64]]" in str(ours.value)


def test_an_in_place_activation_is_no_edit() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True))
    x = torch.randn(128, 64)
    verification = pyactcomp.verify(model, x, lambda y: y.square().sum(), min_bytes=0)
    # Each gradient is a product with one packed operand, whose relative error is at most that of ReLU(randn), 0.0029.
    assert max(verification.errors.values()) <= 2 * 0.0029


def test_relu_keeps_its_sign_where_it_rounds_to_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1024).abs() * torch.logspace(-6, 0, 1024)
    x[:, ::2] *= -1
    x.requires_grad_()

    def of_a_view(y: Tensor) -> Tensor:
        return torch.relu_(y.view(64, 32, 32))

    for relu in (torch.relu, torch.nn.functional.relu_, of_a_view):
        with pyactcomp.compressed(min_bytes=0) as c:
            loss = relu(x * 1.0).view(1024, 64).sum()
        (gradient,) = torch.autograd.grad(loss, x)
        assert len(stored(pyactcomp.report(c))) == 1
        assert torch.equal(gradient, (x > 0).float())


def test_packing_keeps_neither_the_tensor_nor_its_graph_alive() -> None:
    with pyactcomp.compressed(min_bytes=0):
        x = torch.randn(64, 64, requires_grad=True)
        y = x * 2
        storage = weakref.ref(y.untyped_storage())
        address = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        z = F.silu(y)
        del y, storage
    assert address.expired()
    z.sum().backward()


@pytest.mark.parametrize("min_bytes", [0, 2**40], ids=["compressed", "kept"])
def test_an_operator_that_saves_its_output_does_not_leak(min_bytes: int) -> None:
    def run() -> torch.multiprocessing.reductions.StorageWeakRef:
        with pyactcomp.compressed(min_bytes=min_bytes):
            y = torch.randn(64, 64, requires_grad=True).exp()
        return torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())

    gc.disable()
    try:
        assert run().expired()
    finally:
        gc.enable()


def test_packed_buffers_are_freed_with_their_graph() -> None:
    model = pyactcomp.compress(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), min_bytes=0)

    def alive() -> int:
        return library().counts()[0]

    gc.collect()
    before = alive()
    loss = model(torch.randn(32, 64, requires_grad=True) * 1).sum()
    # Four inputs and three weights: the first layer needs no gradient of its input's factor 1.
    assert alive() >= before + 7
    loss.backward()
    del loss
    assert alive() == before


def test_a_shared_tensor_is_restored_once_for_its_neighbours() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    with pyactcomp.compressed(min_bytes=0):
        y = x * 2
        loss = sum((y @ w).sum() for w in weights)
    before = library().counts()[1]
    loss.backward(retain_graph=True)
    assert library().counts()[1] - before == 1
    loss.backward()
    assert library().counts()[1] - before == 2


def test_deep_chains_are_freed_without_recursion() -> None:
    with pyactcomp.compressed(min_bytes=0):
        x = torch.randn(64, requires_grad=True)
        y = x
        for _ in range(12_000):
            y = F.mish(y)
    y.sum().backward()
    del y
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_a_saved_tensor_leaves_few_objects_to_the_garbage_collector() -> None:
    """Objects that live from forward to backward set off collections, the longest of which visit all that there is."""
    blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(20)]
    model = pyactcomp.compress(nn.Sequential(*blocks), min_bytes=256, fuse=False)
    x = torch.randn(64, 128)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    forward().backward()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        loss = forward()
        added = len(gc.get_objects()) - before
    finally:
        gc.enable()
    loss.backward()
    # Python's wrapper of each tensor that is kept; and the hooks, their two functions, the set of what is named and the
    # result. None of what is packed.
    kept = sum(tensor.kept is not None for tensor in pyactcomp.report(model).tensors)
    assert added <= kept + 5
