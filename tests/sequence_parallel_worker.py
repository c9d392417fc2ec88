"""What the processes of the tests of sequence parallelism run: Llama's block under the usual plans."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_worker import device_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from works_with import MIN_BYTES

import pyactcomp
from pyactcomp.engine import gathered

WIDTH, HIDDEN, HEADS, LENGTH, TOKENS, BLOCKS = 64, 128, 4, 32, 32, 2
# Modules that read a gathered sequence, and the reads of one block.
READS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")


class Attention(nn.Module):
    """Causal attention over as many heads as the projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q(x), self.k(x), self.v(x)))
        return self.o(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm, as Llama's."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(WIDTH, eps=1e-5), Attention()
        self.mlp_norm, self.mlp = norm(WIDTH, eps=1e-5), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A language model of which each process holds a part of the sequence between the blocks."""

    def __init__(self, norm: type[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(BLOCKS))
        self.norm, self.head = norm(WIDTH, eps=1e-5), nn.Linear(WIDTH, TOKENS, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Case(NamedTuple):
    """A model, a plan and a configuration."""

    norm: type[nn.Module]
    prepared: bool  # one gather for all projections, as torchtitan's plan has; else one for each
    batch: int
    fuse: bool = True
    checkpointed: bool = False
    backwards: int = 1
    autocast: bool = False


CASES = {
    "each projection gathers": Case(nn.RMSNorm, False, 2),
    "one gather for all": Case(nn.RMSNorm, True, 2),
    "layer norm, one sequence": Case(nn.LayerNorm, False, 1),
    "layer norm, one gather, one sequence": Case(nn.LayerNorm, True, 1),
    "each projection gathers, nothing fused": Case(nn.RMSNorm, False, 2, fuse=False),
    "one gather for all, nothing fused": Case(nn.LayerNorm, True, 2, fuse=False),
    "two backwards": Case(nn.RMSNorm, False, 2, backwards=2),
    "under autocast": Case(nn.LayerNorm, False, 2, autocast=True),
    "under autocast, one gather": Case(nn.LayerNorm, True, 2, autocast=True),
    "checkpointed blocks": Case(nn.RMSNorm, True, 2, checkpointed=True),
}
if find_spec("transformers") is not None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    CASES["transformers' norm"] = Case(LlamaRMSNorm, False, 1)


def plan(prepared: bool) -> dict[str, Any]:
    """Return the plan of one block."""
    gathering = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    read = ColwiseParallel() if prepared else ColwiseParallel(input_layouts=Shard(1))
    written = RowwiseParallel(output_layouts=Shard(1))
    return {
        **({"attention": gathering, "mlp": gathering} if prepared else {}),
        **dict.fromkeys(READS, read),
        **dict.fromkeys(("attention.o", "mlp.down"), written),
        **dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel()),
    }


def build(case: Case, mesh: DeviceMesh, device: str) -> Model:
    """Return the model, the same in all processes, and parallel."""
    torch.manual_seed(0)
    model = Model(case.norm, case.checkpointed).to(device)
    for block in model.blocks:
        parallelize_module(block, mesh, plan(case.prepared))
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh, {"embedding": embedding, "norm": SequenceParallel(), "head": head})
    return model


def whole(tensor: Any) -> Tensor:
    """Return a gradient, of all processes if it is distributed."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def step(model: Model, case: Case, device: str) -> dict[str, Tensor]:
    """Return the gradients of a step."""
    tokens = torch.randint(0, TOKENS, (case.batch, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=case.autocast):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    for left in reversed(range(case.backwards)):
        loss.backward(retain_graph=left > 0)
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def steps(rank: int, backend: str) -> dict[str, Any]:
    """Take a step of each case, exactly and compressed, and count what is gathered in backward."""
    device = device_of(backend, rank)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    gathers, own = [], gathered.all_gather

    def counted(out: Tensor, tensor: Tensor, group: Any) -> None:
        gathers.append(tensor.nbytes)
        own(out, tensor, group)

    gathered.all_gather = counted  # type: ignore[assignment]
    results = {}
    for name, case in CASES.items():
        exact = step(build(case, mesh, device), case, device)
        model = pyactcomp.compress(build(case, mesh, device), min_bytes=MIN_BYTES, fuse=case.fuse)
        gathers.clear()
        found = step(model, case, device)
        results[name] = found, exact, pyactcomp.report(model), list(gathers)
    dist.barrier()
    return results


class Writing(nn.Module):
    """Two projections of a norm's output, which is written to in between, out of autograd's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, write: str) -> Tensor:
        x = self.norm(x)
        q = self.q(x)
        with torch.no_grad():
            if write == "DTensor":
                x.mul_(2)
            elif write == "local tensor":
                x.to_local().mul_(2)
        return q + self.k(x)


def written(rank: int, backend: str) -> dict[str, Any]:
    """Return gradients where a norm's output is written to between two gathers, and errors."""
    device = device_of(backend, rank)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    read = ColwiseParallel(input_layouts=Shard(1))
    results: dict[str, Any] = {}
    for write in ("nothing", "DTensor", "local tensor"):
        found = []
        for compressed in (False, True):
            torch.manual_seed(0)
            model = Writing().to(device)
            parallelize_module(model, mesh, {"norm": SequenceParallel(), "q": read, "k": read})
            if compressed:
                pyactcomp.compress(model, min_bytes=0)
            x = torch.randn(2, LENGTH // dist.get_world_size(), WIDTH, device=device, requires_grad=True)
            out = model(x, write)
            out.square().sum().backward()
            found.append({n: whole(p.grad) for n, p in model.named_parameters() if n.startswith(("q", "k"))})
        codes = {t.module: t.stored_bytes for t in pyactcomp.report(model).tensors if t.kept is None}
        results[write] = found[1], found[0], codes
    results["outside"] = _read_outside(mesh, device)
    results["edited"] = _edited(mesh, device)
    results["rows"] = _normalised(mesh, device)
    results["awaited"] = _awaited(mesh, device)
    dist.barrier()
    return results


def _read_outside(mesh: DeviceMesh, device: str) -> str:
    """Return the error of reading a saved tensor outside of backward."""
    linear = nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH, bias=False)).to(device)
    parallelize_module(linear, mesh, {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))})
    pyactcomp.compress(linear, min_bytes=0)
    out = linear(torch.randn(2, LENGTH, WIDTH, device=device, requires_grad=True))
    node: Any = out.grad_fn  # held by the output: under torch 2.11 a node of Python has no name once nothing holds it
    while node.name() not in ("MmBackward0", "LinearBackward0"):
        node = node.next_functions[0][0]
    try:
        getattr(node, "_saved_self" if node.name() == "MmBackward0" else "_saved_input")
    except pyactcomp.PyactcompError as error:
        return str(error)
    return ""


def _normalised(mesh: DeviceMesh, device: str) -> tuple[Tensor, Tensor, int]:
    """Return gradients of a norm of rows that were gathered along the row, and the bytes stored for the rows."""
    local = torch.randn(LENGTH, WIDTH // dist.get_world_size(), device=device)
    found = []
    for min_bytes in (1 << 40, 0):
        x = DTensor.from_local(local, mesh, [Shard(1)]).requires_grad_()
        with pyactcomp.compressed(min_bytes=min_bytes) as c:
            rows = x.redistribute(placements=[Replicate()])
            F.layer_norm(rows, (WIDTH,)).to_local().mul(torch.arange(WIDTH, device=device)).sum().backward()
        found.append(whole(x.grad))
    return found[1], found[0], sum(t.stored_bytes for t in pyactcomp.report(c).tensors if t.shape == (LENGTH, WIDTH))


def _awaited(mesh: DeviceMesh, device: str) -> dict[str, tuple[Tensor, Tensor, str, int]]:
    """Return gradients of SiLU of a sum over processes that no one has waited for, its type, and the bytes stored."""
    local = torch.randn(LENGTH, WIDTH, device=device)
    results = {}
    for name in ("DTensor", "local tensor"):
        found = []
        for min_bytes in (1 << 40, 0):
            x = DTensor.from_local(local, mesh, [Partial()]).requires_grad_()
            with pyactcomp.compressed(min_bytes=min_bytes) as c:
                summed = x.redistribute(placements=[Replicate()], async_op=True)
                out = F.silu(summed if name == "DTensor" else summed.to_local())
                (out.to_local() if name == "DTensor" else out).sum().backward()
            found.append(whole(x.grad))
        stored = sum(t.stored_bytes for t in pyactcomp.report(c).tensors if t.shape == (LENGTH, WIDTH))
        kind = type(x.redistribute(placements=[Replicate()], async_op=True).to_local()).__name__
        results[name] = found[1], found[0], kind, stored
    return results


def _edited(mesh: DeviceMesh, device: str) -> dict[str, str]:
    """Return the errors of backward where a saved DTensor was written to, without and with compression."""
    errors = {}
    for mode in ("", "int8", "lossless"):
        x = DTensor.from_local(torch.randn(LENGTH, WIDTH, device=device), mesh, [Shard(0)]).requires_grad_()
        with pyactcomp.compressed(mode=mode or "int8", min_bytes=0 if mode else 1 << 40):
            saved = x * 1
            out = F.silu(saved).sum()
            with torch.no_grad():
                saved.mul_(2)
            try:
                out.backward()
                errors[mode] = ""
            except RuntimeError as error:
                errors[mode] = str(error)
    return errors
