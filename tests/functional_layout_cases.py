"""The layouts of what fused kernels make, on the device that this process has Triton kernels for.

Run by ``test_triton.py`` in processes of their own.
"""

from __future__ import annotations

import pytest
import torch
from layout_checks import LAYOUTS, PAIRS, check

from pyactcomp.codec.kernels import triton as kernels

DEVICE = torch.device("cpu" if kernels.interpreted() else "cuda")
# No kernels of Triton's serve them, or none without a GPU.
EAGER = {"dropout", "linear_cross_entropy"}


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("layout", LAYOUTS if not kernels.interpreted() else ["channels_last", "transposed and gapped"])
@pytest.mark.parametrize("name", [name for name in PAIRS if name not in EAGER or not kernels.interpreted()])
def test_results_lie_as_torchs(name: str, layout: str, bits: int | None) -> None:
    # The interpreter's functions are not those of the device, to the last bit.
    check(name, layout, bits, "triton", DEVICE, to_the_bit=False)
