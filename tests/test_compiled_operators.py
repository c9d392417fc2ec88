"""One sample of each of 24 of PyTorch's own operators, drawn once, through compressed graphs."""

from __future__ import annotations

import random

import pytest
import torch
from compiled_backend import backend
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_databases import operators

from pyactcomp.compiled.graphs import GraphRecord
from pyactcomp.config import Config

OPERATORS = {f"{op.name} {op.variant_test_name}".strip(): op for op in operators if torch.float32 in op.dtypes}
# Each takes most of a second to compile three times; all of them take minutes.
DRAWN = list(OPERATORS)
random.Random(1).shuffle(DRAWN)


def _gradients(op: object, sample: object, config: Config | None) -> list[Tensor]:
    torch._dynamo.reset()
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [k for k, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
    leaves = [flat[k].detach().clone().requires_grad_() for k in at]

    def step(*inputs: Tensor) -> Tensor:
        values = list(flat)
        for k, x in zip(at, inputs, strict=True):
            values[k] = x * 1.5
        first, args, kwargs = tree_unflatten(values, spec)
        outputs = [y for y in tree_flatten(op(first, *args, **kwargs))[0] if isinstance(y, Tensor)]
        return sum((y.float() * y.float().detach().cos()).sum() for y in outputs if y.is_floating_point())

    torch.manual_seed(0)
    records: list[GraphRecord] = []
    loss = torch.compile(step, backend=backend(config, records), fullgraph=True)(*leaves)
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


# Torch warns of its own beta features.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWN[:24])
def test_operator(name: str) -> None:
    op = OPERATORS[name]
    sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=True)), None)
    if sample is None or not op.supports_autograd:
        pytest.skip("no gradient")
    try:
        expected = _gradients(op, sample, None)
    except Exception as error:
        pytest.skip(f"torch compiles no such step: {type(error).__name__}")
    for config in (Config(min_bytes=0), Config(mode="lossless", min_bytes=0)):
        got = _gradients(op, sample, config)
        for a, b in zip(got, expected, strict=True):
            assert (a is None) == (b is None)
            if a is None or not bool(b.isfinite().all()):
                continue
            if config.mode == "lossless":
                assert torch.equal(a, b)
            else:
                size = float(b.double().norm())
                assert float((a - b).double().norm()) <= 0.02 * size + 1e-5
