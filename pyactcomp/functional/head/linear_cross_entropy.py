"""``linear_cross_entropy``: a loss head that never holds the logits of all rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ... import codec
from ...codec import Impl
from ...codec.layouts import layout_of
from ...engine.frame import staying
from ...errors import check_choice
from ...torch_private import graph_is_retained
from ..codes import one_option
from ..saving import begin, check_float_tensor, differentiable_once, recorded, wanted, wide
from ..tiles import add_product, equal_tiles

Reduction = Literal["mean", "sum"]

# A product with a leading dimension that is not a multiple of 16 bytes runs at a quarter of the rate on an H200. Padded
# to 64 columns, all three products are aligned in every dtype, and their tiles cover whole rows.
COLUMNS = 64
# Elements of a row in a program at a time, and the program's warps: two 16-byte accesses of bfloat16 a thread. Two or
# three programs fill a multiprocessor: the rows under way, 27 MB with 50257 columns, are still in the cache of an
# H200 (50 MB) at the second read; more and smaller programs would read from memory. By estimate.
BLOCK, WARPS = 8192, 16


@dataclass(frozen=True)
class RowLoss:
    """The loss of each row, as a callable on chunks of logits."""

    ignore_index: int
    chunk: int | None
    impl: Impl
    softcap: float | None = None

    def rows(self, count: int, row_bytes: int) -> int:
        """Return the rows of a chunk: as given, or by :func:`equal_tiles`."""
        return equal_tiles(count, row_bytes) if self.chunk is None else self.chunk

    def fuses(self, logits: Tensor) -> bool:
        """Return whether to run the Triton kernel; raise if ``impl="triton"`` cannot serve the device."""
        if self.impl == "triton":
            codec.resolve(self.impl, logits.device)
        elif self.impl != "auto" or not logits.is_cuda:
            return False
        return logits.dtype is not torch.float64 and codec.unavailable_reason("triton", logits.device) is None

    def __call__(self, logits: Tensor, vocabulary: int, labels: Tensor, losses: Tensor, scale: Tensor | None) -> None:
        """Write the losses of the rows; with a scale, overwrite the padded logits with their gradient times scale."""
        if self.fuses(logits):
            self._launch(logits, vocabulary, labels, losses, scale)
            return
        counted, known = labels != self.ignore_index, (labels >= 0) & (labels < vocabulary)
        column = labels.where(known, 0).unsqueeze(1)
        scores = logits[:, :vocabulary].to(losses.dtype)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        result = torch.log_softmax(scores, 1)
        nan = losses.new_full((), float("nan"))
        losses.copy_(torch.where(known, -result.gather(1, column).squeeze(1), nan).where(counted, 0))
        if scale is not None:
            result.exp_().scatter_add_(1, column, result.new_full((), -1).expand_as(column))
            result *= torch.where(known, scale, nan).where(counted, 0).unsqueeze(1)
            if self.softcap is not None:
                result *= 1 - (scores / self.softcap) ** 2
            logits[:, :vocabulary] = result
            logits[:, vocabulary:] = 0

    def _launch(self, logits: Tensor, vocabulary: int, labels: Tensor, losses: Tensor, scale: Tensor | None) -> None:
        from ..launch import launcher
        from . import kernels

        stride = logits.stride(0)
        block = min(BLOCK, 1 << (stride - 1).bit_length())
        constants = (vocabulary, stride, 16 // logits.itemsize, block, scale is not None, self.softcap is not None)
        scalars = self.ignore_index, 1.0 if self.softcap is None else self.softcap
        launch = launcher(kernels, "cross_entropy_kernel", constants, WARPS, logits.device)
        launch(logits.shape[0], (logits, labels, losses, losses if scale is None else scale), scalars)


def _padded(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a weight or a bias in ``dtype``, padded with zeros to a multiple of COLUMNS rows."""
    if parameter is None:
        return None
    count = parameter.shape[0]
    missing = -count % COLUMNS
    if not missing:
        return parameter.to(dtype)
    out = parameter.new_empty((count + missing, *parameter.shape[1:]), dtype=dtype)
    out[:count] = parameter
    out[count:] = 0
    return out


def _walk(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    loss_of: RowLoss,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the losses of all rows, and the needed gradients of x, weight and bias, times scale."""
    count, vocabulary = x.shape[0], weight.shape[0]
    exact = wide(dtype)
    matrix, offset = cast(Tensor, _padded(weight, dtype)), _padded(bias, dtype)
    padded = matrix.shape[0]
    rows = loss_of.rows(count, padded * dtype.itemsize)
    losses = x.new_empty(count, dtype=exact)
    logits = x.new_empty((min(rows, count), padded), dtype=dtype)
    needs_x, needs_weight, needs_bias = needs
    # As in torch, the gradient of a column-major matrix is column-major.
    form = torch.preserve_format if layout_of(x).dense else torch.contiguous_format
    grad_x = torch.empty_like(x, dtype=dtype, memory_format=form) if needs_x else None
    grad_weight = x.new_zeros((padded, x.shape[1]), dtype=exact) if needs_weight else None
    grad_bias = x.new_zeros(padded, dtype=exact) if needs_bias else None
    for start in range(0, count, rows):
        part, end = x[start : start + rows].to(dtype), min(start + rows, count)
        here = logits[: end - start]
        if offset is None:
            torch.mm(part, matrix.t(), out=here)
        else:
            torch.addmm(offset, part, matrix.t(), out=here)
        loss_of(here, vocabulary, labels[start:end], losses[start:end], scale)
        if grad_x is not None:
            torch.mm(here, matrix, out=grad_x[start:end])
        if grad_weight is not None:
            add_product(grad_weight, here, part)
        if grad_bias is not None:
            grad_bias += here.sum(0, dtype=exact)
    return losses, grad_x, _first(grad_weight, vocabulary), _first(grad_bias, vocabulary)


def _first(gradient: Tensor | None, count: int) -> Tensor | None:
    return None if gradient is None else gradient[:count]


def loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    divisor: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    loss_of: RowLoss,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the loss, a power of two, and the needed gradients of x, weight and bias without that power."""
    # The gradients are those times the mantissa of scale, in [1/2, 1); backward multiplies by the power of two. So they
    # are rounded once, and neither underflow nor overflow in float16.
    mantissa = torch.frexp(scale).mantissa
    losses, *gradients = _walk(x, weight, bias, labels, mantissa, dtype, loss_of, needs)
    if gradients[1] is not None and weight.dtype is torch.bfloat16:
        # Only bfloat16: float16 has too few exponents for a sum over all rows.
        gradients[1] = gradients[1].to(torch.bfloat16)
    grad_x, grad_weight, grad_bias = gradients
    return losses.sum() / divisor, scale / mantissa, grad_x, grad_weight, grad_bias


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        loss_of: RowLoss,
    ) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad[:3]
        read = x if needs_weight else None, weight if needs_x else None
        begin(ctx, labels, *(t for t in read if t is not None and t.dtype is dtype))
        needs = ctx.needs_input_grad[:3]
        loss, *saved = loss_and_gradients(x, weight, bias, labels, divisor, scale, dtype, loss_of, needs)
        ctx.save_for_backward(*saved)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        power, *gradients = ctx.saved_tensors
        # One dimension: a 0-dim factor would not promote the product to float32, rounded to the gradient's dtype last.
        factor = (grad * power).view(1)
        once = not graph_is_retained()
        scaled = (
            None if g is None or not want else _scaled(g, factor, dtype, in_place=once)
            for g, dtype, want in zip(gradients, ctx.dtypes, wanted(ctx)[:3], strict=True)
        )
        return (*scaled, None, None, None, None, None)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    if not in_place or gradient.dtype is not dtype:
        return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
    return torch.mul(gradient, factor, out=gradient)


def counted_labels(labels: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """Return which labels count; raise IndexError if one on the CPU is out of range."""
    counted = labels != ignore_index
    if labels.device.type == "cpu":
        wrong = labels[counted & ((labels < 0) | (labels >= vocabulary))]
        if len(wrong):
            raise IndexError(f"labels must be from 0 to {vocabulary - 1} or {ignore_index}, got {int(wrong[0])}")
    return counted


@one_option
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    divisor: float | Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Compute ``cross_entropy(linear(x, weight, bias).float(), labels)`` a chunk of rows at a time.

    Forward computes the gradients too and saves them instead of the logits; backward only scales them. The gradients
    are those of the unchunked functions, with the sum for ``weight`` accumulated in float32.

    Parameters
    ----------
    x : Tensor, [..., in], floating point
        The last hidden states.
    weight : Tensor, [vocabulary, in]
        The weight of the head, often tied to the embedding.
    labels : Tensor, [...], int64
        The class of each row, or ``ignore_index`` for rows to leave out.
    bias : Tensor, [vocabulary], optional
    ignore_index : int
        The label of rows without a loss.
    reduction : {"mean", "sum"}
        "mean" divides the sum of the losses by the number of rows with a label other than ``ignore_index``.
    divisor : float or Tensor of one element, optional
        Divides the sum of the losses; for ``reduction="sum"`` only.
    softcap : float, optional
        Above zero: bounds the logits to ``softcap * tanh(logits / softcap)``, as Gemma 2 does.
    chunk : int, optional
        Rows per chunk; by default enough for 256 MiB of logits.
    impl : {"auto", "triton", "cuda", "cpu", "reference"}
        "triton" names the Triton kernel, the default on CUDA; all other values run torch's operators.

    Returns
    -------
    Tensor, no dimensions
        float32, or float64 if ``x`` is float64. Differentiable once: backward with ``create_graph=True`` raises
        PyactcompError.

    Raises
    ------
    TypeError
        If ``labels`` is not an int64 tensor.
    ValueError
        If dtypes or devices do not match, or an option has a value not listed above.
    IndexError
        If a label is out of range, on the CPU. On other devices the check would make the host wait: there the loss
        and the gradient of the row are NaN.
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of ``x``.

    Notes
    -----
    Memory: with n rows, a vocabulary of v and c bytes an element, forward allocates one chunk of logits, the gradient
    of ``x`` (``n * in * c``), the sum for ``weight`` (``v * in * 4``) and, if autocast casts ``weight`` or v is not a
    multiple of 64, a copy of ``weight`` (``v * in * c``). The two gradients live until backward; the gradient of a
    bfloat16 ``weight`` is saved in bfloat16. Backward scales the gradients in place. If the graph is retained, or the
    dtype of autocast differs from the dtype of ``x``, backward writes the scaled gradient to new memory instead.

    Logits and their gradients are rounded to the dtype of the products, as in the unchunked functions. The gradients
    are scaled before this rounding, up to a power of two. The chunked order of computation is that of Liger-Kernel
    (Hsu et al., 2024).

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional import linear_cross_entropy
    >>> x, weight = torch.randn(32, 64), torch.randn(100, 64, requires_grad=True)
    >>> labels = torch.randint(100, (32,))
    >>> loss = linear_cross_entropy(x, weight, labels)
    >>> bool(torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.T, labels)))
    True
    """
    check_float_tensor("x", x)
    check_float_tensor("weight", weight)
    if not isinstance(labels, Tensor) or labels.dtype is not torch.int64:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be a torch.Tensor of torch.int64, got {got}")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or labels.shape != x.shape[:-1]:
        raise ValueError(
            "linear_cross_entropy expects x of [..., in], weight of [vocabulary, in] and labels of [...], got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
        )
    if bias is not None:
        check_float_tensor("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"linear_cross_entropy expects a bias of {tuple(weight.shape[:1])}, got {(*bias.shape,)}")
    if weight.device != x.device or labels.device != x.device:
        raise ValueError(
            f"x, weight and labels must be on one device, got {x.device}, {weight.device}, {labels.device}"
        )
    check_choice("reduction", reduction, ("mean", "sum"))
    check_choice("impl", impl, codec.IMPLS)
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be a number of rows, at least 1, or None, got {chunk!r}")
    if softcap is not None:
        plain = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
        if not plain or not 0 < softcap < math.inf:
            raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    if divisor is not None and reduction != "sum":
        raise ValueError(f"divisor is for reduction='sum', got it with {reduction!r}")
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    elif any(t is not None and t.dtype is not dtype for t in (weight, bias)):
        raise ValueError(f"x, weight and bias must have one dtype without autocast, got {dtype} and {weight.dtype}")
    labels = labels.reshape(-1).contiguous()
    counted = counted_labels(labels, ignore_index, weight.shape[0])
    exact = wide(dtype)
    rows, loss_of = x.reshape(-1, x.shape[-1]), RowLoss(ignore_index, chunk, impl, softcap)
    if reduction == "mean":
        by = counted.sum().to(exact)
    elif isinstance(divisor, Tensor):
        by = divisor.detach().to(x.device, exact).reshape(())
    else:
        by = torch.full((), 1.0 if divisor is None else divisor, dtype=exact, device=x.device)
    # If all labels are ignore_index, the mean is NaN and the gradients are zeros, as in torch.
    scale = 1 / (by.clamp(min=1) if reduction == "mean" else by)
    with torch.autocast(x.device.type, enabled=False):
        if recorded(x, weight, bias):
            arguments = rows, weight, bias, labels, by, scale, dtype, loss_of
            # It saves gradients: of no use on the host, as backward begins with them.
            with staying():
                return cast(Tensor, _LinearCrossEntropy.apply(*arguments))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            losses, *_ = _walk(rows, weight, bias, labels, None, dtype, loss_of, (False, False, False))
            return losses.sum() / by
