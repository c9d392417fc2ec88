"""Pausing and resuming the memory of a GPU. Each case has its own process."""

from __future__ import annotations

import pytest
from child_script import run_case

from pyactcomp import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h"),
]

CASES = "allocator_pausing_cases.py"


@pytest.mark.parametrize(
    "case",
    ["contents", "dropped", "graph", "backward", "other_thread", "on_allocation", "in_a_capture", "regions"],
)
def test_memory_is_paused_and_resumed(case: str) -> None:
    run_case(CASES, case)


def test_fifty_cycles_compute_what_no_pause_computes() -> None:
    without, again, paused = (run_case(CASES, "cycles", pauses).stdout for pauses in ("False", "False", "True"))
    assert without == again, "the program does not repeat itself"
    assert without == paused
