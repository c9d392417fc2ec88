"""Ordinary calls of fused modules, which the library lets through: nothing around them is what Python must look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pyactcomp.config import Config
from pyactcomp.engine.marks import FUSING
from pyactcomp.engine.saved import library
from pyactcomp.fusions import fuse, unfuse
from pyactcomp.fusions.fusion import codes_for

ROWS, WIDTH = 16, 64
CONFIG = Config(min_bytes=0, impl="triton")


def fused(module: nn.Module | None = None, config: Config = CONFIG) -> nn.Module:
    model = nn.Sequential(nn.GELU() if module is None else module)
    fuse(model, config)
    return model[0]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (ROWS, WIDTH), dtype=dtype, requires_grad=True)


def ordinary(module: nn.Module, x: Any, constant: bool = False) -> bool:
    return library().ordinary_codes(module, x, constant) is not None


@pytest.mark.parametrize("module", [nn.GELU(), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)], ids=str)
def test_an_ordinary_call_has_the_codes_that_python_gives(module: nn.Module) -> None:
    module, x = fused(module), leaf()
    codes = library().ordinary_codes(module, x, False)
    assert codes is not None
    assert codes is codes_for(module, x)
    constant = torch.ones(ROWS, WIDTH)
    assert library().ordinary_codes(module, constant, True) is codes_for(module, constant, constant=True) is codes
    assert codes_for(module, constant) is None
    assert not ordinary(module, constant)


class _Passing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def disabled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYACTCOMP_DISABLE", "1")
        yield


@contextmanager
def replaced(owner: Any, name: str) -> Iterator[None]:
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs))
        yield


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "a function mode": _Passing,
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "forward-mode differentiation": forward_ad.dual_level,
    "hooks of others": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "disabled": disabled,
    "its function is replaced": lambda: replaced(F, "gelu"),
    "the forward of its class is replaced": lambda: replaced(nn.GELU, "forward"),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_surrounds_a_call_is_left_to_python(around: str) -> None:
    module, x = fused(), leaf()
    assert ordinary(module, x)
    with AROUND[around]():
        assert not ordinary(module, x)
    assert ordinary(module, x)


@pytest.mark.parametrize("name", ["layer_norm", "linear", "relu"])
def test_a_replaced_function_that_the_module_does_not_call_is_none_of_its_business(name: str) -> None:
    module, x = fused(), leaf()
    with replaced(F, name):
        assert ordinary(module, x)


def test_a_transform_is_left_to_python() -> None:
    module = fused()
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(ordinary(module, x))
        return x.sum()

    torch.func.grad(look)(torch.ones(ROWS, WIDTH))
    torch.func.vmap(look)(leaf().detach())
    assert seen == [False, False]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_function_is_left_to_python_where_it_may_be_run_again(use_reentrant: bool) -> None:
    module, seen = fused(), []

    def look(x: Tensor) -> Tensor:
        seen.append(ordinary(module, x))
        return x.sin()

    checkpoint(look, leaf(), use_reentrant=use_reentrant).sum().backward()
    # The reentrant one reruns the function in a forward as any other.
    assert seen == [False, use_reentrant]


def test_the_state_of_the_module_is_seen() -> None:
    module, x = fused(nn.LayerNorm(WIDTH)), leaf()
    module.eval()
    assert not ordinary(module, x)
    module.train()
    state: Any = FUSING.get(module)
    state.paused = True
    assert not ordinary(module, x)
    state.paused = False
    assert ordinary(module, x)
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    assert not ordinary(module, x)
    other = nn.Sequential(nn.GELU())
    fuse(other, CONFIG)
    assert ordinary(other[0], x)
    unfuse(other)
    assert not ordinary(other[0], x)


@pytest.mark.parametrize(
    "config",
    [
        Config(min_bytes=0),
        Config(min_bytes=0, mode="lossless", impl="triton"),
        Config(min_bytes=0, rounding="stochastic", impl="triton"),
        Config(min_bytes=ROWS * WIDTH * 4 + 1, impl="triton"),
    ],
    ids=["no kernels of the CPU", "lossless", "a seed for each call", "too small"],
)
def test_calls_of_other_codes_are_left_to_python(config: Config) -> None:
    assert not ordinary(fused(config=config), leaf())


class _Other(Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [
        leaf().as_subclass(_Other),
        leaf(dtype=torch.complex64),
        torch.ones(ROWS, WIDTH, device="meta", requires_grad=True),
        torch.ones(ROWS, WIDTH).to_sparse().requires_grad_(),
        None,
        3,
    ],
    ids=["a subclass", "complex", "meta", "sparse", "None", "a number"],
)
def test_inputs_that_no_kernel_reads_are_left_to_python(x: Any) -> None:
    assert not ordinary(fused(), x)


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels serve CPU tensors, and launch none: results are memory as it was."""
    pytest.importorskip("triton")
    from pyactcomp.codec.kernels import triton as kernels
    from pyactcomp.functional import saving

    monkeypatch.setattr(saving, "_triton_serves", lambda *_: True)
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels.Launcher, "__call__", lambda *_: None)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(
    ("module", "x", "autocast", "runs"),
    [
        (nn.GELU(), leaf(), False, True),
        (nn.GELU(), leaf(dtype=torch.float64), False, False),
        (nn.GELU(), leaf(0, WIDTH), False, False),
        (nn.LayerNorm(WIDTH), leaf(), False, True),
        (nn.LayerNorm(WIDTH), leaf(dtype=torch.bfloat16), False, True),
        (nn.LayerNorm(WIDTH).to(torch.bfloat16), leaf(dtype=torch.bfloat16), False, True),
        (nn.LayerNorm(WIDTH), leaf(dtype=torch.float64), False, False),
        (nn.LayerNorm(WIDTH + 16), leaf(ROWS, WIDTH + 16), False, False),
        (nn.RMSNorm(WIDTH, eps=1e-6), leaf(), False, True),
        (nn.RMSNorm(WIDTH, eps=1e-6), leaf(), True, False),
        (nn.RMSNorm(WIDTH, eps=1e-6).to(torch.bfloat16), leaf(dtype=torch.bfloat16), False, True),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else str(value),
)
def test_what_the_kernels_do_not_serve_is_left_to_python(module: Any, x: Tensor, autocast: bool, runs: bool) -> None:
    module = fused(module)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        codes = library().ordinary_codes(module, x, False)
        assert codes is not None
        made = _applied(module, codes, x)
    assert (made is not None) == runs
    if made is not None:
        assert made.shape == x.shape
        assert made.dtype == x.dtype


def _applied(module: Any, codes: Any, x: Tensor) -> Tensor | None:
    from pyactcomp.functional.activations.gelu.launch import gelu_of
    from pyactcomp.functional.norms.launch import norm_of

    if isinstance(module, nn.GELU):
        return gelu_of(False, codes).apply_where_served(x)
    centred = isinstance(module, nn.LayerNorm)
    norm = norm_of(tuple(module.normalized_shape), centred, module.eps, codes)
    return norm.apply_where_served(x, module.weight, module.bias if centred else None, None)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(
    ("weight", "x"),
    [
        (leaf(WIDTH, dtype=torch.bfloat16), leaf()),
        (leaf(WIDTH // 2), leaf()),
        (leaf(WIDTH).as_subclass(_Other), leaf()),
        (leaf(WIDTH), leaf(ROWS, 2 * WIDTH)),
        (leaf(WIDTH), torch.ones(ROWS, WIDTH)),
    ],
    ids=["another dtype", "another length", "a subclass", "longer rows", "no gradient"],
)
def test_a_norm_that_torch_would_refuse_or_read_otherwise_is_left_to_python(weight: Tensor, x: Tensor) -> None:
    module: Any = fused(nn.LayerNorm(WIDTH))
    codes = library().ordinary_codes(module, x, True)
    assert codes is not None
    from pyactcomp.functional.norms.launch import norm_of

    norm = norm_of((WIDTH,), True, 1e-5, codes)
    assert norm.apply_where_served(x, weight, None, None) is None
    assert norm.apply_where_served(leaf(), leaf(WIDTH), leaf(WIDTH), None) is not None
