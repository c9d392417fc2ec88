"""Works with: torch.utils.checkpoint, inside a compressed model and, refused, around one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from works_with import (
    DEVICES,
    GRADIENT_BOUND,
    MIN_BYTES,
    WIDTH,
    Block,
    Transformer,
    assert_step_agrees,
    regression,
    relative_error,
)

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.engine import reasons

BLOCKS = 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpointed_blocks_hold_their_compressed_inputs_and_nothing_else(device: str, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(BLOCKS, use_reentrant).to(device)
    inputs, targets = regression(device)
    report = assert_step_agrees(model, lambda m: F.mse_loss(m(inputs), targets))

    packed = [tensor for tensor in report.tensors if tensor.kept is None]
    hidden = inputs.shape[0] * inputs.shape[1] * WIDTH
    # The blocks and the head save their inputs; the embedding's is the model's own and kept as it is.
    sizes = [hidden] * (BLOCKS + 1)
    assert sum(tensor.unique_bytes for tensor in packed) == sum(4 * numel for numel in sizes)
    assert sum(tensor.stored_bytes for tensor in packed) == sum(fmt.packed_nbytes(numel, 8, 64) for numel in sizes)
    # torch passes an empty leaf along, so that the checkpoint has an input that requires grad.
    assert {tensor.kept for tensor in report.tensors} <= {
        None,
        reasons.PARAMETER,
        reasons.LEAF,
        reasons.SMALL,
        reasons.NO_GRAD,
    }


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_the_input_of_a_checkpointed_block_lies_in_memory_as_in_the_first_run(use_reentrant: bool) -> None:
    """Operators choose their kernels, and what they save, by strides: torch's checkpoint compares what is saved."""
    torch.manual_seed(0)
    strides = []

    def block(h: Tensor) -> Tensor:
        strides.append(h.stride())
        return torch.mv(weight, h) if h.is_contiguous() else (weight * h).sum(1)

    x, weight = torch.randn(8 * WIDTH, requires_grad=True), torch.randn(WIDTH, 4 * WIDTH, requires_grad=True)
    gradients = []
    for context in (nullcontext(), pyactcomp.compressed(min_bytes=0)):
        with context:
            loss = checkpoint(block, x.sin()[::2], use_reentrant=use_reentrant).square().sum()
        loss.backward()
        gradients.append({"x": x.grad, "weight": weight.grad})
        x.grad = weight.grad = None
    assert strides == [(2,)] * 4
    assert 0 < relative_error(gradients[1], gradients[0]) <= GRADIENT_BOUND


def test_checkpoint_around_a_compressed_module_is_refused_or_left_alone() -> None:
    torch.manual_seed(0)
    block = pyactcomp.compress(Block(), min_bytes=MIN_BYTES)
    x = torch.randn(2, 16, WIDTH, requires_grad=True)
    with pytest.raises(pyactcomp.HookConflictError, match=r"torch\.utils\.checkpoint"):
        checkpoint(block, x, use_reentrant=False)

    # What steps aside are the hooks; a fused module stores codes of its own accord.
    pyactcomp.compress(pyactcomp.decompress(block), fuse=False, min_bytes=MIN_BYTES, on_conflict="skip")
    checkpoint(block, x, use_reentrant=False).sum().backward()
    checkpointed = x.grad
    x.grad = None
    pyactcomp.decompress(block)(x).sum().backward()
    assert torch.equal(checkpointed, x.grad)
