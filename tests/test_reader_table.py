"""The table of readers against torch's own formulas for gradients and its schemas: none is missing or misspelt."""

from __future__ import annotations

import functools

import pytest
import torch
from derivatives import saved_by_operator
from torch import Tensor

import pyactcomp
from pyactcomp.engine import reasons
from pyactcomp.readers import lookup as readers
from pyactcomp.readers.forms import AS_SHAPE
from pyactcomp.readers.table import DECIDING, ELEMENTWISE, READERS

SAVING = sorted(
    operator for operator, saved in saved_by_operator().items() if saved and not operator.startswith("_test")
)
ROWS = sorted((operator, operand) for operator, readings in READERS.items() for operand in readings)
NAMED = [row for row in ROWS if row[1] not in ("", "result")]


@functools.cache
def schemas() -> dict[str, list[torch._C.FunctionSchema]]:
    """Return the schemas of torch's own operators, of all overloads, by name."""
    found: dict[str, list[torch._C.FunctionSchema]] = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten":
            found.setdefault(name, []).append(schema)
    return found


def tensor_arguments(operator: str) -> set[str]:
    """Return the names of an operator's arguments that are tensors, of ``name`` in all overloads."""
    name, _, overload = operator.partition(".")
    meant = [schema for schema in schemas()[name] if not overload or schema.overload_name == overload]
    assert meant
    return {argument.name for schema in meant for argument in schema.arguments if "Tensor" in str(argument.type)}


def saved_by(operator: str) -> set[str]:
    """Return what an operator saves by torch's formulas, out of place or in place, of ``name`` in any overload."""
    name, _, overload = operator.partition(".")
    keys = {key for key in saved_by_operator() if key.partition(".")[0].removesuffix("_") == name.removesuffix("_")}
    return set().union(*(saved_by_operator()[key] for key in keys if not overload or key.partition(".")[2] == overload))


@pytest.mark.parametrize("operator", SAVING)
def test_every_operator_that_saves_a_tensor_is_known(operator: str) -> None:
    name, _, overload = operator.partition(".")
    _, result, unclear, _, _ = readers.of_operator(f"aten::{name}", overload)
    assert (result.known, unclear.known) == (True, True)


@pytest.mark.parametrize(("operator", "operand"), NAMED, ids="-".join)
def test_every_operand_is_an_argument_that_the_operator_saves(operator: str, operand: str) -> None:
    assert operand in tensor_arguments(operator) & saved_by(operator)


@pytest.mark.parametrize("operator", sorted({operator for operator, operand in ROWS if operand in ("", "result")}))
def test_what_is_said_of_results_and_of_any_operand_is_said_of_something(operator: str) -> None:
    saved = saved_by(operator)
    assert saved
    if "result" in READERS[operator]:
        assert saved - tensor_arguments(operator)


def test_every_row_has_a_reason_and_names_its_operator() -> None:
    for operator, operand in ROWS:
        reading = READERS[operator][operand]
        assert reading.known
        assert len(reading.why.split()) >= 3, (operator, operand)
        assert reading.operator == f"aten::{operator}"
        assert reading.reason == f"aten::{operator}({operand or 'any operand'}): {reading.why}"


def test_operators_that_decide_or_broadcast_exist() -> None:
    named = {name.removeprefix("aten::") for name in DECIDING} | ELEMENTWISE
    assert named <= set(schemas())


# Of each operator that reads a shape alone a call whose first argument, which is no leaf, it saves.
INDEX = torch.arange(8)
SHAPES = {
    "nll_loss_forward": lambda x: torch.nn.functional.nll_loss(x, INDEX % 4),
    "nll_loss2d_forward": lambda x: torch.nn.functional.nll_loss(
        x.view(2, 4, 2, 4), INDEX.view(2, 4).expand(2, 2, 4) % 4
    ),
    "_adaptive_avg_pool2d": lambda x: torch.nn.functional.adaptive_avg_pool2d(x.view(2, 4, 2, 4), (2, 2)),
    "_adaptive_avg_pool3d": lambda x: torch.nn.functional.adaptive_avg_pool3d(x.view(2, 2, 2, 2, 4), (1, 1, 2)),
    "avg_pool2d": lambda x: torch.nn.functional.avg_pool2d(x.view(2, 4, 2, 4), 2),
    "avg_pool3d": lambda x: torch.nn.functional.avg_pool3d(x.view(2, 2, 2, 2, 4), 2),
    "reflection_pad1d": lambda x: torch.nn.functional.pad(x[None], (1, 1), mode="reflect"),
    "reflection_pad2d": lambda x: torch.nn.functional.pad(x.view(2, 4, 2, 4), (1, 1, 1, 1), mode="reflect"),
    "reflection_pad3d": lambda x: torch.nn.functional.pad(x.view(2, 2, 2, 2, 4), (1, 1) * 3, mode="reflect"),
    "replication_pad1d": lambda x: torch.nn.functional.pad(x[None], (1, 1), mode="replicate"),
    "replication_pad2d": lambda x: torch.nn.functional.pad(x.view(2, 4, 2, 4), (1, 1, 1, 1), mode="replicate"),
    "replication_pad3d": lambda x: torch.nn.functional.pad(x.view(2, 2, 2, 2, 4), (1, 1) * 3, mode="replicate"),
    "max_pool2d_with_indices": lambda x: torch.nn.functional.max_pool2d(x.view(2, 4, 2, 4), 2),
    "max_pool3d_with_indices": lambda x: torch.nn.functional.max_pool3d(x.view(2, 2, 2, 2, 4), 2),
    "adaptive_max_pool2d": lambda x: torch.nn.functional.adaptive_max_pool2d(x.view(2, 4, 2, 4), (2, 2)),
    "adaptive_max_pool3d": lambda x: torch.nn.functional.adaptive_max_pool3d(x.view(2, 2, 2, 2, 4), (1, 1, 2)),
    "fractional_max_pool2d": lambda x: fractional(2, x.view(2, 4, 2, 4)),
    "fractional_max_pool3d": lambda x: fractional(3, x.view(2, 2, 2, 2, 4)),
    "masked_select": lambda x: x.masked_select(INDEX[:, None] % 2 == 0),
    "gather": lambda x: x.gather(1, INDEX[:, None] % 4),
    "take": lambda x: x.take(INDEX),
    "index_add": lambda x: torch.zeros(8, 8).index_add(0, INDEX, x),
    "index_copy": lambda x: torch.zeros(8, 8).index_copy(0, INDEX, x),
    "put": lambda x: torch.zeros(64).put(INDEX[:, None] * 8 + INDEX, x),
    "_fft_r2c": lambda x: torch.view_as_real(torch.fft.rfft(x)),
}


def fractional(dimensions: int, x: Tensor) -> Tensor:
    pool = getattr(torch.nn.functional, f"fractional_max_pool{dimensions}d")
    return pool(x, 1, output_size=(1,) * dimensions, _random_samples=torch.full((2, x.shape[1], dimensions), 0.5))


def test_every_operator_that_reads_a_shape_alone_has_a_case() -> None:
    assert set(SHAPES) == {operator for operator, operand in ROWS if READERS[operator][operand].form is AS_SHAPE}


@pytest.mark.parametrize("operator", SHAPES)
def test_a_gradient_that_needs_a_shape_alone_is_that_of_torch(operator: str) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (exact,) = torch.autograd.grad(SHAPES[operator](x * 1).square().sum(), x)
    with pyactcomp.compressed(min_bytes=0) as c:
        out = SHAPES[operator](x * 1)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(gradient, exact)
    saved = pyactcomp.report(c).tensors
    assert [tensor.stored_bytes for tensor in saved if tensor.kept == reasons.SHAPE_ALONE] == [0]
