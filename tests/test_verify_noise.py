"""``verify``: the worst input column of each weight, and the noise of 16-bit dtypes beside the error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from verify_checks import batch, perceptron, square

import pyactcomp
from pyactcomp.codec import reference
from pyactcomp.verify import Verification


def of(error: float, noise: float | None) -> Verification:
    return Verification(error=error, errors={"a": error}, worst="a", loss_exact=1.0, loss_compressed=1.0, noise=noise)


def test_worst_column_is_that_of_a_gradient_computed_from_the_restored_input() -> None:
    # One layer and the sum of its output: the weight's gradient is the sum of the inputs over the rows, in each row.
    x = batch().double()
    model = nn.Linear(128, 3).double()
    v = pyactcomp.verify(model, x.clone().requires_grad_() * 1, torch.sum, min_bytes=0)
    flat = x.view(-1).float()
    restored = reference.dequantize(reference.quantize(flat), flat.numel()).view_as(x).double()
    expected = ((restored.sum(0) - x.sum(0)).abs() / x.sum(0).abs()).max()
    # Sums of float64 numbers, whose roundings are a millionth of a step of the codes and less.
    assert v.columns == {"weight": pytest.approx(float(expected), rel=1e-6)}
    assert v.columns["weight"] > v.errors["weight"]


@pytest.mark.parametrize("shape", ["vector", "image"])
def test_columns_beside_an_outlying_channel_are_named(shape: str) -> None:
    torch.manual_seed(0)
    if shape == "vector":
        model = nn.Sequential(nn.Linear(128, 128), *(nn.Linear(128, 128) for _ in range(6)))
        inputs = batch()
    else:
        model = nn.Sequential(nn.Conv2d(8, 64, 1), *(nn.Conv2d(64, 64, 1) for _ in range(6)))
        model = model.to(memory_format=torch.channels_last)
        inputs = torch.randn(4, 8, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        model[0].weight[3] *= 1000
        model[1].weight[:, 3] /= 1000
    v = pyactcomp.verify(model, inputs, square, min_bytes=0)
    assert set(v.columns) == {name for name in v.errors if name.endswith("weight")}
    assert max(v.columns, key=lambda name: v.columns[name]) == "1.weight"
    # A step of the codes is that of the channel, which is a thousand times as large as the others.
    assert v.columns["1.weight"] > 10 * v.errors["2.weight"]
    (line,) = [line for line in str(v).splitlines() if line.endswith(f"worst input column {v.columns['1.weight']:.3%}")]
    assert line == f"  {v.errors['1.weight']:.3%}  1.weight, worst input column {v.columns['1.weight']:.3%}"


def test_columns_without_a_gradient_do_not_divide_by_zero() -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 8))
    v = pyactcomp.verify(model, batch(), lambda output: (output * 0.0).sum(), min_bytes=0)
    assert set(v.columns.values()) == {0.0}


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [part for _ in range(4) for part in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*blocks, nn.Linear(128, 64))


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    found = torch.autograd.grad(square(model(x).float()), list(model.parameters()))
    return torch.cat([g.float().flatten() for g in found])


def in_bfloat16(x: Tensor) -> tuple[nn.Module, Tensor, Callable[[], Verification], bool]:
    model, x = deep().bfloat16(), x.bfloat16()
    return model, x, lambda: pyactcomp.verify(model, x, lambda y: square(y.float()), min_bytes=0), False


def under_autocast(x: Tensor) -> tuple[nn.Module, Tensor, Callable[[], Verification], bool]:
    model = deep()

    def verified() -> Verification:
        with torch.autocast("cpu", torch.bfloat16):
            return pyactcomp.verify(model, x, lambda y: square(y.float()), min_bytes=0)

    return model, x, verified, True


@pytest.mark.parametrize("make", [in_bfloat16, under_autocast])
def test_noise_is_of_the_size_of_the_distance_to_float32(
    make: Callable[[Tensor], tuple[nn.Module, Tensor, Callable[[], Verification], bool]],
) -> None:
    model, x, verified, autocast = make(batch())
    torch.manual_seed(1)
    v = verified()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        narrow = gradient(model, x)
    wide = gradient(copy.deepcopy(model).float(), x.float())
    distance = float((narrow - wide).norm() / wide.norm())
    assert v.noise is not None
    # Roundings of gradients count in the distance alone, and both are single draws.
    assert distance / 2 <= v.noise <= 2 * distance
    assert v.history[0].noise == v.noise
    assert f"moves gradients by {v.noise:.3%}" in str(v)
    # The same step has the same noise, and draws no random numbers of torch's.
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = verified()
    assert again.noise == v.noise
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:torch.compile's graph of")
def test_float32_lossless_and_compiled_models_have_no_noise() -> None:
    assert pyactcomp.verify(perceptron(), batch(), square, min_bytes=0).noise is None
    narrow = perceptron().bfloat16()
    lossless = pyactcomp.verify(narrow, batch().bfloat16(), square, mode="lossless", min_bytes=0)
    assert (lossless.error, lossless.noise) == (0.0, None)
    assert set(lossless.columns.values()) == {0.0}
    compiled = torch.compile(narrow, backend="eager")
    assert pyactcomp.verify(compiled, batch().bfloat16(), square, min_bytes=0).noise is None


@pytest.mark.parametrize(
    ("error", "noise", "good", "said"),
    [
        (0.019, None, True, None),
        (0.021, None, False, None),
        (0.027, 0.128, True, "the error is below that"),
        (0.015, 0.013, True, "the error is at most 2 %"),
        (0.027, 0.013, False, "the error is more than that"),
    ],
)
def test_an_error_is_judged_by_the_noise_too(error: float, noise: float | None, good: bool, said: str | None) -> None:
    v = of(error, noise)
    assert v.good is good
    lines = [line for line in str(v).splitlines() if "another rounding" in line]
    assert [line.rpartition(": ")[2] for line in lines] == ([] if said is None else [said])
