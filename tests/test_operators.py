"""Gradients of PyTorch's operators and modules, entry by entry: bitwise without loss, within the bound in int8.

``python tests/operators.py`` runs all samples in all forms, layouts and dtypes; here are some of each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import operators
import pytest
import torch
from compositions import Composition, compositions
from operators import (
    CLOSE,
    DIFFERENT,
    FAILURES,
    NON_FINITE,
    RAISES,
    ROUNDING,
    SAME,
    SKIPPED,
    UNREPEATABLE,
    WRONG,
    Row,
    Run,
)
from torch import Tensor

OPERATORS = {dtype: {each.full_name: each for each in operators.operators(dtype)} for dtype in operators.DTYPES}
MODULES = {each.name: each for each in operators.modules()}
FORMS = ("function", "in place")

# Operators that backward multiplies by, or a smooth bounded function of what they save: these must save memory. The
# samples of norms have too few elements for it; test_exactness has larger ones.
PACKED = (
    "addmm",
    "baddbmm",
    "bmm",
    "einsum",
    "matmul",
    "mm",
    "mul",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.gelu",
    "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.silu",
    "sigmoid",
    "tanh",
)


def _check(rows: Iterable[Row]) -> None:
    found = list(rows)
    failures = [str(row) for row in found if row.outcome in FAILURES]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    if all(row.outcome == SKIPPED for row in found):
        pytest.skip(found[0].note)


@pytest.mark.parametrize("name", OPERATORS[torch.float32])
def test_lossless_gradients_of_operators_are_bitwise_those_of_torch(name: str) -> None:
    entry = OPERATORS[torch.float32][name]
    rows = list(operators.operator_rows(entry, modes=["lossless"], forms=FORMS, rotate=True, samples=4))
    _check(rows)
    assert any(row.outcome == SAME for row in rows), "\n".join(map(str, rows))


@pytest.mark.parametrize("name", OPERATORS[torch.float32])
def test_int8_gradients_of_operators_are_close_in_every_layout(name: str) -> None:
    entry = OPERATORS[torch.float32][name]
    _check(operators.operator_rows(entry, modes=["int8"], forms=FORMS, samples=2))


@pytest.mark.parametrize("name", OPERATORS[torch.bfloat16])
def test_int8_gradients_of_operators_are_close_in_bfloat16(name: str) -> None:
    entry = OPERATORS[torch.bfloat16][name]
    rows = operators.operator_rows(
        entry, dtype=torch.bfloat16, modes=["int8"], forms=["function"], layouts=["plain"], samples=2
    )
    _check(rows)


@pytest.mark.parametrize("composition", compositions, ids=lambda each: each.full_name)
def test_lossless_gradients_of_compositions_are_bitwise_those_of_torch_in_bfloat16(composition: Composition) -> None:
    rows = operators.operator_rows(composition, dtype=torch.bfloat16, modes=["lossless"], layouts=["plain"])
    _check(rows)


@pytest.mark.parametrize("dtype", operators.DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_modules_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    rows = operators.module_rows(MODULES[name], dtype=dtype, layouts=["plain", "transposed"], samples=2)
    _check(rows)


@pytest.mark.parametrize("name", PACKED)
def test_what_backward_multiplies_by_is_packed(name: str) -> None:
    rows = operators.operator_rows(
        OPERATORS[torch.float32][name], modes=["int8"], forms=["function"], layouts=["plain"], samples=4
    )
    assert any(row.packed for row in rows)


@pytest.mark.parametrize(
    ("mode", "change", "outcome"),
    [
        ("lossless", lambda g: g.clone(), SAME),
        ("lossless", lambda g: g.nextafter(g + 1), DIFFERENT),
        ("lossless", lambda g: g * torch.tensor([-1.0, 1.0, 1.0, 1.0]), DIFFERENT),  # a zero's sign
        ("int8", lambda g: g * (1 + 0.99 * operators.BOUND), CLOSE),
        ("int8", lambda g: g * (1 + 1.01 * operators.BOUND), WRONG),
        ("int8", lambda g: g.log().neg().exp(), NON_FINITE),
        ("int8", lambda g: g @ g.reshape(2, 2), RAISES),
    ],
)
def test_outcomes_tell_gradients_apart(mode: str, change: Callable[[Tensor], Tensor], outcome: str) -> None:
    gradient = torch.tensor([0.0, 1.0, 2.0, float("nan")])

    def run(mode: str | None) -> Run:
        return Run([change(gradient) if mode in operators.MODES else gradient])

    assert operators.judged(run, run(None), mode)[0] == outcome


@pytest.mark.parametrize(("exact", "outcome"), [(0.0, ROUNDING), (1e-9, WRONG)])
def test_a_gradient_that_is_rounding_has_no_relative_error(exact: float, outcome: str) -> None:
    def run(mode: str | None) -> Run:
        return Run([torch.tensor([{None: 1e-9, operators.WIDE: exact}.get(mode, 2e-9)])])

    assert operators.judged(run, run(None), "int8")[0] == outcome
    assert operators.judged(run, run(None), "lossless")[0] == DIFFERENT


def test_what_does_not_repeat_itself_is_not_a_failure() -> None:
    def run(_mode: str | None) -> Run:
        return Run([torch.rand(9)])

    assert operators.judged(run, run(None), "lossless")[0] == UNREPEATABLE
