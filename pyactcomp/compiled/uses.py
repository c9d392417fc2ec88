"""How exactly backward needs each value of a graph: the rule of eager mode, with its facts read from the graph.

Torch notes of each node from which operator it was decomposed, and for which of autograd's nodes it runs. So a reader
in backward leads to an operator of the forward, and with it to a row of ``readers/table.py``: however a GELU was
decomposed, its operand takes the form that it has in eager mode. What backward runs again of the forward reads its
operands as the derivative of the operator would, or as exactly as its result is read.

A reader without notes, as those that passes over the joint graph make, or the backward of an autograd function, is
known if it is a product. All others are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ..codec.layouts import Layout
from ..config import Config
from ..readers import rule
from ..readers.forms import (
    ARTANH,
    AS_CODES,
    AS_SHAPE,
    BFLOAT16,
    CODES,
    EXACT,
    GAINED,
    ITSELF,
    SCALED,
    STANDARDIZED,
    Reading,
    Use,
    strictest,
)
from ..readers.rule import LAYERS, Kind, Partner
from .checkpointed import Block
from .joint import CASTS, COMPARISONS, Joint, hint, name_of, value
from .operators import Operator, Operators, is_arrangement, is_fewer
from .standardized import Statistics

_COMPARED = Reading("a comparison", "operand", AS_SHAPE, "compared in the forward")
_UNREAD = Reading("", "", AS_SHAPE, "backward reads only the shape")
# The derivative of a product multiplies the gradient by the other factor.
_PRODUCTS = {"mm": Use.MATRIX, "bmm": Use.MATRIX, "addmm": Use.MATRIX, "baddbmm": Use.MATRIX, "mul": Use.FACTOR}
# Where a row or a channel of its own divides, or sums, the order in memory counts.
_BY_ROWS = (Use.ROWS, Use.CHANNELS, Use.HEADS, Use.INPUT)
_NORMS = (Use.ROWS, Use.CHANNELS)
# Each element of the result is one of an operand's.
_MOVES = (Kind.MOVES, Kind.MASKS)
_PROJECTS = (Kind.PRODUCT, Kind.BIASED_PRODUCT)
# The relative error of a result is that of an operand, or near it.
_CONDITIONED = (Kind.SCALES, Kind.ACTIVATES, Kind.RECTIFIES)


class Reader(NamedTuple):
    """An operator that reads a value, maybe through nodes that only arrange the value or belong to the operator.

    Attributes
    ----------
    operator : Operator
        Of the forward.
    result : fx.Node or None
        The operator's result that backward computes again; None if the operator's derivative reads the value.
    moved : bool
        Whether the reader has the value in another order than memory.
    order : tuple of int or None
        The value's dimensions as the reader has them; None if it reads other dimensions.
    """

    operator: Operator
    result: fx.Node | None
    moved: bool
    order: tuple[int, ...] | None


class Uses:
    """Answers how exactly the values of a joint graph, or of its backward, are needed.

    Parameters
    ----------
    graph : fx.Graph
        The joint graph.
    known : Joint
    config : Config
    blocks : mapping of str to Block
        The checkpointed block of each node in one.
    standardized : mapping of str to Statistics
        Values with a scale for each row, with what standardizes them.
    """

    def __init__(
        self,
        graph: fx.Graph,
        known: Joint,
        config: Config,
        blocks: Mapping[str, Block],
        standardized: Mapping[str, Statistics],
    ) -> None:
        self.known, self.config, self.blocks, self.standardized = known, config, blocks, standardized
        self.operators = Operators(graph, known)

    def __call__(
        self, graph: fx.Graph, tangent: Collection[str], within: Collection[str] | None = None
    ) -> dict[str, Reading]:
        """Return the strictest reading of each value that depends on no tangent.

        Parameters
        ----------
        graph : fx.Graph
            The joint graph or the backward graph.
        tangent : collection of str
            Nodes that depend on a tangent.
        within : collection of str or None
            Readers to count; None for all.
        """
        found: dict[str, Reading] = {}
        readers: dict[str, set[Reader]] = {}
        readings: dict[str, list[Reading]] = {}
        for node in reversed(graph.nodes):
            if node.name in tangent or node.op == "output":
                continue
            readers[node.name], readings[node.name] = set(), []
            for user in node.users:
                if within is None or user.name in within or user.op == "output":
                    self._add(node, user, tangent, readers, readings)
            found[node.name] = self._strictest(node, readers[node.name], readings[node.name], found)
        # No one recomputes what is saved.
        return {name: replace(each, form=BFLOAT16) if each.form is GAINED else each for name, each in found.items()}

    def _add(
        self,
        node: fx.Node,
        user: fx.Node,
        tangent: Collection[str],
        readers: dict[str, set[Reader]],
        readings: dict[str, list[Reading]],
    ) -> None:
        """Add what a user makes of a value to the value's readers."""
        tensor = value(node)
        order = None if tensor is None else tuple(range(tensor.dim()))
        block = self.blocks.get(user.name)
        operator = self.operators.of(user)
        if user.op == "output":
            readings[node.name].append(_exact(user, "an output of backward"))
        elif name_of(user) in COMPARISONS:
            readings[node.name].append(_COMPARED)
        elif user.name in tangent:
            if operator is None:
                readings[node.name].append(self._by_name(node, user))
            else:
                readers[node.name].add(Reader(operator, None, False, order))
        elif block is not None and block != self.blocks.get(node.name):
            readings[node.name].append(self._form(block.reading, node, Partner.NOTHING))
        elif is_arrangement(user):
            moved = _is_moved(node, user)
            readers[node.name].update(
                reader._replace(moved=reader.moved or moved, order=_order_before(user, reader.order))
                for reader in readers[user.name]
            )
            readings[node.name] += readings[user.name]
        elif operator is None:
            readings[node.name].append(Reading(name_of(user), "operand", ITSELF, "", known=False))
        elif user.name in operator.results:
            readers[node.name].add(Reader(operator, user, False, order))
        else:
            made = value(user)
            same = tensor is not None and made is not None and tensor.shape == made.shape
            readers[node.name].update(reader if same else reader._replace(order=None) for reader in readers[user.name])
            readings[node.name] += readings[user.name]

    def _strictest(
        self, node: fx.Node, readers: set[Reader], readings: list[Reading], found: Mapping[str, Reading]
    ) -> Reading:
        readings = list(readings)
        for reader in readers:
            if reader.result is None:
                reading = self._derived(node, reader.operator)
            else:
                reading = self._read_by_rerun(node, reader, found[reader.result.name])
            if reading.use in _NORMS and reading.need == CODES:
                if reader.order is not None:
                    reading = self._form(reading, node, Partner.NOTHING, reader.order)
                elif reader.moved:
                    reading = replace(reading, form=BFLOAT16)
            readings.append(reading)
        if not readings:
            return _UNREAD
        reading = strictest(readings)
        if node.name in self.standardized and CODES <= reading.need < EXACT:
            return replace(reading, form=STANDARDIZED)
        return reading

    def _derived(self, node: fx.Node, operator: Operator) -> Reading:
        """Return how the derivative of an operator reads a value."""
        reading, partner = self.operators.read_by(operator, node), self.operators.partner(operator, node)
        readings = []
        for read in self.operators.operands_from(operator, node) or [node]:
            if operator.is_elementwise and is_fewer(read, operator.node):
                return _exact(operator.node, "a statistic, one number for many elements")
            readings.append(self._form(reading, read, partner))
        return strictest(readings)

    def _form(self, reading: Reading, read: fx.Node, partner: Partner, order: tuple[int, ...] | None = None) -> Reading:
        """Return a reading with the form that the rule gives a value, as the operator reads it or in an order."""
        tensor = value(read)
        if reading.use is None and reading.form is SCALED and self.config.attention == "int8":
            return replace(reading, form=AS_CODES)
        if tensor is None or reading.need == EXACT:
            return reading
        maker = self.operators.maker_of_operand(read)
        layout = _layout(tensor if order is None else tensor.permute(order))
        form = rule.form(reading, maker, partner, layout, self.config.group_size)
        # No graph stores the inverse of a tanh.
        return replace(reading, form=ITSELF if form is ARTANH else form)

    def _by_name(self, node: fx.Node, user: fx.Node) -> Reading:
        """Return how a reader without notes reads a value: as the forward's operators that it may derive from."""
        name = name_of(user)
        read = [
            self._derived(node, operator)
            for operator in self.operators.readers_of(node)
            if operator.may_have_derivative(name)
        ]
        if read:
            return strictest(read)
        if name in _PRODUCTS and self.operators.are_known:
            reading = Reading.of(name, "operand", _PRODUCTS[name], "the derivative multiplies the gradient by it")
            return self._form(reading, node, Partner.OTHER)
        return Reading(name, "operand", ITSELF, "", known=False)

    def _read_by_rerun(self, node: fx.Node, reader: Reader, result: Reading) -> Reading:
        """Return how backward reads a value to run an operator again; ``result`` is how it reads that result."""
        operator = reader.operator
        assert reader.result is not None
        if result.form is GAINED and not self.operators.is_gained(node):
            result = replace(result, form=AS_CODES)
        if result.need < CODES or result.need == EXACT:
            return result
        scaled = operator.is_multiple or operator.kind is Kind.DIFFERENCE
        if result.form is STANDARDIZED and scaled and self._is_first(operator, node):
            return result
        if operator.kind in _MOVES or operator.is_multiple or operator.base == "native_dropout":
            own = self._form(result, node, Partner.NOTHING) if result.use in _BY_ROWS else result
            return strictest((result, own))
        if result.form is SCALED and self._is_linear(operator, node):
            return result
        # As where a checkpointed block reruns: the sums of a layer average the errors of codes.
        if result.form is SCALED and operator.kind in _PROJECTS and self.operators.maker(reader.result) in LAYERS:
            return self._derived(node, operator)
        if result.need == CODES:
            own = self._derived(node, operator)
            if own.need < EXACT:
                return strictest((own, result))
            if self._is_linear(operator, node) and self.operators.maker(node) in LAYERS:
                return result
        # The derivative of a norm reads the normalized values too, which its result is computed from.
        if result.form is BFLOAT16 and (
            operator.kind in _CONDITIONED or operator.base == "pow" or operator.decomposed.use in _NORMS
        ):
            return strictest((result, self._derived(node, operator)))
        return _exact(operator.node, "what runs again from it amplifies errors")

    def _is_first(self, operator: Operator, node: fx.Node) -> bool:
        return operator.node.args[0] in self.operators.operands_from(operator, node)

    def _is_linear(self, operator: Operator, node: fx.Node) -> bool:
        """Return whether an operand's error is the result's error, times a constant of moderate size."""
        erring = self.operators.operands_from(operator, node)
        exact = [each for each in operator.inputs() if each not in erring]
        fixed = [each for each in exact if each.name not in self.known.data or each.name not in self.known.learns]
        if operator.kind is Kind.SCALES:
            return fixed == exact and (operator.base == "mul" or self._is_first(operator, node))
        if operator.kind is Kind.DIFFERENCE:
            return all(each in fixed or is_fewer(each, operator.node) for each in exact)
        return operator.kind is Kind.SUM or operator.kind is Kind.RECTIFIES


def _exact(user: fx.Node, why: str) -> Reading:
    return Reading(name_of(user), "operand", ITSELF, why)


def _layout(tensor: Tensor) -> Layout:
    """Return a layout for the rule; a dynamic size is that of the call that compiles, and a dynamic row is short."""
    shape = [hint(size) for size in tensor.shape]
    if shape and not isinstance(tensor.shape[-1], int):
        shape[-1] = 1
    stride = tuple(step if isinstance(step, int) else 1 for step in tensor.stride())
    return Layout(torch.Size(shape), stride, True)


def _order_before(user: fx.Node, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the order of a value's dimensions before a node that copies or permutes it, given the order after."""
    if order is None or name_of(user) in {"clone"} | CASTS:
        return order
    dims = user.args[1] if name_of(user) == "permute" else None
    return tuple(dims[dim] % len(dims) for dim in order) if isinstance(dims, (list, tuple)) else None


def _is_moved(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a copy has other neighbours in memory than its source."""
    source, copy = value(node), value(user)
    if name_of(user) not in {"clone"} | CASTS or source is None or copy is None or source.dim() != copy.dim():
        return False
    return source.stride() != copy.stride()
