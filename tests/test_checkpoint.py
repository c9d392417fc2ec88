"""pyactcomp.checkpoint: torch's function, whose gradients are those of the block at the inputs restored from codes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from exactness_checks import distance
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.torch_private import top_saved_tensor_hooks

ROWS, WIDTH = 512, 64  # 128 KiB of float32, the least that is packed
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
reentrant_or_not = pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])


@pytest.fixture(autouse=True)
def _seed_and_no_hooks_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert top_saved_tensor_hooks() is None


def block(device: str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)


def data(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return a leaf and the gradient that the block's output gets."""
    return torch.randn(ROWS, WIDTH, device=device, requires_grad=True), torch.randn(ROWS, WIDTH, device=device)


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
    """Return the gradients of a leaf, of which twice is the input, and of a module's parameters."""
    leaves = (x, *module.parameters())
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(1)
    (run(x * 2) * w).sum().backward()
    return tuple(leaf.grad.clone() for leaf in leaves if leaf.grad is not None)


class _Exchanged(torch.autograd.Function):
    """The values of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def restored(x: Tensor) -> Tensor:
    """Return the values that 8-bit codes give back, with the gradient of the tensor itself."""
    return _Exchanged.apply(x, pyactcomp.codec.dequantize(pyactcomp.codec.quantize(x.detach())))  # type: ignore[no-any-return]


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@reentrant_or_not
def test_gradients_are_those_of_the_block_at_the_stored_inputs(use_reentrant: bool, device: str) -> None:
    module, (x, w) = block(device), data(device)
    exact = gradients(module, x, w, module)
    at_codes = gradients(lambda y: module(restored(y)), x, w, module)
    assert 0 < distance(at_codes, exact) <= GRADIENT_BOUND
    for store, expected in (("int8", at_codes), ("exact", exact)):
        run = lambda y, store=store: pyactcomp.checkpoint(module, y, store=store, use_reentrant=use_reentrant)  # noqa: E731
        assert_equal(gradients(run, x, w, module), expected)
        assert torch.equal(run(x * 2), module(x * 2)), "the forward is exact"


@reentrant_or_not
@pytest.mark.parametrize("store", ["int8", "exact"])
def test_the_input_lives_on_only_if_it_is_stored_exactly(store: Any, use_reentrant: bool) -> None:
    module, (x, _) = block(), data()
    y = nn.functional.linear(x, torch.eye(WIDTH))  # no other derivative reads the result, and no recipe makes it
    out = pyactcomp.checkpoint(module, y, store=store, use_reentrant=use_reentrant)
    memory = StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert memory.expired() == (store == "int8")
    out.sum().backward()


@reentrant_or_not
@pytest.mark.filterwarnings("ignore:nothing was compressed:UserWarning")  # by int8, of which exact leaves nothing
@pytest.mark.parametrize(("mode", "store"), [("lossless", "int8"), ("int8", "int8"), ("int8", "exact")])
def test_report_of_hooks_around_counts_the_stored_bytes(mode: Any, store: Any, use_reentrant: bool) -> None:
    module, (x, _) = block(), data()
    weight = torch.randn(1, WIDTH, requires_grad=True)
    with pyactcomp.compressed(mode=mode) as c:
        y = nn.functional.linear(x, torch.eye(WIDTH))
        loss = pyactcomp.checkpoint(module, y, store=store, use_reentrant=use_reentrant).sum()
        loss = loss + nn.functional.linear(y, weight).sum()  # a second reader, whose memory is counted already
    loss.backward()
    (stored,) = (t for t in pyactcomp.report(c).tensors if t.unique_bytes and t.shape == (ROWS, WIDTH))
    whole = ROWS * WIDTH * 4
    assert stored.unique_bytes == whole
    assert stored.stored_bytes == (fmt.packed_nbytes(ROWS * WIDTH, 8, 64) if store == "int8" else whole)


@reentrant_or_not
@pytest.mark.parametrize(
    "decides", [lambda x: x * x.topk(4, -1).values.sum(), lambda x: x * (x > 0)], ids=["topk", "compares"]
)
def test_inputs_of_a_block_that_decides_by_values_stay_exact(
    decides: Callable[[Tensor], Tensor], use_reentrant: bool
) -> None:
    module, (x, w) = block(), data()
    function = lambda y: module(decides(y))  # noqa: E731
    got = gradients(lambda y: pyactcomp.checkpoint(function, y, use_reentrant=use_reentrant), x, w, module)
    assert_equal(got, gradients(function, x, w, module))


@reentrant_or_not
@pytest.mark.parametrize("preserve", [True, False])
def test_random_state_is_kept_as_torch_keeps_it(preserve: bool, use_reentrant: bool) -> None:
    module = nn.Sequential(block(), nn.Dropout(0.5))
    x, w = data()
    options: dict[str, Any] = {"use_reentrant": use_reentrant, "preserve_rng_state": preserve}
    ours = gradients(lambda y: pyactcomp.checkpoint(module, y, store="exact", **options), x, w, module)
    assert_equal(ours, gradients(lambda y: torch_checkpoint(module, y, **options), x, w, module))
    assert (distance(ours, gradients(module, x, w, module)) == 0) == preserve


def test_keywords_and_outputs_pass_through() -> None:
    module, (x, w) = block(), data()
    entered: list[str] = []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    def function(
        y: Tensor, factors: list[float], *, shift: Tensor, flag: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        return module(y) * factors[0] + shift, {"flag": flag, "none": None}

    shift = torch.randn(WIDTH, requires_grad=True)
    out, rest = pyactcomp.checkpoint(
        function,
        x * 2,
        [3.0],
        shift=shift,
        flag=True,
        context_fn=lambda: (note("first"), note("again")),
        determinism_check="none",
        early_stop=False,
    )
    assert rest == {"flag": True, "none": None}
    assert entered == ["first"]
    (out * w).sum().backward()
    assert entered == ["first", "again"]
    assert torch.equal(shift.grad, w.sum(0))


def test_torchs_check_and_early_stop_act_on_the_second_run() -> None:
    x, w = data()
    runs: list[int] = []

    def changes(y: Tensor) -> Tensor:
        runs.append(0)
        return (y.sin() if len(runs) == 1 else y[:1].sin()).sum() * w

    with pytest.raises(CheckpointError, match="different metadata"):
        pyactcomp.checkpoint(changes, x * 2).sum().backward()

    reached: list[int] = []

    def marks(y: Tensor) -> Tensor:
        out = y.sin()
        reached.append(0)
        return out

    for early_stop, count in ((True, 1), (False, 2)):
        reached.clear()
        pyactcomp.checkpoint(marks, x * 2, early_stop=early_stop).sum().backward()
        assert len(reached) == count


@reentrant_or_not
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_an_input_without_gradient_is_as_in_torch(use_reentrant: bool) -> None:
    module, (x, w) = block(), data()
    position = torch.randn(ROWS, WIDTH)
    function = lambda y, p: module(y + p)  # noqa: E731
    got = gradients(lambda y: pyactcomp.checkpoint(function, y, position, use_reentrant=use_reentrant), x, w, module)
    expected = gradients(lambda y: function(restored(y), position), x, w, module)
    assert_equal(got, expected)
    with torch.no_grad():
        out = pyactcomp.checkpoint(module, x * 2, use_reentrant=use_reentrant)
    assert not out.requires_grad
    assert torch.equal(out, module(x * 2))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("inner", [False, True], ids=["inner nonreentrant", "inner reentrant"])
@reentrant_or_not
def test_nested_checkpoints_store_the_outer_input(use_reentrant: bool, inner: bool) -> None:
    first, second = block(), block()
    both = nn.ModuleList([first, second])
    x, w = data()

    def function(y: Tensor, store: Any = "int8") -> Tensor:
        return pyactcomp.checkpoint(second, first(y), store=store, use_reentrant=inner)

    exact = gradients(lambda y: second(first(y)), x, w, both)
    got = gradients(lambda y: pyactcomp.checkpoint(function, y, use_reentrant=use_reentrant), x, w, both)
    assert 0 < distance(got, exact) <= GRADIENT_BOUND
    held: list[StorageWeakRef] = []
    first.register_forward_hook(lambda _module, _args, out: held.append(StorageWeakRef(out.untyped_storage())))
    out = pyactcomp.checkpoint(function, x * 2, "exact", use_reentrant=use_reentrant)
    gc.collect()
    assert held[0].expired(), "the outer rerun makes the inner input again"
    out.sum().backward()


@reentrant_or_not
def test_an_exception_leaves_no_hook_and_no_pending_input(use_reentrant: bool) -> None:
    module, (x, w) = block(), data()

    class Stop(BaseException):
        pass

    def fails(y: Tensor, error: type[BaseException]) -> Tensor:
        module(y)
        raise error("stop")

    for error in (ValueError, Stop, KeyboardInterrupt):
        with pytest.raises(error):
            pyactcomp.checkpoint(fails, x * 2, error, use_reentrant=use_reentrant)
        assert top_saved_tensor_hooks() is None
    at_codes = gradients(lambda y: module(restored(y)), x, w, module)
    again = gradients(lambda y: pyactcomp.checkpoint(module, y, use_reentrant=use_reentrant), x, w, module)
    assert_equal(again, at_codes)


@pytest.mark.parametrize("store", ["int8", "exact"])
def test_an_input_changed_after_the_block_raises_autograds_error(store: Any) -> None:
    module, (x, _) = block(), data()
    y = nn.functional.linear(x, torch.eye(WIDTH))
    out = pyactcomp.checkpoint(module, y, store=store)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("around", [nullcontext, pyactcomp.compressed], ids=["alone", "compressed"])
def test_backward_runs_twice(around: Callable[[], Any]) -> None:
    module, (x, w) = block(), data()
    with around():
        loss = (pyactcomp.checkpoint(module, x * 2) * w).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert_equal(torch.autograd.grad(loss, x), first)


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_block_and_a_compiled_call() -> None:
    module, (x, w) = block(), data()
    at_codes = gradients(lambda y: module(restored(y)), x, w, module)
    exact = gradients(module, x, w, module)
    compiled = torch.compile(module, backend="aot_eager")
    assert_equal(gradients(lambda y: pyactcomp.checkpoint(compiled, y), x, w, module), at_codes)
    # A graph around the call stores the inputs as the graph does: here as they are.
    whole = torch.compile(lambda y: pyactcomp.checkpoint(module, y), backend="aot_eager", fullgraph=True)
    assert_equal(gradients(whole, x, w, module), exact)


def test_switched_off_the_inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x, w) = block(), data()
    exact = gradients(module, x, w, module)
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    assert_equal(gradients(lambda y: pyactcomp.checkpoint(module, y), x, w, module), exact)


def test_bad_arguments_name_value_and_remedy() -> None:
    x, _ = data()
    with pytest.raises(ValueError, match=r"store must be one of \('int8', 'exact'\), got 'int4'"):
        pyactcomp.checkpoint(block(), x, store="int4")
    with pytest.raises(TypeError, match="expects a function or a module"):
        pyactcomp.checkpoint(x, block())
    with pytest.raises(ValueError, match="Unexpected keyword arguments: flag"):
        pyactcomp.checkpoint(block(), x, use_reentrant=True, flag=True)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(pyactcomp.HookConflictError, match="save_on_cpu"):
        pyactcomp.checkpoint(block(), x)


def test_it_serves_in_place_of_torchs_function() -> None:
    module, (x, w) = block(), data()
    at_codes = gradients(lambda y: module(restored(y)), x, w, module)
    assert_equal(gradients(checkpoint_wrapper(module, checkpoint_fn=pyactcomp.checkpoint), x, w, module), at_codes)
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    model = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=32).train()
    image = torch.randn(1, 3, 32, 32)
    leaves = tuple(model.parameters())

    def step() -> tuple[Tensor, ...]:
        loss = model(image).sample.square().sum()
        return tuple(each for each in torch.autograd.grad(loss, leaves, allow_unused=True) if each is not None)

    model.enable_gradient_checkpointing()
    exact = step()
    pyactcomp.use_checkpoint(model)
    ours = step()
    model.enable_gradient_checkpointing(pyactcomp.checkpoint)
    assert_equal(step(), ours)
    assert 0 < distance(ours, exact) <= GRADIENT_BOUND
