"""The operators of a forward, as autograd has them, found in a joint graph of decomposed ones.

Torch notes of each node from which operator it was decomposed (``original_aten``), and the number of autograd's node
(``seq_nr``), which the derivative's nodes have too. Nodes of one number and operator are one operator here.

Over 400 lines: readings, partners and makers are walks over the same private maps from nodes to operators.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import fx

from ..readers import lookup
from ..readers.forms import AS_CODES, BFLOAT16, CODES, ITSELF, Reading, Use, strictest
from ..readers.observer import FEWER
from ..readers.rule import GATES, LAYERS, Kind, Maker, Partner
from ..readers.table import ELEMENTWISE
from ..torch_private.partitions import autograd_number, is_of_derivative, original_operator
from .joint import VIEWS, Joint, fewest, is_view, name_of, value

_NORMS = (Use.ROWS, Use.CHANNELS)
# Norms of rows, whose gains differ along a group of codes.
_GAINS = {"native_layer_norm", "_fused_rms_norm"}
# Names of one operator, before and after torch makes it write to no operand.
_BATCH_NORMS = dict.fromkeys(
    ("aten::_native_batch_norm_legit", "aten::_batch_norm_with_update"), "aten::native_batch_norm"
)
# What makes the bounded factor of an activation written out, and the operators around it; GELU takes nine.
_WRITTEN = {"tanh", "sigmoid", "erf"}
_ARITHMETIC = {"mul", "add", "sub", "div", "neg", "pow"}
_LONGEST = 16
# As in csrc/observer/nodes.hpp: beyond so many sums lies a residual stream.
_DEEPEST = 3


def is_arrangement(node: fx.Node) -> bool:
    """Return whether a node has the elements of its first argument: a view, copy, cast or pad, or a part of one."""
    return is_view(node) or (name_of(node) == "getitem" and name_of(node.args[0]) in VIEWS)


class Operator:
    """An operator of the forward.

    Attributes
    ----------
    name, overload : str
        The name with the namespace.
    kind : Kind
    nodes : list of fx.Node
        The nodes that it was decomposed into; the only one if it was not.
    operands : dict of str to list of fx.Node
        The values read, by the name of each value that the operand is a view, copy, cast or part of.
    results : dict of str to int
        The nodes whose results other operators of the forward read, with the number of the result.
    """

    def __init__(self, target: torch._ops.OpOverload) -> None:
        self.schema = target._schema
        self.name, self.overload = target._schema.name.removesuffix("_functional"), target._schema.overload_name
        self.base = self.name.partition("::")[2]
        self.kind = lookup.kind_of_operator(_BATCH_NORMS.get(self.name, self.name))
        self.nodes: list[fx.Node] = []
        self.operands: dict[str, list[fx.Node]] = {}
        self.results: dict[str, int] = {}

    @property
    def node(self) -> fx.Node:
        """The first of its nodes."""
        return self.nodes[0]

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether it was not decomposed, so its arguments have names."""
        own = [node for node in self.nodes if name_of(node) != "getitem"]
        return len(own) == 1 and name_of(own[0]) == self.schema.name.partition("::")[2]

    @functools.cached_property
    def is_multiple(self) -> bool:
        """Whether it multiplies or divides a tensor by a number or by one element."""
        first, second = (*self.node.args, None, None)[:2]
        number = value(second)
        return self.kind is Kind.SCALES and value(first) is not None and (number is None or not number.dim())

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """Whether a broadcast operand is a statistic or a gain."""
        return self.base in ELEMENTWISE

    @functools.cached_property
    def row(self) -> lookup.Row:
        """The table's row."""
        return lookup.of_operator(self.name, self.overload)

    @functools.cached_property
    def decomposed(self) -> Reading:
        """How the derivative reads an operand of those that the table names, whose nodes have no names."""
        named = [each for each in self.row[0] or () if each.form is not ITSELF and each.by_scalars is None]
        return (
            strictest(named) if named else Reading(self.name, "operand", ITSELF, "backward is not known to need less")
        )

    def inputs(self) -> list[fx.Node]:
        """Return the values that it reads."""
        return list(dict.fromkeys(each for operands in self.operands.values() for each in operands))

    def arguments(self) -> list[tuple[Reading, fx.Node]]:
        """Return the readings of the operands, one more than once where it is given more than once."""
        readings = self.row[0]
        if not self.is_whole:
            return [(self.decomposed, operand) for operand in self.inputs()]
        given = dict(enumerate(self.node.args))
        names = [argument.name for argument in self.schema.arguments]
        given |= {names.index(name): each for name, each in self.node.kwargs.items() if name in names}
        scalars = {at: each for at, each in given.items() if not isinstance(each, fx.Node)}
        found = []
        for at, each in given.items():
            reading = readings[at].given(scalars) if readings else self.row[1]
            nodes = each if isinstance(each, (list, tuple)) else [each]
            found += [(reading, node) for node in nodes if isinstance(node, fx.Node)]
        return found

    def may_have_derivative(self, name: str) -> bool:
        """Return whether an operator in backward may be this one's derivative, by the name alone."""
        same = {"addmm": "mm", "baddbmm": "bmm"}
        base = name.removesuffix("_backward")
        return same.get(base, base) == same.get(self.base, self.base)


class Operators:
    """The operators of a joint graph's forward.

    Parameters
    ----------
    graph : fx.Graph
    known : Joint
    """

    def __init__(self, graph: fx.Graph, known: Joint) -> None:
        self.known = known
        self._nodes = {node.name: node for node in graph.nodes}
        self._own: dict[str, Operator] = {}
        self._numbered: dict[int, Operator] = {}
        self._reading: dict[str, list[Operator]] = {}
        self._group(graph)
        forward = {node for node in graph.nodes if node.name not in known.backward}
        self._join_activations(forward)
        for operator in dict.fromkeys(self._own.values()):
            self._connect(operator, forward)

    def _group(self, graph: fx.Graph) -> None:
        """Give each node of the forward its operator."""
        for node in graph.nodes:
            if node.op != "call_function" or node.name in self.known.backward or is_arrangement(node):
                continue
            number, target = autograd_number(node), original_operator(node)
            if name_of(node) == "getitem":
                operator = self._own.get(node.args[0].name)
            elif target is None:
                continue
            elif number is None or self._numbered.setdefault(number, Operator(target)).schema != target._schema:
                # Made by a pass; or without a derivative, with the number of the last operator that has one.
                operator = Operator(node.target) if hasattr(node.target, "_schema") else None
            else:
                operator = self._numbered[number]
            if operator is not None:
                operator.nodes.append(node)
                self._own[node.name] = operator

    def _join_activations(self, forward: set[fx.Node]) -> None:
        """Take an activation written out, as ``0.5 * x * (1 + tanh(...))``, for one operator, read in codes."""
        for node in list(forward):
            operator = self._own.get(node.name)
            nodes = self._activation(node, forward) if operator is not None and operator.base in _WRITTEN else None
            if nodes is not None:
                joined = Operator(torch.ops.aten.gelu.default)
                for each in nodes:
                    number, own = autograd_number(each), self._own[each.name]
                    if number is not None and self._numbered.get(number) is own:
                        self._numbered[number] = joined
                    self._own[each.name] = joined
                    joined.nodes.append(each)

    def _activation(self, gate: fx.Node, forward: set[fx.Node]) -> list[fx.Node] | None:
        """Return the nodes of an activation: a function that is bounded, of a value, times the value or a multiple."""
        nodes, product, factors = [gate], gate, [gate]
        while len(factors) == 1:
            readers = list(dict.fromkeys(_readers(product, forward)))
            if len(readers) != 1 or name_of(readers[0]) not in _ARITHMETIC:
                return None
            product, last = readers[0], product
            factors = [self.source(each) for each in product.all_input_nodes]
            nodes.append(product)
        if name_of(product) != "mul" or last not in factors:
            return None
        x = next(each for each in factors if each is not last)
        while (own := self._own.get(x.name)) is not None and own.is_multiple:
            nodes.append(x)
            x = self.source(x.all_input_nodes[0])
        waiting = [self.source(each) for each in gate.all_input_nodes]
        while waiting:
            each = waiting.pop()
            if each is not x and each not in nodes:
                if name_of(each) not in _ARITHMETIC or each.name not in self._own or len(nodes) > _LONGEST:
                    return None
                nodes.append(each)
                waiting += [self.source(operand) for operand in each.all_input_nodes]
        return nodes

    def _connect(self, operator: Operator, forward: set[fx.Node]) -> None:
        """Find what an operator reads, and what is read of it."""
        for node in operator.nodes:
            for read in node.all_input_nodes:
                if self._own.get(self.source(read).name) is not operator and value(read) is not None:
                    for name in self._views(read):
                        operator.operands.setdefault(name, []).append(read)
                        self._reading.setdefault(name, []).append(operator)
            if any(self._own.get(user.name) is not operator for user in _readers(node, forward)):
                number = node.args[1] if name_of(node) == "getitem" else 0
                operator.results[node.name] = number if isinstance(number, int) else 1

    def _views(self, node: fx.Node) -> Iterator[str]:
        """Yield the names of a node and of all that it is a view, copy, cast or part of, in the joint graph at last."""
        while True:
            yield node.name
            if not is_arrangement(node) or not isinstance(node.args[0], fx.Node):
                own = self._nodes.get(node.name, node)
                if own is node or not is_arrangement(own):
                    break
                node = own
            node = node.all_input_nodes[0]

    @property
    def are_known(self) -> bool:
        """Whether this release of torch notes the operators of nodes."""
        return bool(self._numbered)

    def of(self, user: fx.Node) -> Operator | None:
        """Return the operator of the forward to which a node belongs, or whose derivative it computes part of."""
        own = self._own.get(user.name)
        number = autograd_number(user) if own is None and is_of_derivative(user) else None
        return own if number is None else self._numbered.get(number)

    def source(self, node: fx.Node) -> fx.Node:
        """Return the joint graph's node that a node of either graph is a view, copy, cast or part of."""
        *_, name = self._views(node)
        found: fx.Node = self._nodes.get(name, node)
        return found

    def operands_from(self, operator: Operator, node: fx.Node) -> list[fx.Node]:
        """Return the operands that are views, copies or casts of a value, or else those that the value is one of."""
        return next((operator.operands[name] for name in self._views(node) if name in operator.operands), [])

    def readers_of(self, node: fx.Node) -> list[Operator]:
        """Return the operators that read a value."""
        return next((self._reading[name] for name in self._views(node) if name in self._reading), [])

    def read_by(self, operator: Operator, node: fx.Node) -> Reading:
        """Return how the derivative of an operator reads a value."""
        exact = Reading(operator.name, "another value", ITSELF, "backward is not known to need less")
        made = next((name for name in self._views(node) if name in operator.results), None)
        if made is not None and operator.results[made] == 0:
            # Without a gain, a norm's result is what its derivative reads of the normalized values.
            normalized = self._read_between(operator, node) if operator.decomposed.use in _NORMS else None
            return normalized or operator.row[1]
        if made is not None:
            return exact
        operands = self.operands_from(operator, node)
        if not operands:
            return self._read_between(operator, node) or exact
        if operator.is_whole:
            return strictest(reading for reading, operand in operator.arguments() if operand in operands)
        tensors = [argument for argument in operator.schema.arguments if "Tensor" in str(argument.type)]
        named = [each for each in operator.row[0] or () if each.form is not ITSELF]
        # Of several operands, the table names the one with as many elements as the result has.
        data = [each for each in operator.inputs() if each.name in self.known.data and each.name in self.known.learns]
        most = max((_elements(each) for each in data), default=0)
        largest = [each for each in data if _elements(each) == most]
        return operator.decomposed if len(named) == len(tensors) or set(largest) <= set(operands) else exact

    def _read_between(self, operator: Operator, node: fx.Node) -> Reading | None:
        """Return how the derivative reads a value between the operands and the results, or None if exactly."""
        reading = operator.decomposed
        if reading.use in _NORMS:
            # Normalized values serve where the norm's input does; statistics do not.
            return reading if _elements(node) == max(map(_elements, operator.inputs())) else None
        # A value inside a decomposed activation, as the exponential of a sigmoid; its input takes codes.
        return replace(reading, form=BFLOAT16) if reading.use is None and reading.form is AS_CODES else None

    def partner(self, operator: Operator, node: fx.Node) -> Partner:
        """Return what an operator multiplies a value by."""
        operands = self.operands_from(operator, node)
        found, given = Partner.NOTHING, [each for argument, each in operator.arguments() if argument.need <= CODES]
        for other in given:
            if other.name not in self.known.learns or value(other) is None:
                continue
            if other in operands or any(_whole(other) is _whole(each) for each in operands):
                if given.count(other) > 1 or other not in operands or len(operands) > 1:
                    found = max(found, Partner.ITSELF)
            else:
                few = operator.is_elementwise and any(is_fewer(other, operand) for operand in operands)
                if self._is_parameter(other):
                    found = max(found, Partner.GAIN if few else Partner.PARAMETER)
                else:
                    made = _PARTNERS.get(self.maker(other), Partner.OTHER)
                    found = max(found, Partner.STATISTIC if few else made)
        return found

    def maker_of_operand(self, node: fx.Node) -> Maker:
        """Return what made an operand: a gain hides what made the value that it multiplies."""
        return Maker.GAINED if self.is_gained(node) else self.maker(node)

    def is_gained(self, node: fx.Node) -> bool:
        """Return whether the last that made a value is a gain, as that of a norm of rows; a bias aside."""
        node = self._unmoved(node)
        operator = self._own.get(node.name)
        if operator is not None and operator.base == "add":
            terms = self._learning(operator.node.args[:2])
            biased = [each for each in terms if not self._is_parameter(each)] if len(terms) == 2 else []
            node = self._unmoved(biased[0]) if len(biased) == 1 else node
            operator = self._own.get(node.name)
        if operator is None:
            return False
        if operator.base == "mul":
            return any(map(self._is_gain, self._learning(operator.node.args[:2])))
        gains = operator.base in _GAINS and operator.results.get(node.name, 1) == 0
        return gains and any(map(self._is_gain, operator.inputs()[1:]))

    def _is_gain(self, node: fx.Node) -> bool:
        """Return whether a value is a parameter of several numbers, which may differ by orders of magnitude."""
        tensor = value(node)
        return tensor is not None and self._is_parameter(node) and any(size != 1 for size in tensor.shape)

    def maker(self, node: fx.Node, depth: int = 0) -> Maker:
        """Return what made a value, as ``maker_of`` in ``csrc/observer/nodes.hpp``."""
        made, activated = Maker.LAYER, False
        while True:
            node = self._unmoved(node)
            operator = self._own.get(node.name)
            if operator is None:
                return Maker.OTHER
            kind, operands = operator.kind, operator.inputs()
            if kind is Kind.LAYER:
                return made if operator.results.get(node.name, 1) == 0 else Maker.OTHER
            if kind in (Kind.BOUNDS, Kind.SOFTMAX):
                return made if activated else Maker.GATE
            if kind in (Kind.PRODUCT, Kind.BIASED_PRODUCT):
                return made if any(map(self._weighs, operands[kind is Kind.BIASED_PRODUCT :])) else Maker.OTHER
            if kind in (Kind.ACTIVATES, Kind.RECTIFIES) and operands:
                if not activated:
                    made = Maker.RECTIFIED if kind is Kind.RECTIFIES else Maker.GATE
                node, activated = operands[0], True
            elif kind is Kind.SCALES:
                factors = self._learning_pair(operator)
                gains = [each for each in factors if self._is_parameter(each)]
                if not factors or operator.base != "mul" or depth >= _DEEPEST:
                    return Maker.OTHER
                if not gains:
                    return self._product(factors, made, depth)
                node = next((each for each in factors if each is not gains[0]), factors[0])
            elif kind in (Kind.SUM, Kind.DIFFERENCE):
                return self._sum(operator, made, activated, depth)
            else:
                return Maker.OTHER if activated else _MAKERS.get(kind, Maker.OTHER)

    def _learning_pair(self, operator: Operator) -> list[fx.Node]:
        """Return both operands of an elementwise operator if both have a gradient, else none."""
        pair = self._learning(operator.node.args[:2])
        return pair if len(pair) == 2 else []

    def _learning(self, given: Iterable[object]) -> list[fx.Node]:
        return [each for each in given if isinstance(each, fx.Node) and each.name in self.known.learns]

    def _product(self, factors: list[fx.Node], made: Maker, depth: int) -> Maker:
        """Return what an elementwise product without a gain is: a norm composed of operators, or a gated layer."""
        if any(self._does(self._unmoved(each), Kind.INVERTS_ROOT) for each in factors):
            return made
        makers = [self.maker(each, depth + 1) for each in factors]
        if not all(maker in LAYERS for maker in makers) or not any(maker in GATES for maker in makers):
            return Maker.OTHER
        return Maker.RECTIFIED if Maker.RECTIFIED in makers else made

    def _does(self, node: fx.Node, kind: Kind) -> bool:
        operator = self._own.get(node.name)
        return operator is not None and operator.kind is kind

    def _sum(self, operator: Operator, made: Maker, activated: bool, depth: int) -> Maker:
        given = operator.node.args[:2]
        learning = self._learning(given)
        makers = [self.maker(each, depth + 1) if depth < _DEEPEST else Maker.LAYER for each in learning]
        if not activated and Maker.LOGARITHM in makers:
            return Maker.LOGARITHM
        if len(learning) < len(given) and depth < _DEEPEST:
            # A frozen embedding's tokens have no gradient, and still count as a layer's result.
            fixed = [each for each in given if isinstance(each, fx.Node) and each not in learning]
            makers += [maker for each in fixed if (maker := self.maker(each, depth + 1)) in LAYERS]
        if len(makers) < len(given):
            number = activated or not all(value(each) is not None for each in given)
            return Maker.OTHER if number else Maker.MASKED
        # A bias, as Linear adds to rows that lie apart in memory, or the places of tokens.
        biased = any(map(self._is_parameter, learning))
        if operator.kind is Kind.DIFFERENCE or sum(maker in LAYERS for maker in makers) < (1 if biased else 2):
            return Maker.OTHER
        return made if activated else Maker.LAYER if biased else Maker.RESIDUAL

    def _weighs(self, factor: fx.Node) -> bool:
        """Return whether a factor makes a product that of a layer: a parameter, frozen ones too, or a softmax."""
        source = self.source(factor)
        return self._is_parameter(factor) or source.name in self.known.static or self._does(source, Kind.SOFTMAX)

    def _is_parameter(self, node: fx.Node) -> bool:
        """Return whether a value is a parameter: also a view or a cast of one, or a number more than one."""
        source = self.source(node)
        operator = self._own.get(source.name)
        if operator is not None and operator.kind is Kind.SUM:
            learning = [each for each in operator.inputs() if each.name in self.known.learns]
            source = self.source(learning[0]) if len(learning) == 1 else source
        return source.op == "placeholder" and source.name in self.known.learns and source.name not in self.known.data

    def _unmoved(self, node: fx.Node) -> fx.Node:
        """Return what a value is a view, copy, cast, part or multiple of."""
        while True:
            node = self.source(node)
            operator = self._own.get(node.name)
            if operator is None or not (operator.kind is Kind.MOVES or operator.is_multiple) or not operator.inputs():
                return node
            node = operator.inputs()[0]


_PARTNERS = {Maker.GATE: Partner.GATE, Maker.RECTIFIED: Partner.GATE, Maker.LOGARITHM: Partner.LOGARITHM}
_MAKERS = {Kind.LOGARITHM: Maker.LOGARITHM, Kind.EXPONENTIAL: Maker.EXPONENTIAL, Kind.MASKS: Maker.MASKED}


def _readers(node: fx.Node, forward: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield what the forward reads a value by, views aside, and the forward's output."""
    for user in node.users:
        if user.op == "output":
            yield user
        elif user in forward:
            if is_arrangement(user):
                yield from _readers(user, forward)
            else:
                yield user


def _elements(node: fx.Node) -> int:
    tensor = value(node)
    return 0 if tensor is None else fewest(tensor.shape)


def _whole(node: fx.Node) -> fx.Node:
    """Return the value of which a node is a view, copy or cast of all elements."""
    while is_arrangement(node) and isinstance(node.args[0], fx.Node) and _elements(node.args[0]) == _elements(node):
        node = node.args[0]
    return node


def is_fewer(small: fx.Node, large: fx.Node) -> bool:
    """Return whether a value has one element for many of another's, as a statistic or a gain."""
    few, many = value(small), value(large)
    return few is not None and many is not None and fewest(few.shape) * FEWER <= fewest(many.shape)
