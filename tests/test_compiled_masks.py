"""Comparisons of the backward move to where the forward computes what they read."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from pyactcomp.compiled.masks import _Copier


def _graph(build: Callable[[fx.Graph], fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph))
    return fx.GraphModule({}, graph)


def _forward(graph: fx.Graph) -> fx.Node:
    y = graph.call_function(torch.neg, (graph.placeholder("x"),))
    z = graph.call_function(torch.exp, (y,))
    return graph.call_function(torch.cos, (z,))


def test_copies_behind_one_value_stand_in_the_order_of_their_reads() -> None:
    forward = _graph(_forward)

    def recomputed(graph: fx.Graph) -> fx.Node:
        y = graph.placeholder("neg")
        a = graph.call_function(torch.sin, (y,))
        b = graph.call_function(torch.tan, (a,))
        c = graph.call_function(torch.abs, (y,))
        zero = graph.call_function(torch.zeros, (8,))
        d = graph.call_function(operator.add, (c, zero))
        return graph.call_function(torch.gt, (b, d))

    backward = _graph(recomputed)
    comparison = backward.graph.find_nodes(op="output")[0].args[0]
    mask = _Copier(forward).copy(comparison)
    forward.graph.lint()
    names = [node.name for node in forward.graph.nodes]
    assert names.index(mask.name) < names.index("exp"), "far from what it reads"
    forward.graph.find_nodes(op="output")[0].args = (mask,)
    forward.recompile()
    x = torch.linspace(-1, 1, 8)
    assert torch.equal(forward(x), (-x).sin().tan() > (-x).abs())


def test_what_the_forward_computes_is_not_copied() -> None:
    forward = _graph(_forward)
    before = len(forward.graph.nodes)

    def recomputed(graph: fx.Graph) -> fx.Node:
        z = graph.call_function(torch.exp, (graph.placeholder("neg"),))
        # Of the same name, but another value.
        other = graph.create_node("call_function", torch.cos, (graph.placeholder("x"),), name="cos")
        return graph.call_function(torch.gt, (z, other))

    backward = _graph(recomputed)
    mask = _Copier(forward).copy(backward.graph.find_nodes(op="output")[0].args[0])
    forward.graph.lint()
    assert len(forward.graph.nodes) == before + 2
    own = {node.name: node for node in forward.graph.nodes}
    assert mask.args[0] is own["exp"]
    assert mask.args[1].target is torch.cos
    assert mask.args[1] is not own["cos"]
