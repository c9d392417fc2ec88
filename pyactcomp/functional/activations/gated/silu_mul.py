"""``silu_mul``: the product of a gated unit; saves both operands in codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import silu as silu_of_torch

from ....engine import recompute
from ....torch_private import graph_is_retained
from ...codes import INT8, Codes, one_option
from ...saving import Recomputed, Saving, begin, check_float_tensor, differentiable_once, recorded, saving


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, up_again: Recomputed | None, inplace: bool, how: Saving) -> Tensor:
        exact = how.bits is None
        # No check of an up given with inplace=True: nobody else reads it, and the kernel overwrites it.
        begin(ctx, None if exact else gate, None if inplace or (exact and up_again is None) else up)
        ctx.up_again = up_again
        if gate.dtype is up.dtype and how.runs_kernels(gate):
            from . import launch

            out, kept, ctx.fused_backward, compute = launch.silu_mul(gate, up, up_again, inplace, how)
            ctx.save_for_backward(*kept)
            recompute.offer(ctx, out, compute, stored=tuple(t.detach() for t in kept) if exact else kept)
            return out
        ctx.fused_backward = None
        saves = [how.pack(gate)] if up_again is not None else [how.pack(gate), how.second().pack(up)]
        kept, restores = zip(*saves, strict=True)
        ctx.restores = restores
        ctx.save_for_backward(*kept)
        out = silu_of_torch(gate) * up

        def compute_eagerly(*given: Any) -> Tensor:
            *sources, dtype = given
            restored, *other = (restore(t) for restore, t in zip(restores, sources, strict=True))
            return (silu_of_torch(restored) * (other[0] if up_again is None else up_again.peek())).to(dtype)

        recompute.offer(ctx, out, compute_eagerly, stored=tuple(t.detach() for t in kept))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept_gate, *kept_up = ctx.saved_tensors
        up_again, fused_backward = ctx.up_again, ctx.fused_backward
        if up_again is not None and not graph_is_retained():
            ctx.up_again = ctx.fused_backward = None  # frees what up is recomputed from
        up = kept_up[0] if up_again is None else up_again.take()
        if fused_backward is not None:
            return (*fused_backward(kept_gate, up, grad), None, None, None)
        gate = ctx.restores[0](kept_gate)
        if up_again is None:
            up = ctx.restores[1](up)
        grad_gate = torch.ops.aten.silu_backward((grad * up).to(gate.dtype), gate)
        return grad_gate, (grad * silu_of_torch(gate)).to(up.dtype), None, None, None


@one_option
def silu_mul(
    gate: Tensor,
    up: Tensor,
    *,
    up_again: Callable[[], Tensor] | None = None,
    inplace: bool = False,
    codes: Codes = INT8,
) -> Tensor:
    """Return ``silu(gate) * up``, the gated product of SwiGLU, and save both operands for backward in codes.

    Parameters
    ----------
    gate, up : Tensor, of one shape, floating point
    up_again : callable, optional
        Recomputes ``up`` in backward, so ``up`` is not saved. Worthwhile if ``up`` is one matrix product of a stored
        tensor. Called once per backward. With ``bits=None`` the result must equal ``up`` to the bit.
    inplace : bool
        Let the fused kernels write the output over ``up``, and the gradients over the incoming gradient and over the
        result of ``up_again``: two tensors less at the peak. Correct only if nothing else reads these tensors, as when
        one matrix product made ``up`` and one reads the output. Another reader of ``up``, or a sum sharing the
        output's gradient between its operands, would read overwritten memory.
    codes : Codes
        How to store both. With ``bits=None``, outputs and gradients equal those of torch's operators to the bit.

    Returns
    -------
    Tensor, the shape of ``gate`` and the dtype of the product

    Raises
    ------
    ValueError
        If ``inplace=True`` is given with ``bits=None``, where ``up`` is saved unpacked.

    Notes
    -----
    In magnitude, silu(x) = x / (1 + exp(-x)) is at most ``|x|``, the first derivative at most 1.1 and the second at
    most 1/2. With errors of at most ``e`` in ``gate`` and ``f`` in ``up``
    (:func:`pyactcomp.codec.reference.error_bound`), the gradient of ``gate`` is off by at most
    ``|grad| (1.1 f + e (|up| + f) / 2)``, the gradient of ``up`` by at most ``1.1 e |grad|``.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> gate, up = torch.randn(2, 1000, requires_grad=True)
    >>> out = functional.silu_mul(gate, up)
    >>> torch.equal(out, torch.nn.functional.silu(gate) * up)
    True
    """
    how = saving(codes)
    check_float_tensor("gate", gate)
    check_float_tensor("up", up)
    if gate.shape != up.shape:
        raise ValueError(f"silu_mul expects gate and up of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    if inplace and how.bits is None:
        raise ValueError("inplace=True writes over up, which bits=None keeps; leave one of them out")
    if not recorded(gate, up):
        return silu_of_torch(gate) * up
    recomputed = None if up_again is None else Recomputed(up_again)
    return cast(Tensor, _SiluMul.apply(gate, up, recomputed, inplace, how))  # type: ignore[no-untyped-call]
