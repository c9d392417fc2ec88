"""``silu_mul``, the product of a gated unit, which stores both operands in codes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import redo
from ..codec import Impl, Rounding
from ._saving import Saving, check_float_tensor, differentiable_once, recorded, saving

EXACT_ON_CUDA = True
"""Whether the kernels without codes give torch's own results to the bit; if not, torch's operators are called."""


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, how: Saving) -> Tensor:
        fused = gate.dtype is up.dtype and how.runs_kernels(gate) and (how.bits is not None or EXACT_ON_CUDA)
        if fused:
            from . import _fused_activations

            out, kept, ctx.fused_backward, compute = _fused_activations.silu_mul(gate, up, how)
            ctx.save_for_backward(*kept)
            redo.offer(ctx, out, compute, *(t.detach() for t in kept))
            return out
        ctx.fused_backward = None
        (kept_gate, restore_gate), (kept_up, restore_up) = how.keep(gate), how.keep(up)
        ctx.restore = restore_gate, restore_up
        ctx.save_for_backward(kept_gate, kept_up)
        out = F.silu(gate) * up
        sources = kept_gate.detach(), kept_up.detach()

        def compute_eagerly(dtype: torch.dtype) -> Tensor:
            return (F.silu(restore_gate(sources[0])) * restore_up(sources[1])).to(dtype)

        redo.offer(ctx, out, compute_eagerly, *sources)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.fused_backward is not None:
            return (*ctx.fused_backward(*ctx.saved_tensors, grad), None)
        gate, up = (restore(kept) for restore, kept in zip(ctx.restore, ctx.saved_tensors, strict=True))
        grad_gate = torch.ops.aten.silu_backward((grad * up).to(gate.dtype), gate)
        return grad_gate, (grad * F.silu(gate)).to(up.dtype), None


def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    bits: int | None = 8,
    group_size: int = 64,
    rounding: Rounding | None = None,
    seed: int = 0,
    impl: Impl = "auto",
) -> Tensor:
    """Return ``silu(gate) * up``, the inside of SwiGLU, and keep both for backward in codes.

    Parameters
    ----------
    gate, up : Tensor, of one shape, floating point
    bits, group_size, rounding, seed, impl
        As in :func:`linear`. With ``bits=None`` outputs and gradients are those of torch's operators to the bit.

    Returns
    -------
    Tensor, the shape of ``gate`` and the dtype of the product
        Differentiable once: backward with ``create_graph=True`` raises PyactcompError.

    Raises
    ------
    TypeError
        If ``gate`` or ``up`` is no floating-point tensor.
    ValueError
        If their shapes differ or an option has no such value.
    ImplementationUnavailableError
        If ``impl`` cannot serve their device.

    Notes
    -----
    silu(x) = x / (1 + exp(-x)) is at most ``|x|``; its derivative is at most 1.1 and its second derivative at most
    1/2. With errors of at most ``e`` in ``gate`` and ``f`` in ``up`` (:func:`pyactcomp.reference.error_bound`) the
    gradient of ``gate`` is off by at most ``|grad| (1.1 f + e (|up| + f) / 2)``, that of ``up`` by ``1.1 e |grad|``.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> gate, up = torch.randn(2, 1000, requires_grad=True)
    >>> out = functional.silu_mul(gate, up)
    >>> torch.equal(out, torch.nn.functional.silu(gate) * up)
    True
    """
    how = saving(bits, group_size, rounding, seed, impl)
    check_float_tensor("gate", gate)
    check_float_tensor("up", up)
    if gate.shape != up.shape:
        raise ValueError(f"silu_mul expects gate and up of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    if not recorded(gate, up):
        return F.silu(gate) * up
    return cast(Tensor, _SiluMul.apply(gate, up, how))  # type: ignore[no-untyped-call]
