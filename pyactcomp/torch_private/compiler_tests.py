"""A test for each private name of ``torch.compile`` in ``torch_private``, as ``tests.py`` has for the others."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from . import (
    backend_being_traced,
    constant_in_graphs,
    owner_being_traced,
    tracing_context,
)


def _test_partitions() -> None:
    import sympy  # type: ignore[import-untyped]
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import FloorDiv

    from . import partitions

    assert partitions.missing() is None, partitions.missing()
    names = inspect.signature(partitions.min_cut).parameters
    assert list(names)[:2] == ["joint", "joint_inputs"]
    graph = torch.fx.Graph()
    primal, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    assert partitions.is_primal(primal)
    assert [partitions.is_tangent(node) for node in (primal, tangent)] == [False, True]
    with partitions.partitioning(lambda _, size: size, lambda *_: None):
        pass
    assert partitions.input_infos(1) is None
    before = partitions.installed_partitioner()
    partitions.set_partitioner(before)
    assert partitions.installed_partitioner() is before

    class Metadata:
        input_info = ("of one input",)

    fw_metadata = Metadata()
    partitions.remember(before)
    assert fw_metadata._pyactcomp_note is before  # type: ignore[attr-defined]
    runs: list[object] = []
    x = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: runs.append(partitions.running_graph()), lambda _: x):
        aot_function(torch.sin, boxed_nop, boxed_nop)(x).sin()  # type: ignore[arg-type]
    assert [run is None for run in runs] == [False, True]
    assert len(partitions.traced(torch.neg, torch.zeros(2)).graph.nodes) == 3
    partitions.count_whole(("named_by_the_test_",))
    # Of 256 elements, each 64 share one of the input.
    index = sympy.Symbol("i0", integer=True)
    shared = MemoryDep("primals_1", FloorDiv(index, 64), (index,), (sympy.Integer(256),))
    assert shared.get_numel() == 256
    named = shared.rename({"primals_1": "named_by_the_test_1"})
    with V.set_graph_handler(SimpleNamespace(get_numel=lambda name: 4)):  # type: ignore[arg-type]
        assert named.get_numel() == 4


def _test_notes_on_nodes() -> None:
    """Test that a node of a joint graph tells its operator, and a derivative's node the operator of the forward."""
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.aot_autograd import aot_function
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.traceback import preserve_node_meta

    from . import partitions

    nodes: list[torch.fx.Node] = []

    def partition(joint: torch.fx.GraphModule, inputs: object, **given: Any) -> Any:
        nodes.extend(joint.graph.find_nodes(op="call_function", target=torch.ops.aten.erf.default))
        return partitions.min_cut(joint, inputs, **given)

    x = torch.ones(1, requires_grad=True)
    graph = aot_function(torch.nn.functional.gelu, boxed_nop, boxed_nop, partition, select_decomp_table())  # type: ignore[arg-type]
    with preserve_node_meta():
        graph(x)
    operators = [str(partitions.original_operator(node)) for node in nodes]
    assert operators == ["aten.gelu.default", "aten.gelu_backward.default"], operators
    assert [partitions.is_of_derivative(node) for node in nodes] == [False, True]
    first, second = map(partitions.autograd_number, nodes)
    assert first is not None
    assert first == second


def _test_tracing_context() -> None:
    context = torch._guards.TracingContext(None)
    with torch._guards.tracing(context):
        assert tracing_context() is context
    assert tracing_context() is None


def _test_backend_being_traced() -> None:
    seen: list[str | None] = []

    @constant_in_graphs
    def probe() -> None:
        seen.append(backend_being_traced())

    def step(x: Tensor) -> Tensor:
        probe()
        return x + 1

    torch.compile(step, backend="eager")(torch.zeros(1))
    assert seen == ["eager"]


def _test_dynamo() -> None:
    # Imports the compiler, so only here.
    from .dynamo import is_refusal, missing, raised_recompile_limit, recompile_limit

    assert missing() is None, missing()
    limit = recompile_limit()

    def step(x: Tensor, name: str) -> Tensor:
        if not name:
            torch._dynamo.graph_break()
        return x + len(name)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    # Torch logs the limit that is reached here on purpose.
    silent = mock.patch.object(logging.getLogger("torch._dynamo.convert_frame"), "disabled", True)
    with raised_recompile_limit(1), silent:
        assert recompile_limit() == 1
        compiled(torch.zeros(1), "a")
        for name in ("", "bb"):
            try:
                compiled(torch.zeros(1), name)
                refused = False
            except Exception as error:
                refused = is_refusal(error)
            assert refused, name
    assert recompile_limit() == limit
    compiled(torch.zeros(1), "bb")


def _test_owner_being_traced() -> None:
    seen: list[object] = []

    class Owner:
        one = 1

        def step(self, x: Tensor) -> Tensor:
            x = x + self.one
            torch._dynamo.graph_break()
            x = x + 2  # self is passed on
            torch._dynamo.graph_break()
            return x + self.one

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        seen.append(owner_being_traced())
        return graph.forward

    owner = Owner()
    assert owner_being_traced() is None
    torch.compile(owner.step, backend=backend)(torch.zeros(1))
    assert seen == [owner, None, owner]


TESTS: dict[str, Callable[[], None]] = {
    "torch._functorch.partitioners; custom_partitioner_fn; fw_metadata": _test_partitions,
    "node.meta: original_aten, seq_nr, partitioner_tag": _test_notes_on_nodes,
    "torch._guards.TracingContext": _test_tracing_context,
    "InstructionTranslator.current_tx().output.compiler_fn": _test_backend_being_traced,
    "torch._dynamo.exc, torch._dynamo.config.recompile_limit": _test_dynamo,
    "InstructionTranslator.current_tx().output: guards, root_tx.f_locals": _test_owner_being_traced,
}
