"""Launches of compressed graphs in the Triton code that Inductor generates: packing and restoring add few."""

from __future__ import annotations

import pytest
import torch
from test_compiled_graphs import Block, Llama
from torch import Tensor, nn

import pyactcomp

pytest.importorskip("triton", reason="Triton is not installed")

from triton_code import Launch, launches_of

pytestmark = pytest.mark.slow


def _launches(kind: type[nn.Module], compressed: bool) -> tuple[list[Launch], list[Launch], pyactcomp.Report | None]:
    torch.manual_seed(0)
    blocks = (kind(False), kind(False)) if kind is Block else (kind(), kind())
    model = nn.Sequential(*blocks).to(torch.bfloat16)
    if compressed:
        pyactcomp.compress(model, min_bytes=4096)
    x = torch.randn(4, 64, 128, dtype=torch.bfloat16)

    def step(x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    forward, backward = launches_of(step, x)
    return forward, backward, pyactcomp.report(model) if compressed else None


def _sum(launches: list[Launch]) -> int:
    return sum(launch.nbytes for launch in launches)


@pytest.mark.parametrize("kind", [Block, Llama])
def test_packing_breaks_no_fusion_and_restoring_fuses(kind: type[nn.Module]) -> None:
    forward, backward, _ = _launches(kind, False)
    packed_forward, packed_backward, report = _launches(kind, True)
    assert report is not None
    (graph,) = report.graphs
    codes = [value for value in graph.saved if value.form == "codes"]
    assert codes
    # The packing kernels are no Triton code of Inductor's. A sum or product may be written out for its kernel alone;
    # queries, keys and values of one projection are copied out of its result.
    copied = [value for value in graph.saved if value.operator == "permute"]
    assert len(packed_forward) <= len(forward) + len(copied)
    written = sum(value.before for value in codes if value.operator in ("add", "mul"))
    # A copy reads and writes, but reads one tensor for three.
    read = sum(value.before * 4 for value in copied)
    assert _sum(packed_forward) <= _sum(forward) + written + read
    # Products of matrices and attention read tensors: one launch restores what they alone read.
    restored = [value for value in codes if value.operator in ("getitem", "mm", "addmm")]
    assert len(packed_backward) <= len(backward) + len(restored)
