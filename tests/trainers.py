"""What the tests of trainers share: bytes as in a plain loop, and losses that follow those without compression."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from test_integrations import OPTIONS, STEPS
from torch import Tensor, nn
from works_with import GRADIENT_BOUND

import pyactcomp

RATIO_BAR = 0.05
LR = 0.02


def ratio(report: pyactcomp.Report) -> float:
    """Return the stored bytes by those that plain torch would hold."""
    return report.stored_bytes / report.unique_bytes


def plain_loop(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> float:
    """Return the ratio of one step of a compressed copy in a loop of one's own, loss included."""
    model = pyactcomp.compress(copy.deepcopy(model).train(), **OPTIONS)
    loss_of(model).backward()
    return ratio(pyactcomp.report(model))


def assert_ratio(report: pyactcomp.Report | None, expected: float) -> None:
    assert report is not None
    assert abs(ratio(report) - expected) <= RATIO_BAR, (ratio(report), expected)


def assert_follows(got: list[float], exact: list[float]) -> None:
    """Compare two curves of losses.

    To first order a step changes the loss by ``lr * g . g'``, and ``g'`` is off by at most the bar: twice the bar of
    all that the loss has moved leaves room for the curvature. Fused forwards sum in another order: an ulp or so.
    """
    assert len(got) == len(exact) >= STEPS
    moved = max(exact) - min(exact)
    assert moved > 0
    assert got[0] == pytest.approx(exact[0], rel=2.0**-20)
    for loss, expected in zip(got, exact, strict=True):
        assert abs(loss - expected) <= 2 * GRADIENT_BOUND * moved + 2.0**-20 * abs(expected)
