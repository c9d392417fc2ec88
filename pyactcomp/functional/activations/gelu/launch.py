"""Launches of the kernels of GELU and of ``new_gelu``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ....codec import format as fmt
from ....codec.kernels import triton as codec_kernels
from ....codec.layouts import dense
from ....engine import saved
from ....engine.recompute import Compute
from ...launch import Plan
from ...saving import Saving

# Elements and warps of a program, and registers of a thread: as the codec's kernels, which move as many bytes.
_LAUNCHES = {
    "gelu_forward_kernel": (codec_kernels.TILE, codec_kernels.WARPS, codec_kernels.REGISTERS),
    "gelu_backward_kernel": (codec_kernels.TILE, codec_kernels.WARPS, None),
    "gelu_backward_recompute_kernel": (codec_kernels.TILE, codec_kernels.WARPS, None),
    "gelu_recompute_kernel": (codec_kernels.DECODE_TILE, codec_kernels.DECODE_WARPS, None),
}


class GeluKernels(Protocol):
    """The kernels of GELU, and its autograd function: ``csrc/functions/gelu.hpp``.

    Per bfloat16 element: 5.06 bytes each way, 3.06 to recompute. Of dense operands of any layout.
    """

    def apply(self, x: Tensor, /) -> Tensor:
        """Return GELU in the graph. A write to ``x`` raises autograd's error in backward."""

    def apply_where_served(self, x: Tensor, /) -> Tensor | None:
        """Return the same for a tensor that ``ordinary_codes`` let through; None where the kernels do not serve it."""

    def forward(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return GELU of a dense ``x``, and the packed ``x``."""

    def backward_and_recompute(self, packed: Tensor, grad: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return the gradient and GELU, for a contiguous gradient."""


@functools.lru_cache(maxsize=256)
def gelu_of(tanh: bool, how: Saving) -> GeluKernels:
    """Return the kernels of one of the two forms of GELU, with codes."""
    assert how.bits is not None
    form = _Form(tanh, how.bits, how.group_size, how.stochastic)
    return cast(GeluKernels, saved.library().Gelu(functools.partial(_plan, form), how.runs_on, how.keys))


class _Form(NamedTuple):
    """The parameters that select kernels; not the seed of stochastic rounding, new on each call."""

    tanh: bool
    bits: int
    group_size: int
    stochastic: bool


@functools.lru_cache(maxsize=1024)
def _plan(form: _Form, kernel: str, numel: int, _: tuple[int, ...], drops: bool, device: torch.device) -> Plan:
    """Return how to launch a kernel over ``numel`` elements; ``drops`` tells that it writes no codes."""
    from ...elementwise import starts
    from . import kernels

    tile, warps, registers = _LAUNCHES[kernel]
    last = (form.stochastic,) if kernel == "gelu_forward_kernel" else ()
    constants = (form.tanh, 0 if drops else form.bits, form.group_size, tile // form.group_size, *last)
    launches = starts(kernels, kernel, constants, numel, tile, warps, registers, device)
    return Plan(launches, numel, fmt.packed_nbytes(numel, form.bits, form.group_size))


def new_gelu(x: Tensor, wide: bool) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor], Compute]:
    """Return the exact chain's result, the x to save, the backward (x, gradient -> gradient) and the recompute.

    Bytes moved per bfloat16 element: 6 forward and 8 backward with float32 results (``wide``), else 4 and 6; 4 to
    recompute in bfloat16.
    """
    from ...elementwise import elementwise
    from . import kernels

    x = dense(x)
    on = elementwise(x)

    def compute(source: Tensor, dtype: torch.dtype) -> Tensor:
        out = on.empty(dtype)
        on.launch(kernels, "new_gelu_kernel", (wide,), (source, out))
        return out

    def backward(x: Tensor, grad: Tensor) -> Tensor:
        grad_x = on.empty(x.dtype)
        tensors = (x, on.arrange(grad), grad_x)
        on.launch(kernels, "new_gelu_backward_kernel", (wide,), tensors)
        return on.as_torch(grad_x, grad)

    return compute(x.detach(), torch.float32 if wide else x.dtype), x, backward, compute
