"""What the distributed tests share, and what their processes run; these report through files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from works_with import MIN_BYTES, Block, Transformer, gradients, regression

import pyactcomp
from pyactcomp.report import Report

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]

Worker = Callable[[int, str], dict[str, Any]]

# Three samples a rank, so that no flattened activation (96 positions) has the shape of a weight.
BATCH = 6


def need_devices(backend: str, count: int) -> None:
    """Skip where NCCL would have fewer GPUs than processes."""
    if backend == "nccl" and torch.cuda.device_count() < count:
        pytest.skip(f"NCCL over {count} processes needs as many GPUs, found {torch.cuda.device_count()}")


def assert_no_weight_compressed(report: Report) -> None:
    """Assert that nothing packed has the shape of a matrix of :class:`Block`; no activation of a rank has one."""
    weights = {tuple(sorted(p.shape)) for p in Block().parameters() if p.dim() == 2}
    packed = {tuple(sorted(tensor.shape)) for tensor in report.tensors if tensor.kept is None}
    assert packed
    assert not packed & weights


@contextmanager
def process_group(backend: str, rank: int, world: int, directory: Path) -> Iterator[None]:
    """Join the group through a file, which needs no free port."""
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_of(backend: str, rank: int) -> str:
    """Return the device on which a rank works."""
    return f"cuda:{rank}" if backend == "nccl" else "cpu"


def _run(rank: int, worker: Worker, backend: str, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    with process_group(backend, rank, world, directory):
        torch.save(worker(rank, backend), directory / f"{rank}.pt")


def run(worker: Worker, backend: str, world: int, directory: Path) -> list[dict[str, Any]]:
    """Run ``worker(rank, backend)`` in ``world`` processes and return what each of them returned."""
    method = forked.context.get_start_method()
    mp.start_processes(_run, args=(worker, backend, world, directory), nprocs=world, start_method=method)
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _shard(device: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = regression(device, BATCH)
    return inputs.chunk(dist.get_world_size())[rank], targets.chunk(dist.get_world_size())[rank]


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Transformer().to(device)


def exact_gradients(device: str) -> dict[str, torch.Tensor]:
    """Return the gradients of the whole batch in one process, without compression."""
    model = _model(device)
    inputs, targets = regression(device, BATCH)
    F.mse_loss(model(inputs), targets).backward()
    return gradients(model)


def ddp(rank: int, backend: str) -> dict[str, Any]:
    """Take one step of each nesting of compression and DDP."""
    device = device_of(backend, rank)
    ids = [rank] if backend == "nccl" else None
    inside, outside = _model(device), _model(device)
    pyactcomp.compress(inside, min_bytes=MIN_BYTES)
    wrapped = {
        "compress inside": nn.parallel.DistributedDataParallel(inside, device_ids=ids),
        "compress outside": pyactcomp.compress(
            nn.parallel.DistributedDataParallel(outside, device_ids=ids), min_bytes=MIN_BYTES
        ),
    }
    inputs, targets = _shard(device, rank)
    results = {}
    for name, model in wrapped.items():
        F.mse_loss(model(inputs), targets).backward()
        owner = inside if model.module is inside else model
        results[name] = {n: g.cpu() for n, g in gradients(model.module).items()}, pyactcomp.report(owner)
    return results


def fsdp(rank: int, backend: str) -> dict[str, Any]:
    """Take one step with sharded parameters: under full and under mixed precision, and with shards on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    device = device_of(backend, rank)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    inputs, targets = _shard(device, rank)
    results = {}
    for name, policy, offload in (
        ("float32", MixedPrecisionPolicy(), OffloadPolicy()),
        ("bfloat16", MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), OffloadPolicy()),
        ("on the host", MixedPrecisionPolicy(), CPUOffloadPolicy(pin_memory=backend == "nccl")),
    ):
        model = _model(device)
        exact = copy.deepcopy(model)
        for m in (model, exact):
            for block in m.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
            fully_shard(m, mesh=mesh, mp_policy=policy, offload_policy=offload)
        pyactcomp.compress(model, min_bytes=MIN_BYTES)
        found = []
        for m in (model, exact):
            F.mse_loss(m(inputs).float(), targets).backward()
            if name == "on the host":
                assert all(p.device.type == p.grad.device.type == "cpu" for p in m.parameters())
            found.append({n: p.grad.to(device).full_tensor().cpu() for n, p in m.named_parameters()})
        results[name] = found[0], found[1], pyactcomp.report(model)
    return results


def tensor_parallel(rank: int, backend: str) -> dict[str, Any]:
    """Run the output part of a BERT's block, its Linear sharded, exactly and compressed, and note what its norm got."""
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    from pyactcomp.fusions.families.transformers import modules as transformers_modules

    given: list[str] = []
    own = transformers_modules.add_layer_norm

    def noted(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        given.append(type(x).__name__)
        return own(x, *args, **options)

    transformers_modules.add_layer_norm = noted  # type: ignore[assignment]
    device = device_of(backend, rank)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    results: dict[str, Any] = {}
    for p in (0.0, 0.5):
        torch.manual_seed(0)
        config = transformers.BertConfig(hidden_size=128, hidden_dropout_prob=p)
        model = transformers.models.bert.modeling_bert.BertSelfOutput(config).to(device)
        parallelize_module(model, mesh, {"dense": RowwiseParallel(input_layouts=Replicate())})
        inputs, grad = torch.randn(2, 64, 128, device=device)
        found = []
        for compressed in (False, True):
            if compressed:
                pyactcomp.compress(model, min_bytes=0)
            x = inputs.clone().requires_grad_()
            torch.manual_seed(1)
            out = model(x, x)
            out.backward(grad)
            found.append({"out": out.detach().cpu(), "x": x.grad.cpu()})
        results[f"p={p}"] = found[1], found[0]
    return {"given": given, "results": results}


def tiled_mlp(rank: int, backend: str) -> dict[str, Any]:
    """Take one step of models whose MLPs run in tiles of tokens, under DDP and with sharded parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from works_with_text import built, llama, phi3, text

    from pyactcomp.fusions.families.transformers import tiles

    device = device_of(backend, rank)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    own, calls = tiles.gated_mlp, []
    tiles.gated_mlp = lambda *args, **options: calls.append(options["tile"]) or own(*args, **options)
    batch = {name: value.chunk(dist.get_world_size())[rank] for name, value in text(device).items()}
    results = {}
    for name, build in (("llama", llama), ("phi3", phi3)):
        for wrapped in ("ddp", "fsdp2"):
            calls.clear()
            found = []
            for options in ({"min_bytes": 0, "tile": 16}, None):
                model = built(build).to(device)
                if wrapped == "fsdp2":
                    for block in model.model.layers:
                        fully_shard(block, mesh=mesh)
                    fully_shard(model, mesh=mesh)
                if options is not None:
                    pyactcomp.compress(model, **options)
                ids = [rank] if backend == "nccl" else None
                outer = nn.parallel.DistributedDataParallel(model, device_ids=ids) if wrapped == "ddp" else model
                outer(**batch).loss.backward()
                grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                found.append({n: (g.full_tensor() if wrapped == "fsdp2" else g).cpu() for n, g in grads.items()})
            results[f"{name}, {wrapped}"] = *found, list(calls)
    return results
