"""Works with: a training step captured in a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from works_with import MIN_BYTES, Transformer, assert_compressed, gradients, regression

import pyactcomp

pytestmark = pytest.mark.gpu


def capture(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture forward and backward; return the graph and the bytes that its forward leaves allocated."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            F.mse_loss(model(inputs), targets).backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        loss = F.mse_loss(model(inputs), targets)
        held = torch.cuda.memory_allocated() - before
        loss.backward()
    return graph, held


def test_replay_of_a_captured_step_gives_the_gradients_of_an_eager_one() -> None:
    torch.manual_seed(0)
    eager = pyactcomp.compress(Transformer().cuda(), min_bytes=MIN_BYTES)
    captured = copy.deepcopy(eager)
    inputs, targets = regression("cuda")
    static_inputs, static_targets = inputs.clone(), targets.clone()
    graph, _ = capture(captured, static_inputs, static_targets)
    assert_compressed(pyactcomp.report(captured))

    # Other data at each replay, so that packing has to be part of the graph.
    for shift in (0.0, 1.0, -2.0):
        static_inputs.copy_(inputs + shift)
        static_targets.copy_(targets - shift)
        graph.replay()
        eager.zero_grad()
        F.mse_loss(eager(inputs + shift), targets - shift).backward()
        replayed = gradients(captured)
        for name, expected in gradients(eager).items():
            assert torch.equal(replayed[name], expected), name


def test_captured_forward_holds_less_when_compressed() -> None:
    torch.manual_seed(0)
    exact = Transformer().cuda()
    model = pyactcomp.compress(copy.deepcopy(exact), min_bytes=MIN_BYTES)
    # Large enough for the allocator's rounding to 512 bytes not to matter.
    inputs, targets = regression("cuda", batch=64)
    # The first capture also holds the workspace that cuBLAS takes for the capturing stream.
    capture(copy.deepcopy(exact), inputs, targets)
    _, held = capture(model, inputs, targets)
    _, exact_held = capture(exact, inputs, targets)
    report = pyactcomp.report(model)
    # What is not in the report, as the loss and its inputs, is held by both.
    assert exact_held - held >= 0.9 * (report.unique_bytes - report.stored_bytes)
