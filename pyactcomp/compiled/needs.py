"""How exactly the backward graph needs each value: readers, followed through the operators that backward recomputes.

The decisions agree with ``readers/table.py``, whose operators are decomposed here. An unknown operator needs its
operands exact. Longer than 400 lines: one table of operators, with the conditions of its rows.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ..codec.layouts import spans_rows
from ..config import Config
from ..readers.forms import (
    AS_CODES,
    AS_SHAPE,
    BFLOAT16,
    CODES,
    EXACT,
    EXPONENTIAL,
    ITSELF,
    LOG,
    LOG_PROBABILITY,
    PROBABILITY,
    SCALED,
    STANDARDIZED,
    Form,
    Reading,
    strictest,
)
from ..readers.observer import FEWER
from .checkpointed import CHECKPOINT, Block
from .divisors import NONE_BEHIND, Behind, adjacent, is_at_least_one, row_along
from .gates import is_sigmoid
from .joint import CASTS, VIEWS, fewest, is_multiple, name_of, unscaled, unviewed, value
from .probabilities import is_log_probability, is_probability

_MULTIPLIED = "the derivative multiplies the incoming gradient by it"
_MASKED = "the gradient may be zero at the largest elements"
_SPANNED = "a group of codes would span rows"
_SHORT = "sums over fewer elements than a group do not average the errors of codes"
_LINEAR = {"neg", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "mul", "add", "div", "sub"}
# Each element of a result is one of the operand's, as in the rolls of shifted windows.
SELECTING = {"index", "index_select", "gather"}
_COPIES = {"clone"} | CASTS
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution_backward", "mul", "fma"}
_ACTIVATIONS = {"gelu_backward", "silu_backward", "mish_backward", "glu_backward"}
_SHAPES = {"max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"}
_BOUNDED = {"tanh", "sigmoid", "erf"}
COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne", "isinf", "isnan", "signbit"}
_STATISTICS = {"sum", "mean", "amax", "amin", "var", "var_mean", "std", "logsumexp", "rsqrt", "sqrt", "reciprocal"}
_STATISTICS |= {"log", "prod", "max", "min", "linalg_vector_norm"}
# Results of these after the first are statistics.
_NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "_fused_rms_norm"}
_NORMS |= {"_native_batch_norm_legit", "_native_batch_norm_legit_functional"}
# Results that may span orders of magnitude; operators that leave the range of their operands as it is.
_WIDE = {"_log_softmax", "log", "masked_fill", "where", "exp", "expm1", "reciprocal", "cumprod"}
_RANGE_KEPT = {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "sub", "rsub", "add", "neg", "mul", "pow"}
_RANGE_KEPT |= {"cumsum", "cat", "constant_pad_nd", "index_put", "scatter", "flip"} | SELECTING
_RANGE_WALK = 8
_FACTOR_WALK = 4
_SATURATING = {"sigmoid", "tanh"}
# Elementwise operators whose results grow no faster than their operands, up to low powers; others may grow as cosh.
_TAME = {"relu", "gelu", "silu", "mish", "glu", "tanh", "sigmoid", "erf", "sin", "cos", "atan", "asinh", "abs", "sgn"}
_TAME |= {"leaky_relu", "elu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "mul", "div", "add", "sub", "rsub"}
_TAME |= {"neg", "pow", "square", "addcmul", "lerp", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fma"}
_TAME |= {"native_dropout", "masked_fill", "log1p", "logaddexp", "bernoulli", "rsqrt", "sqrt"} | VIEWS
# Operators that hand each element of a product on, and how many of them stand before a quotient.
_HANDED_ON = VIEWS | SELECTING | {"mul", "neg"}
_QUOTIENT_WALK = 8


class Need(NamedTuple):
    """The strictest form needed of a value, and the elements in one row.

    Attributes
    ----------
    reading : Reading
    row : int or None
        Adjacent elements in memory that are divided by one statistic; no group of codes may span two of such rows. The
        greatest common divisor where rows differ, and None if nothing is divided by a statistic.
    """

    reading: Reading
    row: int | None = None

    @property
    def form(self) -> Form:
        """The cheapest form that serves every reader."""
        return self.reading.form

    def spans(self, group_size: int) -> bool:
        """Return whether a group of codes would span rows, each divided by a statistic of its own."""
        return self.reading.need <= CODES and self.row is not None and spans_rows(self.row, group_size)


def needs(
    graph: fx.Graph,
    tangent: Collection[str],
    data: Collection[str],
    config: Config,
    within: Collection[str] | None = None,
    producers: Mapping[str, fx.Node] | None = None,
    behind: Behind = NONE_BEHIND,
) -> dict[str, Need]:
    """Return the need of each value of a graph that depends on no tangent.

    Parameters
    ----------
    graph : fx.Graph
        A joint graph or a backward graph.
    tangent, data : collection of str
        Nodes that depend on a tangent, and on data.
    config : Config
    within : collection of str or None
        Readers to count; None for all.
    producers : mapping of str to fx.Node, optional
        The forward's node of each input of a backward graph.
    behind : Behind
        The values from which the forward computes divisors, functions that saturate, and checkpointed blocks.
    """
    found: dict[str, Need] = {}
    decisive: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name in tangent or node.op == "output":
            continue
        all_needs = []
        for user in node.users:
            if within is not None and user.name not in within:
                continue
            if user.op == "output":
                all_needs.append(Need(_exactly(user, "an output of backward")))
            elif user.name in tangent:
                all_needs.append(_read(node, user, config, producers or {}))
            elif (block := behind.blocks.get(user.name)) is not None and block != behind.blocks.get(node.name):
                all_needs.append(_rerun(node, user, found[user.name], block))
            elif user.name in decisive and name_of(user) not in COMPARISONS:
                # Not the 16 bits of a tanh's operand, from which its derivative, but not its result is computed.
                decisive.add(node.name)
                all_needs.append(found[user.name])
            else:
                all_needs.append(_recomputed(node, user, found, data, behind.saturating))
        if any(_is_decisive(need.reading) for need in all_needs):
            decisive.add(node.name)
        if not all_needs:
            found[node.name] = Need(Reading("", "", AS_SHAPE, "backward reads only the shape"))
            continue
        rows = [need.row for need in all_needs if need.row is not None]
        reading = strictest(need.reading for need in all_needs)
        reading = _produced((producers or {}).get(node.name, node), reading)
        if CODES <= reading.need < EXACT:
            if node.name in behind.factors:
                reading = _exactly(node, "the forward divides by what it computes from it")
            elif node.name in behind.standardized and reading.need == CODES:
                reading = Reading(name_of(node), "result", STANDARDIZED, _SPANNED)
            elif node.name in behind.rows and reading.need == CODES:
                reading = Reading(name_of(node), "result", BFLOAT16, _SPANNED)
            elif reading.form is STANDARDIZED and node.name not in behind.standardized:
                reading = replace(reading, form=BFLOAT16)
            elif node.name in behind.differences and reading.need == CODES:
                reading = Reading(name_of(node), "result", BFLOAT16, _MASKED)
            elif node.name in behind.short and reading.need == CODES:
                reading = Reading(name_of(node), "result", BFLOAT16, _SHORT)
        found[node.name] = Need(reading, math.gcd(*rows) if rows else None)
    return found


def _is_decisive(reading: Reading) -> bool:
    """Return whether the reader is unknown, as a sort, or a checkpointed block that takes decisions."""
    return reading.need == EXACT and (not reading.known or reading.operator == CHECKPOINT)


def _exactly(user: fx.Node, why: str) -> Reading:
    return Reading(name_of(user), "operand", ITSELF, why)


def _unknown(user: fx.Node) -> Need:
    return Need(Reading(name_of(user), "operand", ITSELF, "", known=False))


def _operands(node: fx.Node, user: fx.Node) -> list[str] | None:
    """Return the names of a user's arguments that a node is given for; None where one is in a list."""
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return None
    names = [argument.name for argument, given in zip(schema.arguments, user.args, strict=False) if given is node]
    names += [name for name, given in user.kwargs.items() if given is node]
    return names or None


def _read(node: fx.Node, user: fx.Node, config: Config, producers: Mapping[str, fx.Node]) -> Need:
    """Return the need of a reader that depends on a tangent."""
    name, operands = name_of(user), _operands(node, user)
    if operands is None:
        return _unknown(user)

    def reading(form: Form, why: str) -> Need:
        return Need(Reading(name, operands[0], form, why))

    if name in _SHAPES:
        return reading(AS_SHAPE, "backward reads only the shape")
    if _is_statistic(node, user):
        return reading(ITSELF, "a statistic, one number for many elements")
    if name == "fma" and "c" in operands:
        return _unknown(user)
    inverses = name == "mul" and any(_is_inverse(factor, node, producers) for factor in user.args)
    if inverses or (name in ("mul", "fma") and _is_divided(user, producers)):
        return reading(BFLOAT16, "the derivative is a quotient of it, so relative precision counts")
    if name in _PRODUCTS or (name in _ACTIVATIONS and operands == ["self"]):
        return reading(AS_CODES, _MULTIPLIED)
    if name == "where" and operands == ["condition"]:
        return reading(AS_SHAPE, "a condition")
    if "scaled_dot_product" in name and name.endswith("_backward"):
        if set(operands) <= {"query", "key"}:
            form = AS_CODES if config.attention == "int8" else SCALED
            return reading(form, "attention recomputes probabilities from it")
        if set(operands) <= {"value", "out"}:
            # As in eager mode: sums over fewer elements than a group do not average the errors of codes.
            return reading(SCALED if _is_short(node, config) else AS_CODES, _MULTIPLIED)
    if name == "div":
        return reading(BFLOAT16, "the derivative divides by it, so relative precision counts")
    if name == "_softmax_backward_data" and operands == ["output"]:
        return reading(BFLOAT16, "the derivative is a multiple of it")
    if name == "_log_softmax_backward_data" and operands == ["output"]:
        return reading(LOG, "the derivative takes the exponential of it")
    if name == "native_layer_norm_backward" and operands == ["input"]:
        return Need(Reading(name, "input", AS_CODES, _MULTIPLIED), _row(node, user.args[3]))
    return _unknown(user)


def _recomputed(
    node: fx.Node, user: fx.Node, found: dict[str, Need], data: Collection[str], saturating: Mapping[str, Form]
) -> Need:
    """Return the need of an operator that backward runs again."""
    name, behind = name_of(user), found[user.name]
    if behind.reading.need == AS_SHAPE.need or name in COMPARISONS:
        # The forward compares, see masks.py.
        return Need(Reading(name, "operand", AS_SHAPE, "compared in the forward"))
    if (name in _BOUNDED or user.name in saturating) and _is_read_in_a_difference(user, found):
        return Need(_exactly(user, "backward reads the difference between its result and another value"))
    if user.name in saturating:
        return Need(Reading(name, "self", saturating[user.name], "the gradient is largest where it is small, or small"))
    if name in ("exp", "exp2"):
        if _is_density(user) or is_sigmoid(user):
            return Need(Reading(name, "self", AS_CODES, "the derivative is a smooth bounded function of it"))
        return Need(Reading(name, "self", LOG, "the derivative takes the exponential of it"))
    if name in _BOUNDED:
        return Need(Reading(name, "self", AS_CODES, "the derivative is a smooth bounded function of it"))
    if name in VIEWS or (name == "getitem" and name_of(user.args[0]) in VIEWS):
        result = value(user)
        if result is not None and not result.is_floating_point():
            return _unknown(user)
        return Need(behind.reading, 1) if behind.row is not None and _is_moved(node, user) else behind
    if name in SELECTING and user.args[0] is node:
        # Neighbours in memory may be rows apart in the result.
        return behind if behind.row is None else Need(behind.reading, 1)
    if behind.form is STANDARDIZED and user.args[0] is node and (name == "sub" or is_multiple(user)):
        return behind
    if name == "pow":
        power = user.args[1]
        passes = user.args[0] is node and isinstance(power, (int, float)) and power in (1, 2, 3, 4)
        return _arithmetic(user, behind, behind.row) if passes else _unknown(user)
    if name in ("mm", "bmm", "addmm", "baddbmm", "convolution"):
        return _arithmetic(user, behind, None)
    if name not in _LINEAR:
        return _unknown(user)
    if name == "neg":
        return behind
    first, other = user.args[0], user.args[1] if len(user.args) > 1 else None
    statistic = isinstance(other, fx.Node) and other is not node and other.name in data and is_broadcast(other, node)
    if name == "div" and other is node:
        return Need(_exactly(user, "a divisor"))
    if name == "sub" and not (first is node and statistic) and not _is_rotation(user):
        return Need(_exactly(user, "the difference of two values may be small"))
    if name == "div" and user.kwargs.get("rounding_mode") is not None:
        return Need(_exactly(user, "rounding decides by small differences"))
    if behind.reading.need == CODES and name == "div" and _is_quotient(user):
        return Need(Reading(name, "self", BFLOAT16, "the derivative divides by another element for each"))
    row = behind.row
    if statistic and name in ("sub", "mul", "div"):
        own = _row(node, other)
        row = own if row is None else math.gcd(own, row)
    return _arithmetic(user, behind, row)


def _rerun(node: fx.Node, user: fx.Node, behind: Need, block: Block) -> Need:
    """Return the need of a checkpointed block, which backward runs again as a whole."""
    if behind.reading.need == AS_SHAPE.need or name_of(user) in COMPARISONS:
        return Need(Reading(name_of(user), "operand", AS_SHAPE, "compared in the forward"))
    tensor = value(node)
    vector = None if tensor is None or not tensor.dim() else adjacent(tensor, {tensor.dim() - 1})
    return Need(block.reading, vector)


def _arithmetic(user: fx.Node, behind: Need, row: int | None) -> Need:
    """Pass a need on through arithmetic: relative precision of a result needs exact operands."""
    if behind.reading.need <= CODES or behind.form is SCALED:
        return Need(behind.reading, row)
    return Need(_exactly(user, "relative precision of a result needs exact operands"))


def _produced(node: fx.Node, reading: Reading) -> Reading:
    """Tighten a need by the operator that made the value."""
    source = unviewed(node)
    name = _maker(source)
    if reading.need < CODES or reading.need == EXACT:
        return reading
    attention = "scaled_dot_product" in name
    if name == "linear_cross_entropy":
        return _exactly(source, "a gradient, which backward scales")
    if name in _STATISTICS or ((name in _NORMS or attention) and source.args[1] != 0):
        return _exactly(source, "a statistic, one number for many elements")
    if name in _SATURATING:
        return _exactly(source, "the derivative takes the difference between it and one, which may be small")
    if name in ("exp", "exp2", "_softmax") or (name == "div" and name_of(source.args[0]) == "exp"):
        # The derivative of a loss subtracts one from a probability.
        why = "a multiple of it, or of the difference between it and one, which may be small"
        form = PROBABILITY if is_probability(source) else EXPONENTIAL
        return strictest((Reading(name, "result", form, why), reading))
    if reading.need == CODES and _spans_magnitudes(source):
        return Reading(name, "result", BFLOAT16, _MASKED)
    if reading.need == CODES and _grows(source):
        return Reading(name, "result", BFLOAT16, "the result may span orders of magnitude")
    if reading.need == CODES and _is_quotient(unscaled(source)):
        return Reading(name, "result", BFLOAT16, "the derivative of a quotient is the quotient over the divisor")
    if reading.form is SCALED and _spans_magnitudes(source):
        return _exactly(source, "some elements are magnitudes larger")
    if reading.form is LOG:
        if is_log_probability(source):
            return Reading(reading.operator, reading.operand, LOG_PROBABILITY, reading.why)
        if name == "sub" and _is_log(source.args[1]):
            return reading
        return _exactly(source, "the derivative takes the exponential of it")
    return reading


def _is_quotient(node: fx.Node) -> bool:
    """Return whether each element is divided by another of its own, which may be small, or is no whole power."""
    name = name_of(node)
    if name == "pow":
        power = node.args[1]
        return not (isinstance(power, (int, float)) and power == int(power) and power >= 0)
    if name == "atan2":
        return True
    divisor = node.args[1] if name == "div" else None
    if not isinstance(divisor, fx.Node) or is_at_least_one(divisor, False):
        return False
    # Broadcast over an outer dimension alone, adjacent elements have divisors of their own.
    return value(divisor) is not None and _row(node, divisor) == 1


def _grows(node: fx.Node) -> bool:
    """Return whether an elementwise operator may give results that span orders of magnitude, as cosh and polygamma."""
    tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
    return torch.Tag.pointwise in tags and name_of(node) not in _TAME


def _is_inverse(factor: object, node: fx.Node, producers: Mapping[str, fx.Node], walk: int = _FACTOR_WALK) -> bool:
    """Return whether a factor is a reciprocal, or a power of one, of an element for each element of a node."""
    if not isinstance(factor, fx.Node) or factor is node or value(factor) is None or is_broadcast(factor, node):
        return False
    factor = unviewed(factor)
    source = unviewed(producers.get(factor.name, factor))
    if name_of(source) in ("mul", "neg") and walk:
        return any(_is_inverse(operand, node, producers, walk - 1) for operand in set(source.args))
    if name_of(source) == "reciprocal" and isinstance(source.args[0], fx.Node):
        return not is_at_least_one(source.args[0], False)
    return name_of(source) == "pow" and _is_quotient(source)


def _is_divided(product: fx.Node, producers: Mapping[str, fx.Node]) -> bool:
    """Return whether backward divides each element of a product by another of its own, as the derivative of prod."""
    found = {product}
    waiting = [(product, 0)]
    while waiting:
        node, steps = waiting.pop()
        for user in node.users:
            divided = name_of(user) == "div" and user.args[0] is node and _is_quotient(user)
            if divided or (name_of(user) == "mul" and any(_is_inverse(a, node, producers) for a in user.args)):
                return True
            if name_of(user) in _HANDED_ON and user not in found and steps < _QUOTIENT_WALK:
                found.add(user)
                waiting.append((user, steps + 1))
    return False


def _spans_magnitudes(node: fx.Node) -> bool:
    """Return whether a value may span orders of magnitude."""
    waiting = deque([node])
    for _ in range(_RANGE_WALK):
        if not waiting:
            break
        node = unviewed(waiting.popleft())
        name = name_of(node)
        if name == "exp" and (_is_density(node) or is_sigmoid(node)):
            continue
        if name in _WIDE or _grows(node) or (name == "sub" and _is_log(node.args[1])):
            return True
        if name == "div":
            dividend, divisor = node.args[:2]
            # An exponential over a sum is a probability; an exponential in a sum below is the divisor of a sigmoid.
            followed = [dividend] if name_of(dividend) != "exp" else []
            followed += [divisor] if isinstance(divisor, fx.Node) and name_of(unviewed(divisor)) in _WIDE else []
            waiting.extend(operand for operand in followed if isinstance(operand, fx.Node))
        elif name in _RANGE_KEPT:
            tensors = [(operand, value(operand)) for operand in node.all_input_nodes]
            waiting.extend(operand for operand, tensor in tensors if tensor is not None and tensor.is_floating_point())
    return False


def is_difference(node: fx.Node) -> bool:
    """Return whether a value is the difference of two others, not of a value and its mean or a parameter."""
    first, other = node.args[:2] if name_of(node) == "sub" else (None, None)
    if not isinstance(first, fx.Node) or not isinstance(other, fx.Node):
        return False
    few = (source := unviewed(other)).op == "placeholder" and is_broadcast(source, node)
    return not few and _maker(other) not in _STATISTICS | _NORMS and not _is_rotation(node)


def _maker(node: fx.Node) -> str:
    """Return the name of the operator that made a value, of one result or several, views aside."""
    node = unviewed(node)
    return name_of(node.args[0] if node.target is operator.getitem else node)


def _is_log(node: object) -> bool:
    return isinstance(node, fx.Node) and name_of(unviewed(node)) == "log"


def _is_read_in_a_difference(node: fx.Node, found: Mapping[str, Need]) -> bool:
    """Return whether backward reads the difference between a value, scaled or shifted, and another, not its mean."""
    waiting = [node]
    while waiting:
        result = waiting.pop()
        for user in result.users:
            if user.name not in found or found[user.name].reading.need < CODES:
                continue
            others = [operand for operand in user.all_input_nodes if operand is not result]
            if name_of(user) == "sub" and any(_maker(other) not in _STATISTICS | _NORMS for other in others):
                return True
            if not others and name_of(user) in VIEWS | _COPIES | _LINEAR:
                waiting.append(user)
    return False


def _is_density(exp: fx.Node) -> bool:
    """Return whether an exponential is that of GELU's derivative, exp(-x * x / 2) beside the error function of x.

    Any other such bump passes a gradient only where x is small.
    """
    scaled = exp.args[0]
    if name_of(scaled) != "mul" or not isinstance(scaled, fx.Node):
        return False
    square, factor = scaled.args[:2]
    if not isinstance(factor, (int, float)) or factor >= 0 or not isinstance(square, fx.Node):
        return False
    is_square = name_of(square) == "mul" and square.args[0] is square.args[1]
    if not is_square and not (name_of(square) == "pow" and square.args[1] == 2):
        return False
    scaled_operands = (user for user in square.all_input_nodes[0].users if name_of(user) == "mul")
    return any(name_of(user) == "erf" for scaled in scaled_operands for user in scaled.users)


def _is_rotation(user: fx.Node) -> bool:
    """Return whether a difference is that of two products with factors for many heads, as in a rotary embedding.

    Other such differences may be small: cross products of nearly parallel vectors.
    """
    return all(
        isinstance(product, fx.Node)
        and name_of(product) == "mul"
        and any(isinstance(factor, fx.Node) and is_broadcast(factor, product) for factor in product.args)
        for product in user.args[:2]
    )


def _is_short(node: fx.Node, config: Config) -> bool:
    tensor = value(node)
    size = None if tensor is None else tensor.shape[-1]
    return not isinstance(size, int) or size < config.group_size


def _is_statistic(node: fx.Node, user: fx.Node) -> bool:
    """Return whether an operand of elementwise arithmetic has many times fewer elements than the result."""
    factor, product = value(node), value(user)
    if name_of(user) not in ("mul", "div", "fma") or factor is None or product is None:
        return False
    return fewest(factor.shape) * FEWER <= fewest(product.shape)


def _is_moved(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a copy has other neighbours in memory than its source."""
    source, copy = value(node), value(user)
    if name_of(user) not in _COPIES or source is None or copy is None or source.dim() != copy.dim():
        return False
    return source.stride() != copy.stride()


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


def is_broadcast(other: fx.Node, node: fx.Node) -> bool:
    """Return whether one element of a value meets several of another, as those of a row or a column."""
    small, large = value(other), value(node)
    if small is None or large is None:
        return False
    return small.dim() < large.dim() or any(
        _is_one(a) and not _is_one(b) for a, b in zip(small.shape, large.shape, strict=False)
    )


def _row(node: fx.Node, other: object) -> int:
    """Return the adjacent elements of a node in memory that share one element of a smaller tensor."""
    large, small = value(node), value(other)
    if large is None or small is None:
        return 1
    return shared_elements(large, small)


def shared_elements(large: Tensor, small: Tensor) -> int:
    """Return the length of the rows of a tensor in memory that share one element of a broadcast one."""
    sizes = [1] * (large.dim() - small.dim()) + list(small.shape)
    return row_along(large, {dim for dim, size in enumerate(sizes) if _is_one(size)})
