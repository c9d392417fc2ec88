"""One sample of each of some of PyTorch's own operators, drawn once, through compressed graphs."""

from __future__ import annotations

import pytest
import torch
from compiled_operators import DRAWN, failures


# Torch warns of its own beta features. Each operator takes a second or two to compile; `make sweep` runs all.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWN[:20])
def test_operator(name: str) -> None:
    found = failures(name, torch.float32)
    if found is None:
        pytest.skip("no gradient, or torch compiles no such step")
    assert found == []
