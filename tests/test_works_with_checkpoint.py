"""Works with: torch.utils.checkpoint, inside a compressed model and, refused, around one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from works_with import DEVICES, MIN_BYTES, WIDTH, Block, Transformer, assert_step_agrees, regression

import pyactcomp
from pyactcomp.codec import format as fmt
from pyactcomp.engine import policy

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
        policy.PARAMETER,
        policy.LEAF,
        policy.SMALL,
        policy.NO_GRAD,
    }


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
