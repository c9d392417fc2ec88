"""A backend of torch.compile that partitions as Inductor would, and runs the graphs without code generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

import pyactcomp
from pyactcomp.compiled.graphs import GraphRecord
from pyactcomp.compiled.partition import partition
from pyactcomp.config import Config
from pyactcomp.torch_private.partitions import installed_partitioner, installed_pre_grad_passes, min_cut

# How far decomposed operators, which sum in another order, move gradients: a few ulp through each of some 50 operators.
REORDERED = 64 * torch.finfo(torch.float32).eps


def _joint_passes(joint: fx.GraphModule, inputs: object) -> fx.GraphModule:
    """Run the passes of Inductor over a joint graph, but leave the random operators, which only its code replays."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(detect_fake_mode(inputs)), inductor_config.patch(fallback_random=True):
        passed: fx.GraphModule = joint_graph_passes(joint, torch.device("cpu"))
    return passed


def backend(config: Config | None, records: list[GraphRecord]) -> Callable[..., Any]:
    """Return the backend; without a configuration the partition is torch's."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    def parts(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = _joint_passes(joint, inputs)
        if config is None:
            return min_cut(joint, inputs, **kwargs)
        forward, backward, saved = partition(joint, inputs, config, **kwargs)
        records.append(GraphRecord("", saved))
        return forward, backward

    chosen: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=parts, decompositions=select_decomp_table()
    )
    return chosen


def as_inductor(graph: fx.GraphModule, inputs: Any) -> Any:
    """Compile as Inductor, with the partitioner that Inductor has, without code generation."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor.decomposition import select_decomp_table

    def parts(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return (installed_partitioner() or min_cut)(_joint_passes(joint, inputs), inputs, **kwargs)

    for graph_pass in installed_pre_grad_passes():
        graph_pass(graph.graph)
    graph.recompile()
    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=parts,
        decompositions=select_decomp_table(),
    )
    return compiler(graph, inputs)


def gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], config: Config | None, *arguments: Tensor, **options: Any
) -> tuple[Tensor, list[Tensor], list[GraphRecord]]:
    """Return loss, gradients of tensors, and the records of the graphs."""
    torch._dynamo.reset()
    records: list[GraphRecord] = []
    for tensor in tensors:
        tensor.grad = None
    torch.manual_seed(0)
    loss = torch.compile(function, backend=backend(config, records), fullgraph=True, **options)(*arguments)
    loss.backward()
    return loss.detach(), [t.grad.clone() for t in tensors if t.grad is not None], records


def off(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative L2 error of a list of gradients."""
    assert len(got) == len(expected)
    return max(
        float((a - b).double().norm() / b.double().norm().clamp(min=1e-30)) for a, b in zip(got, expected, strict=True)
    )


def _nodes(root: Node | None) -> Iterator[Any]:
    seen: set[Node] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            if "CompiledFunction" in type(node).__name__:
                yield node


def held_by_graphs(loss: Tensor, model: nn.Module) -> tuple[int, int]:
    """Return the bytes that compiled graphs hold for backward, parameters aside, and the number of graphs that ran."""
    parameters = {p.data_ptr() for p in model.parameters()}
    found = [node.saved_tensors for node in _nodes(loss.grad_fn)]
    return sum(t.nbytes for saved in found for t in saved if t.data_ptr() not in parameters), len(found)


def trained(build: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], packed: bool) -> nn.Module:
    """Return a compiled model with the gradients of one step; the seed is the same in each call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    if packed:
        pyactcomp.compress(model, min_bytes=1)
    model.compile(backend=as_inductor)
    loss(model).backward()
    return model
