"""Fused modules: torch's own, and how any of them is swapped and comes back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from works_with import GRADIENT_BOUND, WIDTH, Transformer, gradients, regression, relative_error

import pyactcomp
from pyactcomp import PyactcompError
from pyactcomp.config import Config
from pyactcomp.engine import reasons
from pyactcomp.fusions import fuse, fused_modules, left_alone, unfuse
from pyactcomp.fusions.families import torch_modules
from pyactcomp.fusions.formulas import children_fed, definition, formula
from pyactcomp.fusions.fusion import Fused, Fusion, fused_class

CONFIG = Config(min_bytes=0)


def transformer(blocks: int = 2, use_reentrant: bool | None = None) -> Transformer:
    torch.manual_seed(0)
    return Transformer(blocks, use_reentrant)


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = regression("cpu")
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_step_equals(model: nn.Module, other: nn.Module) -> None:
    loss, got = step(model)
    expected_loss, expected = step(other)
    assert torch.equal(loss, expected_loss)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def assert_fused_runs(model: nn.Module, exact: nn.Module) -> None:
    """Assert that gradients come from codes: near the exact ones, and not equal to them."""
    assert 0.0 < relative_error(step(model)[1], step(exact)[1]) <= GRADIENT_BOUND


def test_fused_step_agrees_with_the_exact_one() -> None:
    exact = transformer()
    model = copy.deepcopy(exact)
    fuse(model, CONFIG)
    kinds = [kind for _, kind in fused_modules(model)]
    assert kinds.count("LayerNorm") == 4
    assert kinds.count("GELU") == 2
    loss, got = step(model)
    expected_loss, expected = step(exact)
    # The functions compute what the modules do, in float32: a sum of n terms is off by at most n * eps in each.
    bound = len(kinds) * WIDTH * torch.finfo(torch.float32).eps
    torch.testing.assert_close(loss, expected_loss, rtol=bound, atol=0.0)
    assert 0.0 < relative_error(got, expected) <= GRADIENT_BOUND


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(64), (32, 64)),
        (nn.LayerNorm((4, 64)), (8, 4, 64)),
        (nn.LayerNorm(64, elementwise_affine=False), (32, 64)),
        (nn.LayerNorm(64, bias=False), (32, 64)),
        (nn.RMSNorm(64, eps=1e-6), (32, 64)),
        (nn.GELU(), (32, 64)),
        (nn.GELU(approximate="tanh"), (32, 64)),
        (nn.MaxPool2d(3, stride=2, padding=1), (2, 8, 16, 16)),
    ],
    ids=str,
)
def test_fused_module_computes_what_its_class_does(module: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(module))
    exact = copy.deepcopy(model)
    fuse(model, CONFIG)
    assert [name for name, _ in fused_modules(model)] == ["0"]
    x = torch.randn(shape, requires_grad=True)
    weights = torch.randn_like(exact(x.detach()))
    grads = {}
    for name, candidate in (("fused", model), ("exact", exact)):
        out = candidate(x)
        grads[name] = {"out": out.detach(), "x": torch.autograd.grad((out * weights).sum(), x)[0]}
    # Float32 on both sides: sums over a row of up to 256 elements, in another order.
    rtol = 256 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(grads["fused"]["out"], grads["exact"]["out"], rtol=rtol, atol=rtol)
    assert relative_error({"x": grads["fused"]["x"]}, {"x": grads["exact"]["x"]}) <= GRADIENT_BOUND


@pytest.mark.parametrize("norm", [nn.RMSNorm(64), nn.RMSNorm((2, 64), eps=1e-6), nn.RMSNorm(64, 1e-6, False)], ids=str)
def test_a_norm_of_another_formula_is_not_fused(norm: nn.RMSNorm) -> None:
    fuse(norm, CONFIG)
    assert not fused_modules(norm)


def test_modules_that_the_functions_do_not_serve_run_as_their_own() -> None:
    for module, x in (
        (nn.MaxPool2d(2, dilation=2), torch.randn(1, 2, 8, 8, requires_grad=True)),
        (nn.MaxPool2d(3, stride=2, ceil_mode=True), torch.randn(1, 2, 8, 8, requires_grad=True)),
    ):
        expected = module(x)
        fuse(module, CONFIG)
        assert len(fused_modules(module)) == 1
        assert torch.equal(module(x), expected)


def test_unfuse_gives_back_what_was_there() -> None:
    model = transformer()
    exact = copy.deepcopy(model)
    attributes = [set(module.__dict__) for module in model.modules()]
    fuse(model, CONFIG)
    assert classes(model) != classes(exact)
    unfuse(model)
    assert classes(model) == classes(exact)
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert_step_equals(model, exact)


def test_names_state_dicts_and_types_stay() -> None:
    exact = transformer()
    model = copy.deepcopy(exact)
    fuse(model, CONFIG)
    assert list(model.state_dict()) == list(exact.state_dict())
    assert repr(model) == repr(exact)
    for module, original in zip(model.modules(), exact.modules(), strict=True):
        assert isinstance(module, type(original))
        assert type(module).__name__ == type(original).__name__
    other = transformer()
    nn.init.normal_(other.head.weight)
    model.load_state_dict(other.state_dict())
    exact.load_state_dict(model.state_dict())
    assert torch.equal(exact.head.weight, other.head.weight)


def _through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _through_pickle, _through_torch_save])
def test_copies_are_fused_and_independent(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model = transformer()
    exact = copy.deepcopy(model)
    fuse(model, CONFIG)
    twin = duplicate(model)
    assert fused_modules(twin) == fused_modules(model)
    assert_step_equals(twin, model)
    unfuse(model)
    assert_fused_runs(twin, exact)
    unfuse(twin)
    assert classes(twin) == classes(exact)


def test_evaluation_and_no_grad_run_the_own_forward() -> None:
    model = transformer()
    exact = copy.deepcopy(model)
    fuse(model, CONFIG)
    inputs, _ = regression("cpu")
    with torch.no_grad():
        assert torch.equal(model(inputs), exact(inputs))
    assert_step_equals(model.eval(), exact.eval())


def test_disabled_and_paused_steps_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    exact = copy.deepcopy(model)
    state = fuse(model, CONFIG)
    state.paused = True
    assert_step_equals(model, exact)
    state.paused = False
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    assert_step_equals(model, exact)
    monkeypatch.delenv("PYACTCOMP_DISABLE")
    assert_fused_runs(model, exact)


def test_tensors_below_min_bytes_stay_exact() -> None:
    model = transformer()
    exact = copy.deepcopy(model)
    fuse(model, Config(min_bytes=2**30))
    assert fused_modules(model)
    assert_step_equals(model, exact)


def test_functorch_transforms_run_the_own_forward() -> None:
    model = transformer()
    exact = copy.deepcopy(model)
    fuse(model, CONFIG)
    inputs, targets = regression("cpu")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], candidate: nn.Module) -> Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(candidate, values, (inputs,)), targets)

    got, expected = (torch.func.grad(loss)(parameters, candidate) for candidate in (model, exact))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_checkpointed_blocks_give_the_gradients_of_plain_ones() -> None:
    plain = transformer()
    checkpointed = transformer(use_reentrant=False)
    checkpointed.load_state_dict(plain.state_dict())
    for model in (plain, checkpointed):
        fuse(model, CONFIG)
    assert_step_equals(checkpointed, plain)


def test_module_used_twice_is_fused_once() -> None:
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    exact = nn.Sequential(linear, norm, nn.Linear(WIDTH, WIDTH), norm)
    model = copy.deepcopy(exact)
    fuse(model, CONFIG)
    assert fused_modules(model) == [("1", "LayerNorm")]
    x = torch.randn(32, WIDTH)
    for candidate in (model, exact):
        candidate(x).square().mean().backward()
    assert 0.0 < relative_error(gradients(model), gradients(exact)) <= GRADIENT_BOUND


def test_skipped_modules_and_all_in_them_are_left() -> None:
    model = transformer()
    fuse(model, CONFIG, [model.blocks[0], model.blocks[1].mlp_norm])
    assert [name for name, _ in fused_modules(model)] == ["blocks.1.attention_norm", "blocks.1.mlp.1"]


def test_nothing_is_fused_where_that_is_switched_off() -> None:
    model = transformer()
    before = classes(model)
    fuse(model, Config(fuse=False))
    assert classes(model) == before
    assert left_alone(model) == []


def test_lossless_mode_swaps_exact_forms_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.GELU(), nn.LayerNorm(4), nn.Dropout(0.1))
    fuse(model, Config(mode="lossless"))
    assert fused_modules(model) == [("1", "MaxPool2d"), ("4", "Dropout")]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def dropped(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, its gradient and the gradient's own."""
    torch.manual_seed(1)
    out = model(x)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
    (once,) = torch.autograd.grad(out.sin().sum(), x)
    return [out.detach(), first.detach(), second, once]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_dropout_is_torchs_to_the_bit(mode: str, dtype: torch.dtype, device: str) -> None:
    # A transposed input: dropout's mask is laid out as its input is, the gradient need not be.
    x = torch.randn(64, 48, device=device).to(dtype).requires_grad_()
    exact = nn.Sequential(nn.Identity(), nn.Dropout(0.3))
    model = copy.deepcopy(exact)
    fuse(model, Config(mode=mode, min_bytes=0))
    for layout in (x, x.t()):
        leaf = layout.detach().requires_grad_()
        for got, expected in zip(dropped(model, leaf), dropped(exact, leaf), strict=True):
            assert torch.equal(got, expected)


class Probabilities(nn.Module):
    """Attention whose probabilities are the softmax's result, as it is or not."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, changed: bool) -> Tensor:
        probabilities = x.softmax(-1)
        kept = self.dropout(probabilities + 1 if changed else probabilities)
        self.node = kept.grad_fn.name()  # type: ignore[union-attr]
        return kept @ x


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_a_stored_result_is_torchs_own(device: str) -> None:
    # On a GPU that is computed again from the result and the mask: torch has an operator for it there.
    x = torch.randn(64, 64, device=device, requires_grad=True)
    model = pyactcomp.compress(Probabilities(), mode="lossless", min_bytes=0)
    model(x, changed=False)
    assert ("pac::functions::Dropout" in model.node) == (device == "cpu")
    assert (reasons.RECOMPUTED in [t.kept for t in pyactcomp.report(model).tensors]) == (device == "cuda")
    model(x, changed=True)
    assert ("pac::functions::Dropout" in model.node) == (device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", ["freed", "edited", "nothing"])
def test_dropout_takes_the_same_way_in_a_checkpoint_and_its_recomputation(change: str, device: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.linear = nn.Dropout(0.3), nn.Linear(64, 64)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            inner = x.softmax(-1)

            def inside(y: Tensor) -> Tensor:
                return self.linear(self.dropout(inner) * y)

            return inner, checkpoint(inside, y, use_reentrant=False)

    torch.manual_seed(0)
    x, y = (torch.randn(64, 64, device=device, requires_grad=True) for _ in range(2))
    exact = Outer().to(device)
    model = pyactcomp.compress(copy.deepcopy(exact), mode="lossless", min_bytes=0)
    found = []
    for candidate in (model, exact):
        torch.manual_seed(1)
        inner, out = candidate(x, y)
        if change == "freed":
            inner.sum().backward(inputs=[x])
        elif change == "edited":
            with torch.no_grad():
                inner.mul_(1)
        found.append(torch.autograd.grad(out.sum(), [y, *candidate.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_takes_batches_of_gradients(device: str) -> None:
    x = torch.randn(8, 16, device=device, requires_grad=True)
    grads = torch.randn(3, 8, 16, device=device)
    exact = nn.Dropout(0.3)
    model = copy.deepcopy(exact)
    fuse(model, CONFIG)
    found = []
    for module in (model, exact):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(module(x), x, grads, is_grads_batched=True)[0])
    assert torch.equal(*found)


@pytest.mark.gpu
def test_a_kernel_that_is_given_a_batch_of_gradients_says_what_to_do() -> None:
    module = nn.LayerNorm(64, device="cuda")
    fuse(module, CONFIG)
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    with pytest.raises(PyactcompError, match="one by one"):
        torch.autograd.grad(module(x), x, torch.randn(3, 8, 64, device="cuda"), is_grads_batched=True)


def test_dropout_of_nothing_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(1.0), nn.Dropout(0.5))
    fuse(model, CONFIG)
    assert fused_modules(model) == [("2", "Dropout")]
    # Not one that others changed either: a report does not name it.
    assert left_alone(model) == []


def test_dropout_in_place_is_torchs_own() -> None:
    module = nn.Dropout(0.3, inplace=True)
    fuse(module, CONFIG)
    x = torch.randn(64, 64, requires_grad=True) * 1
    assert module(x) is x


class OwnNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


class OurHook:
    def __call__(self, *_: object) -> None:
        return None


OurHook.__module__ = "pyactcomp.compress"


def test_modules_that_others_changed_are_left_alone_and_named() -> None:
    names = (
        "patched",
        "backward_hooked",
        "compiled",
        "parametrized",
        "own",
        "ours",
        "plain",
    )
    model = nn.ModuleDict({name: nn.LayerNorm(64) for name in names})
    model["own"] = OwnNorm(64)
    model["patched"].forward = lambda x: x
    model["backward_hooked"].register_backward_hook(lambda *_: None)
    model["compiled"].compile()
    nn.utils.parametrize.register_parametrization(model["parametrized"], "weight", nn.Identity())
    model["ours"].register_forward_hook(OurHook())
    before = {name: type(model[name]) for name in names}
    fuse(model, CONFIG)
    assert {name for name, _ in fused_modules(model)} == {"ours", "plain"}
    reasons = {left.name: left.reason for left in left_alone(model)}
    assert reasons.keys() == {*names} - {"ours", "plain"}
    assert "forward was replaced" in reasons["patched"]
    assert "hook" in reasons["backward_hooked"]
    assert "compiled" in reasons["compiled"]
    assert all("derived from LayerNorm" in reasons[name] for name in ("parametrized", "own"))
    assert all(type(model[name]) is before[name] for name in reasons)
    assert left_alone(copy.deepcopy(model)) == left_alone(model)


def test_class_with_a_patched_forward_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x

    monkeypatch.setattr(nn.LayerNorm, "forward", forward)
    model = transformer()
    fuse(model, CONFIG)
    assert {kind for _, kind in fused_modules(model)} == {"GELU"}
    assert {left.type for left in left_alone(model)} == {"LayerNorm"}


def test_error_midway_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer()
    before = classes(model), [set(module.__dict__) for module in model.modules()]
    forms = torch_modules.by_class(())

    class Larger(Fused):
        __slots__ = ("extra",)

    broken = Fusion(fused_class(Larger, nn.GELU))
    monkeypatch.setattr(torch_modules, "by_class", lambda classes: forms | {nn.GELU: broken})
    with pytest.raises(TypeError, match="layout differs"):
        pyactcomp.compress(model)
    assert (classes(model), [set(module.__dict__) for module in model.modules()]) == before


def _branches(self: nn.Module, x: Tensor, flag: bool) -> Tensor:
    rows = x.shape[0]
    y = self.first(x)
    if flag:
        x = self.second(x)
    else:
        x = y
    return x.view(rows, -1)


def _one_branch(self: nn.Module, x: Tensor, flag: bool) -> Tensor:
    if flag:
        x = self.first(x)
    return x + 1


def _swapped(a: Tensor, b: Tensor) -> Tensor:
    a, b = b, a
    return a - b


def _renamed(a: Tensor, b: Tensor) -> Tensor:
    total = a + b
    a = total * 2
    return a / total


def test_source_is_read_as_it_runs() -> None:
    assert children_fed(definition(_branches)) == {"first", "second"}
    assert children_fed(definition(_one_branch)) == frozenset()
    assert formula(definition(_renamed)) == "(a + b) * 2 / (a + b)"
    assert formula(definition(_swapped)) is None
    assert definition(torch.no_grad()(_renamed)) is None


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


# A Linear's result is a view, which FSDP tells users not to write to.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
@pytest.mark.usefixtures("one_process")
def test_fully_shard_after_fusing() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    exact = transformer()
    model = copy.deepcopy(exact)
    fuse(model, CONFIG)
    kinds = fused_modules(model)
    mesh = init_device_mesh("cpu", (1,))
    for module in (model.blocks[0].mlp_norm, model.blocks[1], model):
        fully_shard(module, mesh=mesh)
    assert fused_modules(model) == kinds
    loss, sharded = step(model)
    got = {name: gradient.full_tensor() for name, gradient in sharded.items()}
    expected_loss, expected = step(exact)
    torch.testing.assert_close(loss, expected_loss, rtol=6 * WIDTH * torch.finfo(torch.float32).eps, atol=0.0)
    assert 0.0 < relative_error(got, expected) <= GRADIENT_BOUND
    unfuse(model)
    assert fused_modules(model) == []
    loss, sharded = step(model)
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(sharded[name].full_tensor(), expected[name]) for name in expected)


class _Scaled(nn.Module):
    """A norm out of operators, of which the last is a product with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True)))


# Its output is read by the next block, whose backward runs before this one's parameters are gathered again.
@pytest.mark.parametrize("last", [nn.LayerNorm, _Scaled])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("mode", "fused"), [("int8", True), ("int8", False), ("lossless", False)])
@pytest.mark.usefixtures("one_process")
def test_norm_at_the_end_of_a_sharded_block_is_computed_again(
    mode: str, fused: bool, trained: bool, last: Callable[[int], nn.Module]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    exact = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), last(WIDTH)) for _ in range(3)))
    for block in exact:
        block[2].requires_grad_(trained)
    model = copy.deepcopy(exact)
    pyactcomp.compress(model, mode=mode, fuse=fused, min_bytes=0)
    mesh = init_device_mesh("cpu", (1,))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    x, target = torch.randn(2, 128, WIDTH)
    steps = []
    for each in (exact, model, model, model):
        each.zero_grad()
        nn.functional.mse_loss(each(x), target).backward()
        grads = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        steps.append({name: grad if each is exact else grad.full_tensor() for name, grad in grads.items()})
    error, *others = (relative_error(step, steps[0]) for step in steps[1:])
    assert error == 0.0 if mode == "lossless" else 0.0 < error <= GRADIENT_BOUND
    # Memory that a parameter was freed from is not taken for the parameter when something else has it.
    assert others == [error, error]
    report = pyactcomp.report(model)
    model(x)
    # Of the first two blocks at least.
    assert sum(tensor.kept == reasons.RECOMPUTED for tensor in report.tensors) >= 2


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_around_a_fused_model() -> None:
    exact = transformer()
    model = copy.deepcopy(exact)
    fuse(model, CONFIG)
    wrapped = nn.parallel.DistributedDataParallel(model)
    _, got = step(wrapped)
    got = {name.removeprefix("module."): gradient for name, gradient in got.items()}
    assert 0.0 < relative_error(got, step(exact)[1]) <= GRADIENT_BOUND
