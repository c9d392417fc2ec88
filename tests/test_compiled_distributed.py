"""Works with: DistributedDataParallel and FSDP2 around and inside torch.compile, its graphs compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distributed_worker as worker
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compiled_backend import REORDERED, as_inductor, held_by_graphs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from works_with import GRADIENT_BOUND, MIN_BYTES, Block, gradients, relative_error

import pyactcomp

pytestmark = pytest.mark.slow

WORLD = 2
LOSSLESS: dict[str, Any] = {"mode": "lossless", "min_bytes": 1}
INT8: dict[str, Any] = {"min_bytes": MIN_BYTES}
# Smaller than a block's parameters: torch splits the graph at the buckets.
BUCKET_MIB = 0.1

MODES = {"plain": None, "lossless": LOSSLESS, "int8": INT8}

Options = dict[str, Any] | None


def backend_of(name: str) -> Any:
    # On the CPU Inductor would spend the time on the C++ compiler.
    return as_inductor if name == "gloo" else "inductor"


def ddp_around_compiled_blocks(model: nn.Module, options: Options, backend: Any, ddp: Any) -> nn.Module:
    if options is not None:
        pyactcomp.compress(model, **options)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return ddp(model)


def ddp_around_a_compiled_model(model: nn.Module, options: Options, backend: Any, ddp: Any) -> nn.Module:
    if options is not None:
        pyactcomp.compress(model, **options)
    model.compile(backend=backend)
    return ddp(model)


def compiled_ddp(model: nn.Module, options: Options, backend: Any, ddp: Any) -> nn.Module:
    if options is not None:
        pyactcomp.compress(model, **options)
    return torch.compile(ddp(model), backend=backend)


def compressed_and_compiled_ddp(model: nn.Module, options: Options, backend: Any, ddp: Any) -> nn.Module:
    wrapped = ddp(model)
    if options is not None:
        pyactcomp.compress(wrapped, **options)
    return torch.compile(wrapped, backend=backend)


NESTINGS = [ddp_around_compiled_blocks, ddp_around_a_compiled_model, compiled_ddp, compressed_and_compiled_ddp]


def run_ddp(rank: int, name: str) -> dict[str, Any]:
    device = worker.device_of(name, rank)
    ids = [rank] if name == "nccl" else None
    inputs, targets = worker._shard(device, rank)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1024
    results = {}
    for nesting in NESTINGS:
        # Around a model that is compiled inside, DDP runs the graphs of the compiled DDP.
        modes = MODES if nesting in (ddp_around_compiled_blocks, compiled_ddp) else {"int8": INT8}
        for mode, options in modes.items():
            torch.compiler.reset()
            model = worker._model(device)
            wrapped: list[nn.Module] = []

            def ddp(model: nn.Module, wrapped: list[nn.Module] = wrapped) -> nn.Module:
                wrapped.append(DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=BUCKET_MIB))
                return wrapped[0]

            call = nesting(model, options, backend_of(name), ddp)
            loss = F.mse_loss(call(inputs), targets)
            held, graphs = held_by_graphs(loss, model)
            loss.backward()
            owner = wrapped[0] if nesting is compressed_and_compiled_ddp else model
            report = pyactcomp.report(owner) if options is not None else None
            results[nesting.__name__, mode] = gathered(model), report, held, graphs
    return results


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients on the CPU."""
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).cpu() for n, g in gradients(model).items()}


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_ddp_gradients_agree_and_the_report_is_complete(backend: str, tmp_path: Path) -> None:
    worker.need_devices(backend, WORLD)
    exact = worker.exact_gradients("cpu")
    first, second = worker.run(run_ddp, backend, WORLD, tmp_path)
    for (nesting, mode), (found, report, held, graphs) in first.items():
        error = relative_error(found, exact)
        assert relative_error(second[nesting, mode][0], found) == 0.0
        # Torch splits the graph of the model, and of each block, at the buckets.
        blocks = 2 if nesting == "ddp_around_compiled_blocks" else 1  # both run the same graphs
        assert graphs > blocks
        if mode == "plain":
            assert error <= REORDERED
            continue
        assert held == blocks * sum(graph.after for graph in report.graphs)
        if mode == "lossless":
            # Inductor fuses the two forwards in other ways.
            assert relative_error(found, first[nesting, "plain"][0]) <= (0.0 if backend == "gloo" else REORDERED)
        else:
            assert REORDERED < error <= GRADIENT_BOUND
            assert held < 0.6 * blocks * sum(graph.before for graph in report.graphs)


def run_fsdp(rank: int, name: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = worker.device_of(name, rank)
    mesh = init_device_mesh(torch.device(device).type, (WORLD,))
    inputs, targets = worker._shard(device, rank)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for mode, options in MODES.items():
            if mode == "lossless" and dtype is torch.bfloat16:
                continue
            torch.compiler.reset()
            model = worker._model(device)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            if options is not None:
                pyactcomp.compress(model, **options)
            for block in model.blocks:
                block.compile(backend=backend_of(name))
            loss = F.mse_loss(model(inputs).float(), targets)
            held, graphs = held_by_graphs(loss, model)
            loss.backward()
            report = pyactcomp.report(model) if options is not None else None
            results[str(dtype), mode] = gathered(model), report, held, graphs
    return results


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_fsdp2_gradients_agree_and_gathered_weights_are_not_compressed(backend: str, tmp_path: Path) -> None:
    worker.need_devices(backend, WORLD)
    exact = worker.exact_gradients("cpu")
    weights = {tuple(sorted(p.shape)) for p in Block().parameters() if p.dim() == 2}
    for rank in worker.run(run_fsdp, backend, WORLD, tmp_path):
        assert relative_error(rank["torch.float32", "plain"][0], exact) <= REORDERED
        for (dtype, mode), (found, report, held, graphs) in rank.items():
            error = relative_error(found, rank[dtype, "plain"][0])
            assert graphs == 2
            if mode == "lossless":
                assert error <= (0.0 if backend == "gloo" else REORDERED)
            elif mode == "int8":
                assert 0.0 < error <= GRADIENT_BOUND
                assert relative_error(found, exact) <= GRADIENT_BOUND
                # Both blocks run one graph.
                (graph,) = report.graphs
                assert held == 2 * graph.after < 2 * 0.8 * graph.before
                packed = {tuple(sorted(value.shape)) for value in graph.saved if value.form == "codes"}
                assert packed
                assert not packed & weights
