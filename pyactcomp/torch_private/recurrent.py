"""LSTMs, GRUs and RNNs on phantom tensors, as cuDNN runs them: one operator, and the memory that it keeps for backward.

torch's own functions choose cuDNN by a table of kernels that a build without CUDA lacks, and its function for shapes
knows nothing of the kept memory, which is most of what these layers save. Their cells run by torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# cuDNN's numbers of the four kinds.
_RELU, _TANH, _LSTM, _GRU = range(4)
#: Of each kind, what cuDNN keeps: values of each step and unit, and of each unit. Measured with cuDNN 9.19 on an H200
#: for 1 to 3 layers, one direction and both, with and without dropout, but not for packed sequences and projections.
_KEPT = {_RELU: (1, 1), _TANH: (1, 1), _LSTM: (5, 2), _GRU: (6, 1)}


def reserve(
    mode: int, steps: int, batch: int, hidden: int, layers: int, directions: int, itemsize: int, dropout: bool
) -> int:
    """Return the bytes that cuDNN keeps from forward to backward; ``steps`` is the sum over the batch, over ``batch``.

    Between layers it keeps their results, and a bit of each where these are dropped.
    """
    each_step, each_unit = _KEPT[mode]
    units = batch * hidden * directions
    kept = layers * (each_step * steps * hidden * directions + each_unit * units)
    between = (layers - 1) * steps * hidden * directions
    return (kept + between) * itemsize + (-(-between // 8) if dropout else 0)


def _forward(
    input: Tensor,
    weight: Sequence[Tensor],
    _weight_stride0: int,
    _weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    _dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:
    directions = 2 if bidirectional else 1
    batch = hx.shape[1]
    steps = input.shape[0] if batch_sizes else input.shape[0] * input.shape[1]
    width = (projected or hidden) * directions
    if batch_sizes:
        out = input.new_empty(steps, width)
    elif batch_first:
        out = input.new_empty(input.shape[1], batch, width).transpose(0, 1)
    else:
        out = input.new_empty(input.shape[0], batch, width)
    hy = hx.new_empty(layers * directions, batch, projected or hidden)
    cy = hx.new_empty(0 if cx is None else (layers * directions, batch, hidden))
    size = reserve(mode, steps, batch, hidden, layers, directions, input.itemsize, dropout > 0) if train else 0
    # The weights lie in one buffer, which is counted as theirs.
    return out, hy, cy, input.new_empty(size, dtype=torch.uint8), weight[0].new_empty(0)


def _backward(input: Tensor, weight: Sequence[Tensor], *rest: Any) -> tuple[Any, ...]:
    hx, cx, wanted = rest[2], rest[3], rest[-1]
    gradients = [torch.empty_like(each) for each in weight] if wanted[3] else []
    return (
        torch.empty_like(input) if wanted[0] else None,
        torch.empty_like(hx) if wanted[1] else None,
        torch.empty_like(cx) if wanted[2] and cx is not None else None,
        gradients,
    )


# Of cells: ATen's RNN.cu.
def _lstm_cell(gates: Tensor, _gates: Tensor, cx: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(cx), torch.empty_like(cx), gates.new_empty(gates.shape)


def _lstm_cell_backward(_hy: Any, _cy: Any, cx: Tensor, _new: Tensor, workspace: Tensor, biases: bool) -> Any:
    bias = workspace.new_empty(workspace.shape[1]) if biases else None
    return torch.empty_like(workspace), torch.empty_like(cx), bias


def _gru_cell(_gates: Tensor, _hidden_gates: Tensor, hx: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad: Tensor, workspace: Tensor, biases: bool) -> Any:
    gates = workspace.shape[0], workspace.shape[1] // 5 * 3
    of_biases = [workspace.new_empty(gates[1]) if biases else None for _ in range(2)]
    return workspace.new_empty(gates), workspace.new_empty(gates), torch.empty_like(grad), *of_biases


#: Functions for the shapes of operators that have kernels for CUDA alone.
SHAPES: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn": _forward,
    "_cudnn_rnn_backward": _backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


def _run(
    mode: int, input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], batch_sizes: Any, *how: Any
) -> Any:
    biases, layers, dropout, train, bidirectional, batch_first = how
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        input = input.to(dtype)
        states, weights = [each.to(dtype) for each in states], [each.to(dtype) for each in weights]
    hx, cx = states[0], states[1] if len(states) > 1 else None
    hidden = (hx if cx is None else cx).shape[2]
    projected = hx.shape[2] if hx.shape[2] != hidden else 0
    each = (4 if biases else 2) + (1 if projected else 0)
    sizes = [] if batch_sizes is None else batch_sizes.tolist()
    out = torch.ops.aten._cudnn_rnn(
        input, weights, each, None, hx, cx, mode, hidden, projected, layers, batch_first, dropout, train, bidirectional,
        sizes, None,
    )  # fmt: skip
    return out[:3] if cx is not None else out[:2]


def _of_batch(mode: int) -> Callable[..., Any]:
    def run(input: Tensor, states: Any, weights: Sequence[Tensor], *how: Any) -> Any:
        return _run(mode, input, states if mode == _LSTM else [states], weights, None, *how)

    return run


def _of_packed(mode: int) -> Callable[..., Any]:
    def run(data: Tensor, batch_sizes: Tensor, states: Any, weights: Sequence[Tensor], *how: Any) -> Any:
        return _run(mode, data, states if mode == _LSTM else [states], weights, batch_sizes, *how, False)

    return run


def serve() -> torch.library.Library:
    """Let the recurrent layers run as cuDNN's operator on CUDA, as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, mode in (("lstm", _LSTM), ("gru", _GRU), ("rnn_tanh", _TANH), ("rnn_relu", _RELU)):
        for key in ("AutogradCUDA", "CUDA"):
            library.impl(f"{name}.input", _of_batch(mode), key)  # type: ignore[no-untyped-call]
            library.impl(f"{name}.data", _of_packed(mode), key)  # type: ignore[no-untyped-call]
    # Otherwise the layers would ask for the buffer of their weights.
    torch.backends.cudnn.is_acceptable = lambda _: False
    return library
