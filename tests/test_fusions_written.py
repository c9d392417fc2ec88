"""Norms that a program writes out are fused by what they compute, and compute what they did."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from compiled_backend import as_inductor
from torch import Tensor, nn
from works_with import GRADIENT_BOUND, relative_error
from written_norms import NORMS, OTHERS, Derived, Llama

import pyactcomp
from pyactcomp.fusions import fused_modules

WIDTH = 128
# What torch says of a bfloat16 input and a float32 weight, with compression or without.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


class Block(nn.Module):
    """A norm between two Linears, after which the values are added up."""

    def __init__(self, norm: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, width), norm, nn.Linear(width, width)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(x)
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_rounded_alike(out: Tensor, expected: Tensor) -> None:
    """Assert that float32 results differ by a few roundings of each element, by another order of operations."""
    eps = torch.finfo(out.dtype).eps
    assert torch.allclose(out, expected, rtol=64 * eps, atol=8 * eps)


def rows(dtype: torch.dtype = torch.float32, width: int = WIDTH) -> Tensor:
    return torch.randn(4, 64, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def is_fused(model: nn.Module) -> bool:
    return ("norm", "WrittenNorm") in fused_modules(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_written_norm_computes_what_it_did(norm: type[nn.Module], dtype: torch.dtype) -> None:
    plain = Block(norm(WIDTH)).to(dtype)
    if norm is Derived:  # torch's layer norm of float32 rows refuses other parameters
        plain.norm.float()
    model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1)
    assert is_fused(model)
    expected, exact = step(plain, rows(dtype))
    out, got = step(model, rows(dtype))
    if dtype is torch.float32:
        assert_rounded_alike(out, expected)
    else:
        assert torch.equal(out, expected)
    assert relative_error(got, exact) <= GRADIENT_BOUND
    # The norm's input is stored, and its output computed again.
    stored = [t for t in pyactcomp.report(model).tensors if t.module == "norm" and t.stored_bytes > WIDTH * 4]
    assert len([t for t in stored if t.shape == (4, 64, WIDTH)]) == 1


@pytest.mark.parametrize("norm", OTHERS)
def test_what_does_more_than_a_norm_is_left_alone(norm: type[nn.Module], capsys: pytest.CaptureFixture[str]) -> None:
    model = Block(norm(WIDTH))
    pyactcomp.compress(model, min_bytes=1)
    assert not is_fused(model)
    # Nothing of it ran.
    assert getattr(model.norm, "calls", 0) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("norm", NORMS)
def test_under_autocast_the_values_are_those_of_the_class(norm: type[nn.Module]) -> None:
    plain = Block(norm(WIDTH))
    model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1)
    with torch.autocast("cpu", torch.bfloat16):
        expected, exact = step(plain, rows())
        out, got = step(model, rows())
    assert torch.equal(out, expected)
    assert relative_error(got, exact) <= GRADIENT_BOUND


def test_a_setting_changed_later_counts() -> None:
    model = pyactcomp.compress(Block(Llama(WIDTH)), min_bytes=1)
    step(model, rows())
    model.norm.eps = 0.5
    plain = pyactcomp.decompress(copy.deepcopy(model))
    expected, exact = step(plain, rows())
    out, got = step(model, rows())
    assert_rounded_alike(out, expected)
    assert relative_error(got, exact) <= GRADIENT_BOUND


def test_what_a_program_writes_to_afterwards_is_read_no_more() -> None:
    """Hand-written residual streams add in place: a norm that computes in float32 has saved nothing of the input."""

    class Stream(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.second(self.norm(x))
            x += y
            return x

    plain = Stream(Llama(WIDTH)).to(torch.bfloat16)
    model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1)
    assert is_fused(model)
    expected, exact = step(plain, rows(torch.bfloat16))
    out, got = step(model, rows(torch.bfloat16))
    assert torch.equal(out, expected)
    assert relative_error(got, exact) <= GRADIENT_BOUND


def test_a_changed_or_wrapped_norm_runs_its_own_code() -> None:
    hooked, replaced, derived = (Block(Llama(WIDTH)) for _ in range(3))
    seen: list[Tensor] = []
    hooked.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    replaced.norm.forward = lambda x: x  # type: ignore[method-assign]
    pyactcomp.compress(hooked, min_bytes=1)
    pyactcomp.compress(replaced, min_bytes=1)
    expected, _ = step(pyactcomp.decompress(copy.deepcopy(hooked)), rows())
    seen.clear()
    out, _ = step(hooked, rows())
    assert len(seen) == 1
    assert_rounded_alike(out, expected)
    assert not is_fused(replaced)
    pyactcomp.compress(derived, min_bytes=1)
    assert type(pickle.loads(pickle.dumps(pyactcomp.decompress(derived).norm))) is Llama


@pytest.mark.parametrize("norm", NORMS)
def test_strides_and_arguments_are_those_of_the_class(norm: type[nn.Module]) -> None:
    plain = norm(WIDTH)
    fused = pyactcomp.compress(nn.Sequential(copy.deepcopy(plain)), min_bytes=1)[0]
    x = rows().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    expected, out = plain(x), fused(x)
    assert out.stride() == expected.stride()
    assert torch.equal(out, expected)
    (name,) = list(inspect.signature(norm.forward).parameters)[1:]
    assert torch.equal(fused(**{name: x}), expected)
    with pytest.raises(TypeError):
        fused(x, x)


def test_a_compiled_model_is_one_graph() -> None:
    plain = Block(Llama(WIDTH))
    model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=1)
    assert is_fused(model)
    expected, exact = step(plain, rows())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=as_inductor, fullgraph=True)
    out, _ = step(compiled, rows())
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_rounded_alike(out, expected)
    assert relative_error(got, exact) <= GRADIENT_BOUND


def test_lossless_leaves_them_alone() -> None:
    plain = Block(Llama(WIDTH))
    model = pyactcomp.compress(copy.deepcopy(plain), mode="lossless", min_bytes=1)
    assert not is_fused(model)
    expected, exact = step(plain, rows())
    out, got = step(model, rows())
    assert torch.equal(out, expected)
    assert all(torch.equal(got[name], exact[name]) for name in exact)
