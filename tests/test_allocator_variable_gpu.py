"""PYACTCOMP_ALLOCATOR=1 on a GPU, with the torch subclass: no call in the program enables anything."""

from __future__ import annotations

from pathlib import Path

import allocator_variable_checks as checks
import pytest

from pyactcomp.torch_private import extensions

MODULE, REASON = extensions.load("_torch_allocator")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(MODULE is None, reason=f"the torch subclass is missing: {REASON}"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checks.with_the_checkout(tmp_path_factory.mktemp("environment"))[0]


@pytest.mark.parametrize("case", checks.CASES)
def test_the_allocator_is_attached_as_torch_initialises_cuda(case: str, python: Path) -> None:
    checks.check(python, case, stand_in=False)


def test_children_under_run_have_the_allocator(python: Path) -> None:
    pytest.importorskip("typer")
    checks.check_run(python, stand_in=False)
