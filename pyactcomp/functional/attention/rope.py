"""``rope``: rotary position embeddings of queries and keys; saves neither."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...codec import Impl
from ...codec.layouts import arranged, contiguous_layout, layout_of
from ..codes import one_option
from ..saving import Saving, begin, check_float_tensor, differentiable_once, kernels_of, recorded


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def _turned_back(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    # Add zero, as autograd does to the gradient of a slice: -0 becomes 0.
    return torch.cat((high, -low), -1).add_(0.0)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return x * cos.unsqueeze(heads) + _turned(x) * sin.unsqueeze(heads)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """Return the view [batch, tokens, heads, dim]."""
    return x.transpose(1, 2) if heads == 1 else x


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        dtype: torch.dtype,
        contiguous_grad: bool,
        how: Saving,
    ) -> Tensor:
        begin(ctx)
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.how, ctx.dtype = heads, how, x.dtype
        out = _fused(x, cos, sin, heads, torch.empty_like(x, dtype=dtype), how, backward=False)
        if out is None:
            out = _rotated(x, cos, sin, heads).to(dtype)
        # Torch's gradients are contiguous, and later sums round in that order. In the layout of x, often a view of a
        # linear layer's output, the gradient enters the layer's backward without a copy.
        ctx.layout = contiguous_layout(x.shape) if contiguous_grad else layout_of(out)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grad.to(_product(ctx.dtype, cos, sin)) if grad.dtype.itemsize > ctx.dtype.itemsize else grad
        shape, stride, _ = ctx.layout
        grad_x = torch.empty_strided(shape, stride, dtype=ctx.dtype, device=grad.device)
        out = _fused(grad, cos, sin, ctx.heads, grad_x, ctx.how, backward=True)
        if out is None:
            grad = grad.to(_product(ctx.dtype, cos, sin))
            straight, turned = ((grad * t.unsqueeze(ctx.heads)).to(ctx.dtype) for t in (cos, sin))
            out = arranged(straight + _turned_back(turned), ctx.layout)
        return out, None, None, None, None, None, None


def _product(dtype: torch.dtype, cos: Tensor, sin: Tensor) -> torch.dtype:
    if cos.dtype is dtype and sin.dtype is dtype:
        return dtype
    return torch.promote_types(torch.promote_types(dtype, cos.dtype), sin.dtype)


def _fused(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, out: Tensor, how: Saving, *, backward: bool
) -> Tensor | None:
    """Write x, rotated forward or backward, to ``out`` and return ``out``; None if the kernel does not serve them."""
    if not how.runs_kernels(x):
        return None
    from . import launch

    served = launch.rotate(_by_token(x, heads), cos, sin, _by_token(out, heads), backward=backward)
    return out if served else None


@one_option
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    dtype: torch.dtype | None = None,
    contiguous_grad: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions and save neither for backward.

    Parameters
    ----------
    q, k : Tensor, [batch, heads, tokens, dim], floating point
        In any layout; with ``unsqueeze_dim=2`` [batch, tokens, heads, dim].
    cos, sin : Tensor, [batch or 1, tokens, dim], floating point
        Tables of the angles. With ``h = dim / 2``, the result is ``x[i] * cos[i] - x[i + h] * sin[i]`` for ``i < h``
        and ``x[i] * cos[i] + x[i - h] * sin[i]`` for the second half.
    unsqueeze_dim : {1, 2}
        The dimension of the heads.
    dtype : torch.dtype, optional
        The dtype of the results; by default the promoted dtype of ``x * cos``. ``dtype=torch.bfloat16`` gives the
        same results as a float32 output (float32 ``cos``) cast to bfloat16 by autocast.
    contiguous_grad : bool
        Whether gradients are contiguous, like those of torch's operators. By default gradients have the memory layout
        of ``q`` and ``k``.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; all give the same results. A named one never falls back to another.

    Returns
    -------
    tuple of two Tensor, the shapes and order of dimensions of ``q`` and ``k``
        Equal to the results of torch's separate operators to the bit, as are the gradients. Differentiable once:
        backward with ``create_graph=True`` raises PyactcompError.

    Raises
    ------
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of ``q`` and ``k``.

    Notes
    -----
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv:2104.09864). The layout is the
    half-split one of ``transformers``.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp import functional
    >>> q, k = torch.randn(2, 1, 4, 10, 8, requires_grad=True)
    >>> angles = torch.arange(10.0)[None, :, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat(2)
    >>> turned, _ = functional.rope(q, k, angles.cos(), angles.sin())
    >>> bool((turned.norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-5)
    True
    """
    how = kernels_of(impl)
    for name, t in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_float_tensor(name, t)
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 or 2, got {unsqueeze_dim!r}")
    for name, t in (("q", q), ("k", k)):
        _check_shapes(name, t, cos, sin, unsqueeze_dim)
    turned = [_rope(x, cos, sin, unsqueeze_dim, dtype, contiguous_grad, how) for x in (q, k)]
    return turned[0], turned[1]


def _check_shapes(name: str, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    if x.dim() != 4 or x.shape[3] % 2 or not _match(cos, x, heads) or not _match(sin, x, heads):
        raise ValueError(
            f"rope expects {name} of four dimensions, the last one even, and cos and sin [batch or 1, tokens, dim] to "
            f"match; got {tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)} with unsqueeze_dim={heads}"
        )


def _match(table: Tensor, x: Tensor, heads: int) -> bool:
    return (
        table.dim() == 3
        and table.shape[0] in (1, x.shape[0])
        and table.shape[1] == x.shape[3 - heads]
        and table.shape[2] == x.shape[3]
    )


def _rope(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, dtype: torch.dtype | None, contiguous_grad: bool, how: Saving
) -> Tensor:
    dtype = dtype or _product(x.dtype, cos, sin)
    if not recorded(x, cos, sin) or cos.requires_grad or sin.requires_grad:
        return _rotated(x, cos, sin, heads).to(dtype)
    return cast(Tensor, _Rope.apply(x, cos, sin, heads, dtype, contiguous_grad, how))  # type: ignore[no-untyped-call]
