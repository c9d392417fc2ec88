"""Decides how each saved value of a graph is stored: codes, 16 bits, bits, as it is, or as a copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..codec import probability
from ..codec.layouts import rows_of
from ..codec.ops import restore as restore_codes
from ..config import Config
from ..engine import reasons
from ..engine.packing import FEWEST
from ..readers.forms import (
    BFLOAT16,
    CODES,
    EXPONENTIAL,
    LOG,
    LOG_PROBABILITY,
    PROBABILITY,
    RELATIVE,
    SCALED,
    STANDARDIZED,
    Reading,
)
from ..torch_private.partitions import is_tangent
from .codec import (
    dequantize,
    from_distance,
    in_own_shape,
    pack_bits,
    quantize,
    saturate,
    scale,
    stored_shape,
    to_distance,
    unpack_bits,
    unscale,
)
from .context import is_skipped
from .costs import FLOATS
from .joint import Joint, hint, nbytes, outputs_of, storage_order, value
from .rounding import is_read_in_halves
from .standardized import Statistics, differences_of
from .uses import Uses

Function = Callable[..., object]
SKIPPED = "skipped"
# Stored parts with fewer elements than the tensor: a minimum and a step for each group, a byte for eight bits.
SHARED_PARTS = ("groups_of_", "bits_of_")
# Share of a memory that copies of what is kept of it must save: reading and writing them takes time. Queries and keys
# of one projection, with codes for the values, save 0.16, at 1 % of a step of GPT-2 medium's sizes on an H200.
_WORTH_A_COPY = 1 / 8


@dataclass(frozen=True)
class Plan:
    """How one saved value is stored.

    Attributes
    ----------
    form : {"codes", "16 bits", "bits", "kept"}
        "kept" is a copy out of a larger tensor.
    parts : tuple of str
        Prefixes of the names of the stored tensors.
    pack : callable
        Maps the value to the stored tensors.
    restore : callable
        Maps the stored tensors to the value.
    restore_by_kernel : callable or None
        Restores 16 bits by the library's kernel, for readers that fuse badly with restoring.
    variant : object
        What else the functions depend on, beside the tensor's layout and dtype.
    group_size : int
        Of codes of the tensor as it is, in its own order; 0 for other forms, and where packing rounds or lifts.
    statistics : Statistics or None
        Of standardized values. Packing takes the statistics too, restoring the scale, and the restored value is the
        difference from the mean.
    """

    form: str
    parts: tuple[str, ...]
    pack: Function
    restore: Function
    restore_by_kernel: Function | None = None
    variant: object = None
    group_size: int = 0
    statistics: Statistics | None = None


def plans_of(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    known: Joint,
    config: Config,
    uses: Uses,
    positive: set[str],
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return a plan or the reason to keep, for each saved tensor."""
    outputs = outputs_of(forward)
    saved = {node.name: node for node in outputs[num_outputs:] if value(node) is not None}
    tangent = set()
    for node in backward.graph.nodes:
        if is_tangent(node) or any(source.name in tangent for source in node.all_input_nodes):
            tangent.add(node.name)
    found = uses(backward.graph, tangent)
    entries = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    # Codes of a result of ReLU serve its comparison too.
    plans, reasons = {}, {}
    for name, node in saved.items():
        statistics = uses.standardized.get(name)
        if statistics is not None and statistics.mean is not None and differences_of(entries[name]) is None:
            # A budget may have backward compute the statistics again.
            statistics = None
        plan = _plan(node, found.get(name), known, config, name in positive, statistics)
        if isinstance(plan, str):
            reasons[name] = plan
        else:
            plans[name] = plan
    returned = {memory_of(node) for node in outputs[:num_outputs] if value(node) is not None}
    _settle(saved, plans, reasons, living_memory(forward, known), returned, config)
    return plans, reasons


def living_memory(forward: fx.GraphModule, known: Joint) -> dict[int, str]:
    """Return the names of the inputs that live anyway, by their memory."""
    inputs = [node for node in forward.graph.find_nodes(op="placeholder") if value(node) is not None]
    return {memory_of(node): node.name for node in inputs if node.name in known.static | known.kept_inputs}


def _settle(
    saved: dict[str, fx.Node],
    plans: dict[str, Plan],
    reasons: dict[str, str],
    living: dict[int, str],
    returned: set[int],
    config: Config,
) -> None:
    """Pack nothing in memory that stays anyway; copy kept views, as queries and keys of one projection, out of memory.

    Parameters
    ----------
    saved : dict
        Saved values by name.
    plans, reasons : dict
        Changed in place.
    living : dict
        Name of the input, by the memory of inputs that live anyway.
    returned : set of int
        Memory of the results of the graph.
    config : Config
    """
    by_memory: dict[int, list[str]] = {}
    for name, node in saved.items():
        by_memory.setdefault(memory_of(node), []).append(name)
    for memory, names in by_memory.items():
        kept = [name for name in names if name in reasons]
        tensors = {name: tensor for name in names if (tensor := value(saved[name])) is not None}
        whole = hint(tensors[names[0]].untyped_storage().nbytes())
        after = sum(_stored(tensor, plans.get(name), config) for name, tensor in tensors.items())
        copies = {name: _copy_plan(tensors[name], reasons[name]) for name in kept}
        stays = memory in living or memory in returned or None in copies.values()
        if not stays and after <= whole * (1 - _WORTH_A_COPY):
            plans.update({name: plan for name, plan in copies.items() if plan is not None})
            continue
        owner = living.get(memory, kept[0] if kept else None)
        for name in [name for name in names if owner is not None and name in plans]:
            del plans[name]
            reasons[name] = f"in the memory of {owner}, which is kept"


def memory_of(node: fx.Node) -> int:
    """Return the identity of a tensor's storage."""
    tensor = value(node)
    assert tensor is not None
    return int(tensor.untyped_storage()._cdata)


def _stored(tensor: Tensor, plan: Plan | None, config: Config) -> float:
    """Return the bytes of a tensor as planned."""
    elements = nbytes(tensor) / tensor.element_size()
    if plan is None:
        return nbytes(tensor)
    return elements * {"codes": 1 + 4 / config.group_size, "16 bits": 2.0, "bits": 1 / 8}[plan.form]


def _copy_plan(tensor: Tensor, reason: str) -> Plan | None:
    order = storage_order(tensor) if type(tensor) is torch._subclasses.FakeTensor else None
    if order is None or reason == SKIPPED:
        return None
    back = [order.index(dim) for dim in range(len(order))]

    def pack(x: Tensor) -> tuple[Tensor]:
        return (x.permute(order).clone(memory_format=torch.contiguous_format),)

    return Plan("kept", ("copy_of_",), pack, lambda x: x.permute(back))


def _plan(
    node: fx.Node,
    need: Reading | None,
    known: Joint,
    config: Config,
    positive: bool,
    statistics: Statistics | None,
) -> Plan | str:
    tensor = value(node)
    if tensor is None or need is None:
        return "unknown to backward"
    if node.name in known.static:
        return "static input"
    if node.op == "placeholder" and node.name in known.kept_inputs:
        return "an input that is a leaf or needs no gradient"
    if type(tensor) is not torch._subclasses.FakeTensor:
        return "a subclass of Tensor"
    if nbytes(tensor) < config.min_bytes:
        return "small"
    if is_skipped(node):
        return SKIPPED
    order = storage_order(tensor)
    if tensor.dtype is torch.bool:
        return "elements overlap or have gaps" if order is None else _bit_plan(tensor, order)
    if tensor.dtype not in FLOATS:
        return "integers"
    if config.mode == "lossless":
        return "lossless mode"
    if node.name not in known.learns:
        return "needs no gradient"
    if node.name not in known.data:
        return "depends on parameters alone"
    if need.need > RELATIVE:
        return need.reason
    static = all(isinstance(size, int) for size in tensor.shape)
    if static and tensor.numel() < FEWEST:
        return reasons.FEW
    # Less than one group: no sum averages out the errors of codes.
    packed = need.need <= CODES or need.form is STANDARDIZED
    few = static and packed and tensor.numel() < config.group_size
    if need.form is STANDARDIZED and order is not None and statistics is not None and not few:
        return _standardized_plan(tensor, order, config.group_size, statistics)
    if need.need == RELATIVE or few:
        if tensor.dtype is not torch.float32:
            return f"{reasons.NARROW}: {need.reason}"
        return _halves_plan(BFLOAT16 if few or need.form is STANDARDIZED else need.form)
    if order is None:
        return "elements overlap or have gaps"
    # The smallest float32 would round to zero.
    rounded = is_read_in_halves(node, known) and not positive
    return _code_plan(tensor, order, config.group_size, positive, rounded)


_OF_PROBABILITIES = {
    PROBABILITY: (probability.encode, probability.decode),
    LOG_PROBABILITY: (probability.encode_log, probability.decode_log),
    EXPONENTIAL: (lambda x: to_distance(x).to(torch.bfloat16), lambda x, dtype: from_distance(x.to(dtype))),
}


def _halves_plan(form: object) -> Plan | str:
    if form is SCALED:
        return Plan("16 bits", ("halves_of_", "exponent_of_"), scale, unscale)
    if form in _OF_PROBABILITIES:
        encode, decode = _OF_PROBABILITIES[form]
        return Plan(
            "16 bits", ("halves_of_",), lambda x: (encode(x),), lambda x: decode(x, torch.float32), variant=form
        )
    dtype = torch.float16 if form is LOG else torch.bfloat16
    if form not in (LOG, BFLOAT16):
        return "no graph stores this form"

    def pack(x: Tensor) -> tuple[Tensor]:
        return ((saturate(x) if dtype is torch.float16 else x).to(dtype),)

    return Plan("16 bits", ("halves_of_",), pack, lambda x: x.to(torch.float32), variant=dtype)


def _code_plan(
    tensor: Tensor, order: list[int], group_size: int, positive: bool, rounded: bool, finite: bool = False
) -> Plan:
    dtype, dims = tensor.dtype, tensor.dim()
    ordered = tensor.permute(order)
    dense = ordered.is_contiguous()
    layout = tuple(ordered.shape), ordered.stride()
    # Packing reads rows where they are, as values in the result of a projection of queries, keys and values.
    apart = all(isinstance(size, int) for size in (*layout[0], *layout[1])) and rows_of(*layout) is not None

    def pack(x: Tensor) -> tuple[Tensor, Tensor]:
        if dense:
            # Pass x itself: Inductor would copy a permuted view.
            return quantize(x.to(torch.bfloat16) if rounded else x, group_size, positive, order)
        x = x.permute(order)
        if rounded:
            x = x.to(torch.bfloat16, memory_format=torch.contiguous_format)
        elif not apart:
            x = x.contiguous()
        return quantize(x, group_size, positive)

    back = [order.index(dim) for dim in range(dims)]

    def restore(codes: Tensor, groups: Tensor) -> Tensor:
        return in_own_shape(dequantize(codes, groups, group_size, dtype, finite), dims).permute(back)

    def restore_by_kernel(codes: Tensor, groups: Tensor) -> Tensor:
        halves: Tensor = restore_codes(codes, groups, torch.bfloat16 if rounded else dtype, group_size)
        return in_own_shape(halves.to(dtype), dims).permute(back)

    kernel = restore_by_kernel if rounded or dtype.itemsize == 2 else None
    size = group_size if not positive and not rounded and order == sorted(order) else 0
    return Plan("codes", ("codes_of_", SHARED_PARTS[0]), pack, restore, kernel, (positive, rounded, finite), size)


def _standardized_plan(tensor: Tensor, order: list[int], group_size: int, statistics: Statistics) -> Plan:
    codes = _code_plan(tensor.float(), order, group_size, False, True, statistics.spreads)

    def pack(x: Tensor, *given: Tensor) -> object:
        *mean, scale = given
        x = x.float() - mean[0] if mean else x
        return codes.pack(x * scale if statistics.is_inverse else x / scale)

    def scaled(restored: Any, scale: Tensor) -> object:
        restored = restored / scale if statistics.is_inverse else restored * scale
        return restored.to(torch.float32 if statistics.mean is not None else tensor.dtype)

    def restore(packed: Tensor, groups: Tensor, scale: Tensor) -> object:
        return scaled(codes.restore(packed, groups), scale)

    def restore_by_kernel(packed: Tensor, groups: Tensor, scale: Tensor) -> object:
        assert codes.restore_by_kernel is not None
        return scaled(codes.restore_by_kernel(packed, groups), scale)

    variant = "standardized", statistics.mean is None, statistics.is_inverse
    return Plan("codes", codes.parts, pack, restore, restore_by_kernel, variant, statistics=statistics)


def _bit_plan(tensor: Tensor, order: list[int]) -> Plan | str:
    rows = _Rows.of(tensor, order)
    if rows is None:
        return "no static sizes give a multiple of 8 elements"
    dense = tensor.permute(order).is_contiguous()

    def pack(x: Tensor) -> tuple[Tensor]:
        packed = pack_bits(x if dense else x.permute(order).contiguous())
        return (packed.view(stored_shape([*(x.shape[dim] for dim in order[: rows.outer]), -1])),)

    def restore(packed: Tensor) -> Tensor:
        return rows.split(unpack_bits(in_own_shape(packed, rows.outer + 1)))

    return Plan("bits", SHARED_PARTS[1:], pack, restore)


@dataclass(frozen=True)
class _Rows:
    """A tensor in storage order, with so many innermost dimensions joined that bytes fit; all of them if none do."""

    order: list[int]
    outer: int
    inner: list[int]

    @classmethod
    def of(cls, tensor: Tensor, order: list[int]) -> _Rows | None:
        inner: list[int] = []
        total, outer = 1, len(order)
        while outer and isinstance(size := tensor.shape[order[outer - 1]], int):
            total, outer = total * size, outer - 1
            inner.insert(0, size)
            if total % 8 == 0:
                return cls(order, outer, inner)
        return cls(order, 0, inner) if not outer and total else None

    def split(self, x: Tensor) -> Tensor:
        """Split the joined dimensions, without what fills the last byte, and return the order of the tensor."""
        x = x[: math.prod(self.inner)] if not self.outer else x
        x = x.view(*x.shape[: self.outer], *self.inner)
        return x.permute([self.order.index(dim) for dim in range(len(self.order))])
