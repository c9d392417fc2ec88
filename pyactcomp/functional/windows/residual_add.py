"""``residual_add``: the sum after a branch; row order, drop path and addition in one pass."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...codec import Impl
from ...torch_private import has_no_memory
from ..codes import one_option
from ..saving import begin, check_float_tensor, kernels_of, recorded


def _add(
    x: Tensor, branch: Tensor, scale: Tensor | None, rows: Tensor | None, sample: int, dtype: torch.dtype
) -> Tensor:
    scaled = torch.empty_like(branch)
    scaled[slice(None) if rows is None else rows] = branch
    if scale is not None:
        scaled = scaled * scale.to(branch.dtype).repeat_interleave(sample)[:, None]
    return (x + scaled).to(dtype)


def _branch_grad(grad: Tensor, scale: Tensor | None, rows: Tensor | None, sample: int, dtype: torch.dtype) -> Tensor:
    grad = grad.to(dtype)
    if scale is not None:
        grad = grad * scale.to(dtype).repeat_interleave(sample)[:, None]
    return grad if rows is None else grad[rows]


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, scale: Tensor | None, rows: Tensor | None, sample: int, fused: bool
    ) -> Tensor:
        begin(ctx)
        ctx.save_for_backward(scale, rows)
        ctx.sample, ctx.fused, ctx.dtypes = sample, fused, (x.dtype, branch.dtype)
        dtype = torch.result_type(x, branch)
        if fused:
            from . import launch

            return launch.residual_add(x, branch, scale, rows, sample, dtype)
        return _add(x, branch, scale, rows, sample, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        scale, rows = ctx.saved_tensors
        grad_x = grad_branch = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            back = _branch_grad
            # Torch's operators under create_graph=True, for their derivatives, and under vmap.
            if ctx.fused and not torch.is_grad_enabled() and not has_no_memory(grad):
                from . import launch

                back = launch.residual_add_backward
            grad_branch = back(grad, scale, rows, ctx.sample, ctx.dtypes[1])
        return grad_x, grad_branch, None, None, None, None


@one_option
def residual_add(
    x: Tensor,
    branch: Tensor,
    *,
    scale: Tensor | None = None,
    rows: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Add a branch to the rows the branch came from: ``out[rows[i]] = x[rows[i]] + scale * branch[i]``.

    Neither ``x`` nor ``branch`` is saved for backward.

    Parameters
    ----------
    x : Tensor, [n, width], floating point
        The residual stream.
    branch : Tensor, [n, width], floating point
        The output of a branch; row i belongs to row ``rows[i]`` of ``x``.
    scale : Tensor, [samples], optional
        One factor for each n / samples consecutive rows of ``x``, as drop path uses. The scale gets no gradient.
    rows : Tensor, [n], int32 or int64, optional
        A permutation of all rows; by default the identity.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; all give the same results. A named one never falls back to another.

    Returns
    -------
    Tensor, [n, width], the dtype of ``x + branch``
        With the roundings of the separate operators: the product has the dtype of ``branch``. Differentiable any
        number of times.

    Raises
    ------
    TypeError
        If ``rows`` is not an int32 or int64 tensor.
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of ``x``.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional.windows.residual_add import residual_add
    >>> residual_add(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]), rows=torch.tensor([1, 0]))
    tensor([[2.],
            [1.]])
    """
    how = kernels_of(impl)
    for name, tensor in (("x", x), ("branch", branch), ("scale", scale)):
        if tensor is not None:
            check_float_tensor(name, tensor)
    if rows is not None and (not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64)):
        raise TypeError(f"rows must be an int32 or int64 torch.Tensor, got {getattr(rows, 'dtype', type(rows))}")
    if x.dim() != 2 or x.shape != branch.shape:
        raise ValueError(
            f"residual_add expects x and branch of one [n, width], got {(*x.shape,)} and {(*branch.shape,)}"
        )
    if rows is not None and tuple(rows.shape) != (len(x),):
        raise ValueError(f"residual_add expects rows of ({len(x)},), got {tuple(rows.shape)}")
    if scale is not None and (scale.dim() != 1 or not len(scale) or len(x) % len(scale)):
        raise ValueError(
            f"residual_add expects a scale of [samples] with {len(x)} rows a multiple of it, got {tuple(scale.shape)}"
        )
    sample = len(x) // len(scale) if scale is not None else 1
    x, branch = x.contiguous(), branch.contiguous()
    rows, scale = (None if t is None else t.contiguous() for t in (rows, scale))
    if not recorded(x, branch):
        return _add(x, branch, scale, rows, sample, torch.result_type(x, branch))
    fused = how.runs_kernels(x) and branch.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return cast(Tensor, _ResidualAdd.apply(x, branch, scale, rows, sample, fused))  # type: ignore[no-untyped-call]
