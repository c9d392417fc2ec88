"""Works with: sequence parallelism, where the projections of all processes read the gathered sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed_worker
import pytest
import sequence_parallel_worker as worker
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from works_with import GRADIENT_BOUND, relative_error

from pyactcomp.codec import format as fmt
from pyactcomp.functional.saving import begin, differentiable_once
from pyactcomp.torch_private import has_no_memory

WORLD = 2


def codes_of(batch: int, processes: int) -> int:
    """Return the bytes of the codes of a sequence, or of the shard of one of several processes, padded as they are."""
    nbytes = fmt.packed_nbytes(batch * worker.LENGTH * worker.WIDTH // processes, 8, 64)
    return nbytes if processes == 1 else nbytes + -nbytes % fmt.ALIGNMENT


@pytest.mark.parametrize("backend", distributed_worker.BACKENDS)
def test_each_process_stores_the_codes_of_its_shard(backend: str, tmp_path: Path) -> None:
    distributed_worker.need_devices(backend, WORLD)
    for results in distributed_worker.run(worker.steps, backend, WORLD, tmp_path):
        for name, (found, exact, report, gathers) in results.items():
            case = worker.CASES[name]
            assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND, name
            norms = [module for module, _ in report.fused if "norm" in module]
            assert len(norms) == (2 * worker.BLOCKS + 1 if case.fuse else 0), name
            reads = [f"blocks.{index}.{read}" for index in range(worker.BLOCKS) for read in worker.READS]
            reads = ["head"] if case.checkpointed else [*reads, "head"]
            read = [tensor for tensor in report.tensors if tensor.module in reads and tensor.kept is None]
            assert sorted(tensor.module for tensor in read) == sorted(reads), name
            assert {tensor.shape for tensor in read} == {(case.batch * worker.LENGTH, worker.WIDTH)}, name
            # Before, each result of a gather was stored whole.
            sequences = 1 if case.checkpointed else 2 * worker.BLOCKS + 1
            before = (sequences if case.prepared else len(reads)) * codes_of(case.batch, 1)
            shards = sequences if case.prepared or case.fuse else len(reads)
            stored = sum(tensor.stored_bytes for tensor in read)
            assert stored == shards * codes_of(case.batch, WORLD), name
            assert stored <= before / 2 + shards * fmt.ALIGNMENT, name
            # One gather in backward for all that read one region, of 8-bit codes.
            assert gathers == [codes_of(case.batch, WORLD)] * shards * case.backwards, name


@pytest.mark.parametrize("backend", distributed_worker.BACKENDS)
def test_shards_are_shared_only_if_nobody_wrote_to_them(backend: str, tmp_path: Path) -> None:
    distributed_worker.need_devices(backend, WORLD)
    for results in distributed_worker.run(worker.written, backend, WORLD, tmp_path):
        shard = codes_of(2, WORLD)
        for write, shares in (("nothing", True), ("DTensor", False), ("local tensor", False)):
            found, exact, codes = results[write]
            assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND, write
            assert (codes["q"], codes["k"]) == (shard, 0 if shares else shard), write
        assert "read outside of backward" in results["outside"]
        # Groups of codes lie within rows, which a shard cuts: the rows are stored whole.
        found, exact, stored = results["rows"]
        assert 0.0 < relative_error({"x": found}, {"x": exact}) <= GRADIENT_BOUND
        assert stored == fmt.packed_nbytes(worker.LENGTH * worker.WIDTH, 8, 64)
        for found, exact, kind, stored in results["awaited"].values():
            assert kind == "AsyncCollectiveTensor"
            assert 0.0 < relative_error({"x": found}, {"x": exact}) <= GRADIENT_BOUND
            assert stored == fmt.packed_nbytes(worker.LENGTH * worker.WIDTH, 8, 64)
        assert results["edited"].keys() == {"", "int8", "lossless"}
        assert all("modified by an inplace operation" in error for error in results["edited"].values())


class Identity(torch.autograd.Function):
    """Returns its argument, and in backward the address from which a kernel would read the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        begin(ctx)
        return x.clone()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        return (torch.full_like(grad, float(grad.data_ptr() != 0)),)


def test_backward_waits_for_a_gradient_that_a_collective_still_computes() -> None:
    x = torch.ones(4, requires_grad=True)
    grad = AsyncCollectiveTensor(torch.ones(4))
    # Functions without the decorator ask this, and leave such a gradient to torch's operators, which wait.
    assert has_no_memory(grad)
    assert not has_no_memory(x)
    Identity.apply(x).backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4))
