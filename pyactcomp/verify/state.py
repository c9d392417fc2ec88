"""Reads the state of a model from the graph of a loss: uniformity of the classes, largest attention logit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..torch_private import saved_as_it_is

_NEARLY_UNIFORM = 0.9
"""Share of the largest entropy above which a model looks untrained; Llamas of 256 to 32,000 tokens are initialised at
0.99 and above."""
_ROWS_BYTES = 64 << 20
"""Bytes of log-probabilities reduced at a time."""


@dataclass(frozen=True)
class State:
    """The state of a model; a value is None if the graph has no such operator.

    Attributes
    ----------
    uniformity : float or None
        Mean entropy of the class distributions from ``log_softmax``, as a share of the largest possible; the smallest
        mean over several calls.
    attention_logit : float or None
        The largest log-sum-exp over the rows of fused attentions, an upper bound of all logits.
    """

    uniformity: float | None
    attention_logit: float | None

    @property
    def looks_untrained(self) -> bool:
        """Whether the class distributions are nearly uniform."""
        return self.uniformity is not None and self.uniformity > _NEARLY_UNIFORM


def state_of(loss: Tensor) -> State:
    """Return the state read from a loss's graph; skips tensors packed by other hooks, such as checkpointing's."""
    uniformities, logits = [], []
    with torch.no_grad():
        for node in _nodes(loss):
            name = node.name()
            if name == "LogSoftmaxBackward0":
                result = saved_as_it_is(node, "result")
                if result is not None and result.numel():
                    uniformities.append(_uniformity(result, node))
            elif name.startswith("ScaledDotProduct"):
                logit = _largest_log_sum_exp(node)
                if logit is not None:
                    logits.append(logit)
    return State(min(uniformities, default=None), max(logits, default=None))


def _nodes(loss: Tensor) -> Iterator[Node]:
    left = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


def _uniformity(log_probabilities: Tensor, node: Any) -> float:
    dim = node._saved_dim
    # The node returns a negative dimension as an unsigned number.
    rows = log_probabilities.movedim(dim - 2**64 if dim >= 2**63 else dim, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    classes = rows.shape[-1]
    if classes == 1:
        return 0.0
    together = max(1, _ROWS_BYTES // (4 * classes))
    entropies = [torch.special.entr(part.float().exp()).sum(-1) for part in torch.split(rows, together)]
    return float(torch.cat(entropies).mean()) / math.log(classes)


def _largest_log_sum_exp(node: Any) -> float | None:
    query = saved_as_it_is(node, "query")
    sums = saved_as_it_is(node, "logsumexp")
    if sums is None:
        sums = saved_as_it_is(node, "log_sum_exp")
    if query is None or sums is None:
        return None
    # Memory-efficient attention pads the rows; a row that attends to nothing has an infinite sum.
    if sums.dim() == 3:
        sums = sums[..., : query.shape[-2]]
    finite = sums[sums.isfinite()]
    return float(finite.max()) if finite.numel() else None
