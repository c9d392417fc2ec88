"""Random programs, compiled: lossless to the bit, int8 as exact as eager int8."""

from __future__ import annotations

import compiled_programs
import programs
import pytest
import torch

# Programs with values in codes; the sweep draws others.
SEEDS = (50_000_004, 50_000_005, 50_000_007)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_program(seed: int) -> None:
    result = compiled_programs.failures(compiled_programs.module_of(programs.generate(seed)))
    torch._dynamo.reset()
    assert result is not None, "torch compiles the program"
    found, codes = result
    assert codes > 0
    assert not found
