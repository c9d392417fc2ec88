"""``verify``: its figures against ones computed another way, and everything it must leave as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from verify_checks import ROWS, Stateful, batch, hooks, perceptron, square
from works_with import GRADIENT_BOUND

import pyactcomp
from pyactcomp import torch_private
from pyactcomp.codec import reference
from pyactcomp.errors import ImplementationUnavailableError
from pyactcomp.verify import Verification


@pytest.mark.parametrize("already", [False, True], ids=["plain", "compressed"])
def test_error_is_zero_where_nothing_is_compressed(already: bool) -> None:
    model = perceptron()
    if already:
        pyactcomp.compress(model)
    v = pyactcomp.verify(model, batch(), square, min_bytes=2**40)
    assert v.error == 0.0
    assert set(v.errors) == {name for name, _ in model.named_parameters()}
    assert set(v.errors.values()) == {0.0}
    assert v.loss_exact == v.loss_compressed > 0


def test_error_is_above_zero_and_below_the_bar_where_everything_is_compressed() -> None:
    model = perceptron()
    v = pyactcomp.verify(model, batch(), square, min_bytes=0)
    assert 0 < v.error <= GRADIENT_BOUND
    assert v.loss_exact == v.loss_compressed
    # Each of these depends on a compressed tensor; the last bias only on the ReLU's result, of which it takes the sign.
    for name in ("0.weight", "0.bias", "3.weight", "2.weight"):
        assert 0 < v.errors[name] < 0.1
    assert v.worst == max(v.errors, key=lambda name: v.errors[name])


def test_error_equals_that_of_a_gradient_computed_from_the_restored_input() -> None:
    # One layer and the sum of its output: the weight's gradient is the sum of the inputs over the rows, in each row.
    x = batch().double()
    model = nn.Linear(128, 3).double()
    # Packed as an activation is: it requires grad and is no leaf. A plain input would be kept.
    v = pyactcomp.verify(model, x.clone().requires_grad_() * 1, torch.sum, min_bytes=0)
    flat = x.view(-1).float()
    restored = reference.dequantize(reference.quantize(flat), flat.numel()).view_as(x)
    exact, compressed = x.sum(0), restored.double().sum(0)
    expected = float((compressed - exact).norm() / exact.norm())
    # Both gradients are sums of ROWS float64 numbers, each with a relative error of at most ROWS * 2**-53.
    slack = 2 * ROWS * 2.0**-53 * float(x.abs().sum(0).norm() / exact.norm())
    assert expected > 1000 * slack
    assert abs(v.errors["weight"] - expected) <= slack
    assert v.errors["bias"] == 0.0
    assert v.worst == "weight"
    bound = float(reference.error_bound(flat).view_as(x).sum(0).norm() / exact.norm())
    assert v.errors["weight"] <= bound + slack


def test_total_error_weighs_parameters_by_their_gradients() -> None:
    model = perceptron()
    v = pyactcomp.verify(model, batch(), square, min_bytes=0)
    norms = {name: float(p.double().norm()) for name, p in gradients(model, batch()).items()}
    squared = sum((v.errors[name] * norm) ** 2 for name, norm in norms.items())
    total = sum(norm**2 for norm in norms.values())
    assert v.error == pytest.approx((squared / total) ** 0.5, rel=1e-9)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(square(model(x)), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def test_worst_names_the_parameter_with_the_largest_error() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    v = pyactcomp.verify(model, batch(), torch.sum, min_bytes=0, skip=["0", "2"])
    # Only the input of layer 1 is compressed, and it serves the gradient of that layer's weight alone.
    assert {name for name, error in v.errors.items() if error > 0} == {"1.weight"}
    assert v.worst == "1.weight"
    assert v.worst in str(v).splitlines()[1]


def test_options_default_to_those_of_the_compressed_model() -> None:
    model = pyactcomp.compress(perceptron(), min_bytes=2**40)
    assert pyactcomp.verify(model, batch(), square).error == 0.0
    assert pyactcomp.verify(model, batch(), square, min_bytes=0).error > 0.0
    # A batch of 512 rows of 128 float32 is 256 KiB, above the default limit.
    assert pyactcomp.verify(perceptron(), batch(), square).error > 0.0


@pytest.mark.parametrize("already", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_everything_is_left_as_it_was(already: bool, fails: bool) -> None:
    model = Stateful()
    if already:
        pyactcomp.compress(model, min_bytes=0)
    model.drop.eval()
    square(model(batch(1))).backward()
    model.drop.train()
    model.register_forward_hook(lambda *_: None)

    parameters = {name: (p, p.detach().clone(), p.grad, p.grad.clone()) for name, p in model.named_parameters()}  # type: ignore[union-attr]
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    modes = [m.training for m in model.modules()]
    installed = hooks(model)
    random = torch.get_rng_state()
    report = pyactcomp.report(model) if already else None

    def loss(output: Tensor) -> Tensor:
        if fails:
            raise ArithmeticError("of the test")
        return square(output)

    if fails:
        with pytest.raises(ArithmeticError, match="of the test"):
            pyactcomp.verify(model, batch(), loss, min_bytes=0)
    else:
        assert pyactcomp.verify(model, batch(), loss, min_bytes=0).error > 0

    for name, parameter in model.named_parameters():
        same, value, grad, grad_value = parameters[name]
        assert parameter is same
        assert parameter.grad is grad
        assert torch.equal(parameter, value)
        assert torch.equal(grad, grad_value)
    assert {name for name, _ in model.named_buffers()} == set(buffers)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])
    assert [m.training for m in model.modules()] == modes
    assert hooks(model) == installed
    assert torch.equal(torch.get_rng_state(), random)
    assert torch_private.top_saved_tensor_hooks() is None
    if report is not None:
        assert pyactcomp.report(model) == report


def test_a_compressed_model_goes_on_compressing_afterwards() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False, min_bytes=0)
    pyactcomp.verify(model, batch(), square)
    assert "nothing was recorded yet" in pyactcomp.report(model).note
    square(model(batch())).backward()
    report = pyactcomp.report(model)
    # Kept, as they do not require grad: the batch, and the norm's mean and reciprocal deviation of each row.
    kept = ROWS * (128 + 2) * 4
    # Packed: the input of GELU and ReLU's result; the inputs of the norm and of the last layer are computed again.
    # 64 codes share 4 bytes.
    numel = ROWS * (256 + 64)
    assert report.unique_bytes == kept + 4 * (numel + ROWS * 2 * 256)
    assert report.stored_bytes == kept + numel + numel // 64 * 4


def test_both_steps_draw_the_same_random_numbers() -> None:
    # Two draws of a dropout of one half would make the gradients differ by about their own size.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.Dropout(0.5), nn.Linear(256, 64))
    v = pyactcomp.verify(model, batch(), square, min_bytes=0)
    assert v.loss_exact == v.loss_compressed
    assert 0 < v.error <= GRADIENT_BOUND


def test_verify_in_evaluation_mode_keeps_the_mode() -> None:
    model = perceptron().eval()
    assert 0 < pyactcomp.verify(model, batch(), square, min_bytes=0).error <= GRADIENT_BOUND
    assert not any(m.training for m in model.modules())


def test_verify_works_where_gradients_are_switched_off() -> None:
    with torch.no_grad():
        assert pyactcomp.verify(perceptron(), batch(), square, min_bytes=0).error > 0
        assert not torch.is_grad_enabled()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(128, 32)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.gelu(self.layer(x)) * scale


@pytest.mark.parametrize(
    "make", [tuple, list, lambda pair: {"scale": pair[1], "x": pair[0]}], ids=["tuple", "list", "dict"]
)
def test_a_batch_is_spread_over_the_arguments(make: Callable[[Any], Any]) -> None:
    x, scale = batch(), torch.full((ROWS, 1), 3.0)
    model = TwoInputs()
    v = pyactcomp.verify(model, make((x, scale)), square, min_bytes=0)
    expected = float(square(model(x, scale)).detach())
    assert v.loss_exact == expected
    assert 0 < v.error <= GRADIENT_BOUND


def test_the_loss_sees_the_models_output_and_targets_by_closure() -> None:
    model = nn.Linear(128, 10)
    target = torch.randint(0, 10, (ROWS,), generator=torch.Generator().manual_seed(0))
    v = pyactcomp.verify(model, batch(), lambda output: F.cross_entropy(output, target), min_bytes=0)
    assert v.loss_exact == float(F.cross_entropy(model(batch()), target).detach())
    assert 0 < v.error <= GRADIENT_BOUND


def test_frozen_and_unused_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 8))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    model[0].weight.requires_grad_(False)
    v = pyactcomp.verify(model, batch(), square, min_bytes=0)
    assert set(v.errors) == {"0.bias", "1.weight", "1.bias"}


def test_a_model_without_parameters_has_no_error() -> None:
    v = pyactcomp.verify(nn.ReLU(), batch(), square, min_bytes=0)
    assert (v.error, v.errors, v.worst) == (0.0, {}, "")
    assert v.loss_exact == v.loss_compressed == float(square(batch().relu()))


def test_gradients_that_are_exactly_zero_do_not_divide_by_zero() -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 8))
    v = pyactcomp.verify(model, batch(), lambda output: (output * 0.0).sum(), min_bytes=0)
    assert (v.error, set(v.errors.values())) == (0.0, {0.0})


def test_a_verification_is_plain_data_that_names_the_total() -> None:
    v = pyactcomp.verify(perceptron(), batch(), square, min_bytes=0)
    assert pickle.loads(pickle.dumps(v)) == copy.deepcopy(v) == v
    assert isinstance(v, Verification)
    lines = str(v).splitlines()
    assert f"{v.error:.3%}" in lines[0]
    assert f"{len(v.errors)} parameters" in lines[0]
    assert len(lines) == 2 + min(5, len(v.errors)) + len(v.notes)
    assert f"{v.loss_exact:.6g}" in lines[-1 - len(v.notes)]


# Wrong arguments.


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output: output, r"shape \(512, 64\)"),
        (lambda output: 3.0, "float"),
        (lambda output: None, "NoneType"),
        (lambda output: (output.sum(),), "tuple"),
    ],
    ids=["not-scalar", "float", "none", "tuple"],
)
def test_a_loss_that_is_no_scalar_tensor_raises(loss: Callable[[Tensor], Any], got: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"loss_fn must return a scalar tensor, got {got}"):
        pyactcomp.verify(perceptron(), batch(), loss)


def test_a_loss_without_a_graph_raises() -> None:
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        pyactcomp.verify(perceptron(), batch(), lambda output: output.detach().sum())


def test_what_is_no_module_raises() -> None:
    with pytest.raises(TypeError, match=r"verify expects a torch\.nn\.Module, got function"):
        pyactcomp.verify(square, batch(), square)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bits": 8}, TypeError),
        ({"group_size": 3}, ValueError),
        ({"seed": "x"}, TypeError),
        ({"skip": ["nowhere"]}, ValueError),
    ],
    ids=str,
)
def test_wrong_options_raise_and_leave_no_hook(options: dict[str, Any], error: type[Exception]) -> None:
    model = perceptron()
    with pytest.raises(error, match=next(iter(options))):
        pyactcomp.verify(model, batch(), square, **options)
    assert hooks(model) == hooks(perceptron())


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can be used here")
def test_an_implementation_that_cannot_run_here_raises() -> None:
    with pytest.raises(ImplementationUnavailableError, match="impl='cuda' cannot be used for cpu"):
        pyactcomp.verify(perceptron(), batch(), square, impl="cuda")


def test_verifying_a_part_of_a_fused_model_leaves_it_fused() -> None:
    from pyactcomp.fusions import fused_modules

    model = pyactcomp.compress(nn.Sequential(perceptron(), nn.Linear(64, 64), nn.GELU()), min_bytes=0)
    before = fused_modules(model)
    pyactcomp.verify(model[0], batch(), square)
    assert fused_modules(model) == before != []
