"""Launches of the kernels of ReLU and of the backward of dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...codec import format as fmt
from ...engine.recompute import mark_as_packed
from ..elementwise import elementwise
from . import kernels


def relu(x: Tensor, inplace: bool) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return relu of a dense x, the bits of nonzero results, and the backward (bits, output's gradient -> gradient).

    Bytes moved per bfloat16 element: 4.125 each way.
    """
    on = elementwise(x)
    out = x if inplace else on.empty(x.dtype)
    nbytes = fmt.packed_bool_nbytes(x.numel())
    positive = mark_as_packed(torch.empty(nbytes, dtype=torch.uint8, device=x.device), x)
    on.launch(kernels, "relu_kernel", (), (x, out, positive))

    def backward(positive: Tensor, grad: Tensor) -> Tensor:
        grad_x = on.empty(grad.dtype)
        tensors = (positive, on.arrange(grad), grad_x)
        on.launch(kernels, "masked_kernel", (False,), tensors, (0.0,))
        return grad_x  # in the layout of the result, as in torch

    return out, positive, backward


def dropout_backward(bits: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Return ``grad * mask * scale`` with torch's rounding, from the bits of a dense mask in the layout of ``grad``.

    Bytes moved per bfloat16 element: 4.125, instead of 6.125 to restore the mask first.
    """
    on = elementwise(grad)
    grad_x = on.empty(grad.dtype)
    on.launch(kernels, "masked_kernel", (True,), (bits, grad, grad_x), (scale,))
    return grad_x
