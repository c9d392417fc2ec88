"""What a fused call costs the host: calls of this package's Python, which a model pays for at each of its layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

import pyactcomp
from pyactcomp.codec.kernels import triton as kernels
from pyactcomp.config import Config
from pyactcomp.engine.marks import RECIPE
from pyactcomp.engine.saved import Recipe
from pyactcomp.functional import Codes, gelu, layer_norm, rms_norm, rope, saving, silu_mul
from pyactcomp.functional.convolutional.batch_norm import batch_norm
from pyactcomp.functional.norms.add_rms_norm import add_rms_norm
from pyactcomp.functional.norms.layer_norm import add_layer_norm
from pyactcomp.fusions import fuse

pytest.importorskip("triton")

PACKAGE = str(Path(pyactcomp.__file__).parent)
ROWS, WIDTH = 16, 64
CODES = Codes(impl="triton")


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels serve CPU tensors, and launch none: results are memory as it was."""
    monkeypatch.setattr(saving, "_triton_serves", lambda *_: True)
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels.Launcher, "__call__", lambda *_: None)


def calls(function: Callable[[], object]) -> int:
    """Return how many functions of this package, written in Python, a function calls."""
    found = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(found)


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


X, Y, WEIGHT, BIAS = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH), leaf(WIDTH), leaf(WIDTH)
IMAGES = torch.ones(2, WIDTH, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
HEADS, ANGLES = leaf(1, 2, 8, WIDTH), torch.ones(1, 8, WIDTH)
CALLS: dict[str, tuple[Callable[[], Tensor], int, int, int]] = {
    "layer_norm": (lambda: layer_norm(X, WIDTH, WEIGHT, BIAS, codes=CODES), 26, 0, 0),
    "add_layer_norm": (lambda: add_layer_norm(X, Y, WIDTH, WEIGHT, BIAS, codes=CODES), 32, 0, 0),
    "rms_norm": (lambda: rms_norm(X, WEIGHT, 1e-6, codes=CODES), 18, 0, 0),
    "add_rms_norm": (lambda: add_rms_norm(X, Y, WEIGHT, 1e-6, codes=CODES)[0], 48, 6, 2),
    "batch_norm": (lambda: batch_norm(IMAGES, None, None, WEIGHT, BIAS, relu=True, codes=CODES), 30, 0, 0),
    "gelu": (lambda: gelu(X, codes=CODES), 12, 0, 0),
    "silu_mul": (lambda: silu_mul(X, Y, codes=CODES), 48, 13, 8),
    "rope": (lambda: rope(HEADS, HEADS, ANGLES, ANGLES, impl="triton")[0], 42, 10, 0),
}
"""A fused call, and the most calls of Python in its forward, its backward, and to recompute its result."""


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_call_runs_few_functions_of_python(name: str) -> None:
    function, forward, backward, recompute = CALLS[name]
    found: list[tuple[int, int, int]] = []
    for _ in range(2):  # the first call fills the caches
        out: list[Tensor] = []
        in_forward = calls(lambda: out.append(function()))  # noqa: B023
        result, grad = out[0], torch.ones_like(out[0])
        recipe: Recipe | None = RECIPE.get(result)
        assert (recipe is None) == (name == "rope")
        again = 0 if recipe is None else calls(lambda: recipe.compute(torch.float32))  # noqa: B023
        found.append((in_forward, calls(lambda: result.backward(grad)), again))  # noqa: B023
    assert all(count <= most for count, most in zip(found[1], (forward, backward, recompute), strict=True)), found[1]


@pytest.mark.parametrize(
    ("module", "most"),
    [
        (nn.LayerNorm(WIDTH), 2),
        (nn.LayerNorm(WIDTH, elementwise_affine=False), 2),
        (nn.RMSNorm(WIDTH, eps=1e-6), 1),
        (nn.GELU(), 1),
        (nn.GELU(approximate="tanh"), 1),
    ],
    ids=str,
)
def test_a_fused_module_goes_from_forward_to_its_function_in_the_library(module: nn.Module, most: int) -> None:
    model = nn.Sequential(module)
    fuse(model, Config(min_bytes=0, impl="triton"))
    found = []
    for _ in range(2):  # the first call fills the caches
        out: list[Tensor] = []
        in_forward = calls(lambda: out.append(model(X)))  # noqa: B023
        assert "pac::functions::" in out[0].grad_fn.name()  # type: ignore[union-attr]
        grad = torch.ones_like(out[0])
        found.append((in_forward, calls(lambda: out[0].backward(grad))))  # noqa: B023
    assert found[1] <= (most, 0)
