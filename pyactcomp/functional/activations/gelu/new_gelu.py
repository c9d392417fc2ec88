"""``new_gelu``: the tanh form of GELU, as Hugging Face's GPT-2 and its relatives compute it."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from ....engine import recompute
from ...codes import INT8, Codes, one_option
from ...saving import Saving, begin, check_float_tensor, differentiable_once, recorded, saving
from .gelu import gelu


def _chain(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class _Autocast:
    """The state of autocast on a device, for backward to enter again."""

    def __init__(self, device: str) -> None:
        self._device, self.enabled = device, torch.is_autocast_enabled(device)
        self._dtype = torch.get_autocast_dtype(device)

    def entered(self) -> torch.autocast:
        return torch.autocast(self._device, dtype=self._dtype, enabled=self.enabled)


class _NewGelu(torch.autograd.Function):
    """The chain of operators, with only ``x`` saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Saving) -> Tensor:
        begin(ctx)
        state = _Autocast(x.device.type)
        if how.runs_kernels(x):
            from . import launch

            # Autocast on CUDA computes pow in float32; promotion makes all later operators float32.
            out, kept, ctx.fused_backward, compute = launch.new_gelu(x, x.is_cuda and state.enabled)
            ctx.save_for_backward(kept)
            recompute.offer(ctx, out, compute, stored=(kept.detach(),))
            return out
        ctx.fused_backward, ctx.autocast = None, state
        ctx.save_for_backward(x)
        out = _chain(x)

        def compute_eagerly(source: Tensor, dtype: torch.dtype) -> Tensor:
            with torch.no_grad(), state.entered():
                return _chain(source).to(dtype)

        recompute.offer(ctx, out, compute_eagerly, stored=(x.detach(),))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.fused_backward is not None:
            return ctx.fused_backward(x, grad), None
        leaf = x.detach().requires_grad_()
        with torch.enable_grad(), ctx.autocast.entered():
            out = _chain(leaf)
        return torch.autograd.grad(out, leaf, grad)[0], None


@one_option
def new_gelu(
    x: Tensor,
    *,
    codes: Codes = INT8,
) -> Tensor:
    """Return ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3)))`` and save ``x`` for backward in codes.

    The same chain of seven operators in ``transformers`` saves six tensors. Autocast on CUDA computes pow in float32
    and so makes most of the six, and the result, float32.

    Parameters
    ----------
    x : Tensor, any shape, floating point
    codes : Codes
        How to store ``x``. With ``bits=None``, outputs and gradients equal those of torch's chain of operators to the
        bit, also under autocast.

    Returns
    -------
    Tensor, the shape of ``x``
        In the dtype of ``x``; with ``bits=None``, or where no gradient is recorded, in the dtype of torch's chain.

    Notes
    -----
    The formula is from Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415). The error bound is
    the one of :func:`gelu`.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional.activations.gelu.new_gelu import new_gelu
    >>> x = torch.randn(1000, requires_grad=True)
    >>> out = new_gelu(x)
    >>> bool((out - torch.nn.functional.gelu(x, approximate="tanh")).abs().max() < 1e-6)
    True
    """
    how = saving(codes)
    check_float_tensor("x", x)
    if not recorded(x):
        return _chain(x)
    if how.bits is not None:
        return gelu(x, "tanh", codes=how)
    return cast(Tensor, _NewGelu.apply(x, how))  # type: ignore[no-untyped-call]
