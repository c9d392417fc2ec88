"""Launches of compressed graphs in the Triton code that Inductor generates: packing and restoring add few."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiled_blocks import Block, Llama
from torch import Tensor, nn

import pyactcomp
from pyactcomp.compiled.graphs import SavedValue
from pyactcomp.report import Report

pytest.importorskip("triton", reason="Triton is not installed")

from triton_code import Launch, launches_of

pytestmark = pytest.mark.slow


def _launches(kind: type[nn.Module], compressed: bool) -> tuple[list[Launch], list[Launch], Report | None]:
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
    # A first norm's output is computed again from the input, which is alive anyway and without codes: once for the
    # product that reads it, and the sums for gain and bias lie apart from those of other norms.
    held = [value for value in graph.saved if value.operator == "None"]
    assert len(packed_backward) <= len(backward) + len(restored) + 2 * len(held)


def test_convolutions_norms_and_activations_keep_their_launches() -> None:
    """Computed at the end of the forward, or in another order of memory, a mask reads what ReLU reads again.

    And an expression with too many operators is written out before the sums of a norm's derivative.
    """
    torch.manual_seed(0)

    def stage(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]

    # Deep enough that Inductor fuses nothing from both ends.
    layers = nn.Sequential(*stage(3), *(part for _ in range(15) for part in stage(64)), nn.Conv2d(64, 64, 1))
    sums: list[int] = []
    backwards: list[list[Launch]] = []
    saved: list[SavedValue] = []
    for compressed in (False, True):
        model = copy.deepcopy(layers).to(memory_format=torch.channels_last)
        if compressed:
            pyactcomp.compress(model, min_bytes=4096)
        forward, backward = launches_of(lambda x, model=model: model(x).mean(), torch.randn(64, 3, 32, 32))
        sums.append(_sum(forward))
        backwards.append(backward)
        if compressed:
            saved = list(pyactcomp.report(model).graphs[0].saved)
    # Beside the activations the kernel writes 16 bits of each standardized result of a convolution, for the codec, and
    # a byte for the mask's bits.
    halves = sum(value.before // 2 for value in saved if value.form == "codes" and value.operator == "convolution")
    masks = sum(value.before for value in saved if value.form == "bits")
    assert halves
    assert masks
    assert sums[1] <= sums[0] + halves + masks
    # In the backward each convolution's input is restored by one launch, but the first one's, which is kept.
    assert len(backwards[1]) <= len(backwards[0]) + len(list(layers)) // 3


def test_inductor_counts_stored_parts_by_their_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted once for each element, a group's parameters are the largest input, and all values are restored first."""
    from torch._inductor import memory

    planned = memory.prepare_planning_info
    sizes: dict[str, int] = {}

    def note(*arguments: Any) -> Any:
        peak, freeable = planned(*arguments)
        sizes.update({name: freeable[name].mpi_buffer.size_free for name in freeable})
        return peak, freeable

    monkeypatch.setattr(memory, "prepare_planning_info", note)
    _, _, report = _launches(Block, True)
    assert report is not None
    stored = sum(value.after for graph in report.graphs for value in graph.saved if value.form in ("codes", "bits"))
    counted = sum(size for name, size in sizes.items() if name.startswith(("codes_of_", "groups_of_", "bits_of_")))
    assert counted == stored
