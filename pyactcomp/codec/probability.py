"""Probabilities and their logarithms in 16 bits: the logit, on a grid.

The derivative of a loss is the probability less a target. Against a class the difference is small where the probability
is near one, against another distribution everywhere, so both the probability and its distance from one need relative
precision. A grid of logits gives both: half a step is 0.034 %, and 0.22 % of probabilities below 1e-7, as in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Below exp(-88) float32 is subnormal; the largest logit below a probability of one is 16.6. The grid
# is coarser below MIDDLE.
LOWEST, MIDDLE = -88.0, -16.0
# Logit 0 has a code of its own, so that two equal probabilities add up to one. The last code stands for logit 17.
COARSE, FINE = (MIDDLE - LOWEST) / 16384, -MIDDLE / 23830
# The codes of zero, of MIDDLE, of one, and of NaN. Int16 holds a code less BIAS.
ZERO, SPLIT, ONE, NAN, BIAS = 0, 16385, 65534, 65535, 32768
NEAREST_TO_ONE = 2.0**-25
LOG_OF_ZERO = -128.0
"""The exponential is zero in float32."""


def _encode(log: Tensor, rest: Tensor) -> Tensor:
    logit = log - rest.clamp(min=NEAREST_TO_ONE).log()
    fine = (logit - MIDDLE) * (1 / FINE) + (SPLIT + 0.5)
    coarse = (logit - LOWEST) * (1 / COARSE) + 1.5
    code = torch.where(logit < MIDDLE, coarse, fine).clamp(ZERO, ONE + 0.5).floor()
    return torch.where(rest.isnan(), NAN - BIAS, code - BIAS).to(torch.int16)


def _decode(codes: Tensor, dtype: torch.dtype, value: Callable[[Tensor], Tensor], zero: float, one: float) -> Tensor:
    code = codes.to(dtype) + BIAS
    logit = torch.where(code < SPLIT, (code - 1) * COARSE + LOWEST, (code - SPLIT) * FINE + MIDDLE)
    x = torch.where(code == ZERO, zero, torch.where(code == ONE, one, value(logit)))
    return torch.where(code == NAN, float("nan"), x)


def encode(p: Tensor) -> Tensor:
    """Return int16 codes of probabilities: from zero to one, or NaN."""
    return _encode(p.log(), 1 - p)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the probabilities of codes; zero, one and NaN come back as themselves."""
    return _decode(codes, dtype, torch.sigmoid, 0.0, 1.0)


def encode_log(x: Tensor) -> Tensor:
    """Return int16 codes of log-probabilities: zero or less, or NaN."""
    log = x.clamp(max=0)
    return _encode(log, -log.expm1())


def decode_log(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-probabilities of codes, ``LOG_OF_ZERO`` for probabilities below the grid."""
    return _decode(codes, dtype, torch.nn.functional.logsigmoid, LOG_OF_ZERO, 0.0)
