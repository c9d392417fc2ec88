"""Rewrites the forward and the backward graph: saved values leave as codes, 16 bits or bits, and are restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..config import Config
from ..readers.forms import BFLOAT16, CODES, LOG, RELATIVE, SCALED
from ..torch_private.partitions import traced
from .codec import dequantize, pack_bits, quantize, saturate, scale, unpack_bits, unscale
from .context import is_skipped
from .costs import FLOATS
from .divisors import Behind
from .graphs import SavedValue
from .joint import Joint, name_of, outputs_of, value
from .masks import hoist
from .needs import Need, needs
from .sharing import first_operator, first_use, share_casts, share_views

Function = Callable[..., object]
Traces = dict[tuple[object, ...], fx.GraphModule]


@dataclass(frozen=True)
class Plan:
    """How one saved value is stored.

    Attributes
    ----------
    form : {"codes", "16 bits", "bits"}
    parts : tuple of str
        Prefixes of the names of the stored tensors.
    pack : callable
        Maps the value to the stored tensors.
    restore : callable
        Maps the stored tensors to the value.
    variant : object
        What else the functions depend on, beside the tensor's layout and dtype.
    """

    form: str
    parts: tuple[str, ...]
    pack: Function
    restore: Function
    variant: object = None


def rewrite(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int, known: Joint, config: Config, behind: Behind
) -> tuple[SavedValue, ...]:
    """Rewrite both graphs in place; return what they save, parameters and other static inputs aside."""
    share_casts(forward, backward, num_outputs)
    share_views(forward, backward, num_outputs)
    plans, _ = _plans(forward, backward, num_outputs, known, config, behind, set())
    before = {name: _nbytes(found) for name, found in _saved_tensors(forward, num_outputs)}
    rounded = {name for name, plan in plans.items() if plan.form in ("codes", "16 bits")}
    positive = hoist(forward, backward, num_outputs, rounded)
    plans, reasons = _plans(forward, backward, num_outputs, known, config, behind, positive)
    left = {name for name, plan in plans.items() if plan.form in ("codes", "16 bits")}
    # A reader may be gone with its comparison; the rest may only then fit in codes, after their comparisons stayed.
    for name in left - rounded:
        del plans[name]
        reasons[name] = "compared in backward"
    values = []
    traces: Traces = {}
    end = forward.graph.find_nodes(op="output")[0]
    outputs = outputs_of(forward)
    descriptions = list(end.meta.get("desc") or [None] * len(outputs))
    entries = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    saved, described = list(outputs[:num_outputs]), descriptions[:num_outputs]
    for node, description in zip(outputs[num_outputs:], descriptions[num_outputs:], strict=True):
        tensor = value(node)
        plan = None if tensor is None else plans.get(node.name)
        stored = [node] if plan is None else _store(forward, backward, node, entries[node.name], plan, traces)
        saved.extend(stored)
        described.extend([description] * len(stored))
        if tensor is not None and node.name not in known.static:
            after = sum(_nbytes(part) for part in map(value, stored) if part is not None)
            form, reason = (plan.form, "") if plan is not None else ("kept", reasons[node.name])
            shape = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
            size = before.get(node.name, _nbytes(tensor))
            values.append(SavedValue(node.name, name_of(node), tensor.dtype, shape, size, after, form, reason))
    end.args = (tuple(saved),)
    if "desc" in end.meta:
        end.meta["desc"] = described
    for graph in (forward, backward):
        graph.graph.lint()
        graph.recompile()
    return tuple(values)


def _saved_tensors(forward: fx.GraphModule, num_outputs: int) -> Iterator[tuple[str, Tensor]]:
    for node in outputs_of(forward)[num_outputs:]:
        tensor = value(node)
        if tensor is not None:
            yield node.name, tensor


def _plans(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    known: Joint,
    config: Config,
    behind: Behind,
    positive: set[str],
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return a plan or the reason to keep, for each saved tensor."""
    outputs = outputs_of(forward)
    saved = {node.name: node for node in outputs[num_outputs:] if value(node) is not None}
    tangent = set()
    for node in backward.graph.nodes:
        is_gradient = node.op == "placeholder" and node.name not in saved and value(node) is not None
        if is_gradient or any(source.name in tangent for source in node.all_input_nodes):
            tangent.add(node.name)
    found = needs(backward.graph, tangent, known.data, config, producers=saved, behind=behind)
    # Codes of a result of ReLU serve its comparison too.
    plans, reasons = {}, {}
    for name, node in saved.items():
        plan = _plan(node, found.get(name), known, config, name in positive)
        if isinstance(plan, str):
            reasons[name] = plan
        else:
            plans[name] = plan
    kept = {_memory(saved[name]): name for name in reasons}
    for name in [name for name in plans if _memory(saved[name]) in kept]:
        # Codes would come on top of the memory: values, beside queries and keys in 16 bits, of one projection.
        reasons[name] = f"in the memory of {kept[_memory(saved[name])]}, which is kept"
        del plans[name]
    return plans, reasons


def _memory(node: fx.Node) -> int:
    """Return the identity of a tensor's storage."""
    tensor = value(node)
    assert tensor is not None
    return int(tensor.untyped_storage()._cdata)


def _plan(node: fx.Node, need: Need | None, known: Joint, config: Config, positive: bool) -> Plan | str:
    tensor = value(node)
    if tensor is None or need is None:
        return "unknown to backward"
    if node.name in known.static:
        return "static input"
    if node.op == "placeholder" and node.name in known.kept_inputs:
        return "an input that is a leaf or needs no gradient"
    if type(tensor) is not torch._subclasses.FakeTensor:
        return "a subclass of Tensor"
    if _nbytes(tensor) < config.min_bytes:
        return "small"
    if is_skipped(node):
        return "skipped"
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
    spans = need.reading.need <= CODES and need.row is not None and need.row < config.group_size
    if need.reading.need > RELATIVE:
        return need.reading.reason
    # Less than one group: no sum averages out the errors of codes.
    few = need.reading.need <= CODES and all(isinstance(size, int) for size in tensor.shape)
    few = few and tensor.numel() < config.group_size
    if need.reading.need == RELATIVE or spans or few:
        if tensor.dtype is not torch.float32:
            return "16 bits already" if not spans else "a group of codes would span rows"
        return _halves_plan(BFLOAT16 if spans or few else need.form)
    if order is None:
        return "elements overlap or have gaps"
    return _code_plan(tensor.dtype, order, config.group_size, positive)


def _halves_plan(form: object) -> Plan | str:
    if form is SCALED:
        return Plan("16 bits", ("halves_of_", "exponent_of_"), scale, unscale)
    dtype = torch.float16 if form is LOG else torch.bfloat16
    if form not in (LOG, BFLOAT16):
        return "no graph stores this form"

    def pack(x: Tensor) -> tuple[Tensor]:
        return ((saturate(x) if dtype is torch.float16 else x).to(dtype),)

    return Plan("16 bits", ("halves_of_",), pack, lambda x: x.to(torch.float32), dtype)


def _code_plan(dtype: torch.dtype, order: list[int], group_size: int, positive: bool) -> Plan:
    def pack(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(x.permute(order).contiguous(), group_size, positive)

    def restore(codes: Tensor, groups: Tensor) -> Tensor:
        return dequantize(codes, groups, group_size, dtype).permute([order.index(dim) for dim in range(len(order))])

    return Plan("codes", ("codes_of_", "groups_of_"), pack, restore, positive)


def _bit_plan(tensor: Tensor, order: list[int]) -> Plan | str:
    flat = _Flat.of(tensor, order, 8)
    if flat is None:
        return "no static sizes give a multiple of 8 elements"
    return Plan(
        "bits", ("bits_of_",), lambda x: (pack_bits(flat.flatten(x)),), lambda x: flat.unflatten(unpack_bits(x))
    )


@dataclass(frozen=True)
class _Flat:
    """A tensor in storage order, with enough innermost dimensions joined that groups fit, and padded if static."""

    order: list[int]
    outer: int
    inner: list[int]
    padding: int

    @classmethod
    def of(cls, tensor: Tensor, order: list[int], unit: int) -> _Flat | None:
        inner: list[int] = []
        total, outer = 1, len(order)
        while outer and isinstance(size := tensor.shape[order[outer - 1]], int):
            total, outer = total * size, outer - 1
            inner.insert(0, size)
            if total % unit == 0:
                return cls(order, outer, inner, 0)
        return cls(order, 0, inner, -total % unit) if not outer and total else None

    def flatten(self, x: Tensor) -> Tensor:
        x = x.permute(self.order).contiguous()
        # Sizes of the tensor at hand, so no symbolic one has to be saved.
        x = x.view(*x.shape[: self.outer], -1)
        if self.padding:
            # Copies of an element leave minimum and maximum of the last group as they are.
            x = torch.cat([x, x[-1:].expand(self.padding)])
        return x

    def unflatten(self, x: Tensor) -> Tensor:
        if self.padding:
            x = x[: x.shape[0] - self.padding]
        x = x.view(*x.shape[: self.outer], *self.inner)
        return x.permute([self.order.index(dim) for dim in range(len(self.order))])


def storage_order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions from outermost to innermost in memory; None where elements overlap or none are neighbours.

    A view with gaps, as queries and keys of one projection, is stored without them.
    """
    if not tensor.dim():
        return None
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        if isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1):
            return None
    order = sorted(range(tensor.dim()), key=lambda dim: (-_hint(tensor.stride(dim)), dim))
    innermost = tensor.stride(order[-1])
    return order if isinstance(innermost, int) and innermost == 1 else None


def _hint(size: object) -> int:
    """Return a size; for a dynamic one its value in the call that compiles, without a guard."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return 4096 if hint is None else int(hint)


def _nbytes(tensor: Tensor) -> int:
    elements = 1
    for size in tensor.shape:
        elements *= _hint(size)
    return elements * tensor.element_size()


def _store(
    forward: fx.GraphModule, backward: fx.GraphModule, node: fx.Node, entry: fx.Node, plan: Plan, traces: Traces
) -> list[fx.Node]:
    """Pack a value behind its producer and restore it before its first reader; return the stored tensors."""
    tensor = value(node)
    assert tensor is not None
    place = first_operator(forward) if node.op == "placeholder" else node.next
    with forward.graph.inserting_before(place):
        stored = _inline(forward, _traced(plan, "pack", tensor, (tensor,), traces), [node])
    entries = []
    for prefix, part in zip(plan.parts, stored, strict=True):
        part._rename(f"{prefix}{node.name}")
        if node.meta.get("saved_tensor_with_no_vc_check"):
            part.meta["saved_tensor_with_no_vc_check"] = True
        with backward.graph.inserting_before(entry):
            placeholder = backward.graph.placeholder(part.name)
        placeholder.meta = {key: part.meta[key] for key in ("val", "tensor_meta") if key in part.meta}
        entries.append(placeholder)
    parts = [part.meta["val"] for part in stored]
    with backward.graph.inserting_before(first_use(backward, entry)):
        restored = _inline(backward, _traced(plan, "restore", tensor, parts, traces), entries)[0]
    restored._rename(f"restored_{node.name}")
    entry.replace_all_uses_with(restored)
    backward.graph.erase_node(entry)
    return stored


def _traced(plan: Plan, name: str, tensor: Tensor, arguments: Sequence[Tensor], traces: Traces) -> fx.GraphModule:
    """Return the trace of a plan's function; equal blocks, whose tensors have the same static sizes, share one."""
    function = getattr(plan, name)
    layout = (*tensor.shape, *tensor.stride())
    if not all(isinstance(size, int) for size in layout):
        return traced(function, *arguments)
    key = (name, plan.form, plan.parts, plan.variant, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if key not in traces:
        traces[key] = traced(function, *arguments)
    return traces[key]


def _inline(owner: fx.GraphModule, function: fx.GraphModule, inputs: list[fx.Node]) -> list[fx.Node]:
    """Copy a traced function to the insertion point of a graph; return its results."""
    copies = dict(zip(function.graph.find_nodes(op="placeholder"), inputs, strict=True))
    results: list[fx.Node] = []
    for node in function.graph.nodes:
        if node.op == "output":
            found = node.args[0]
            results = [copies[result] for result in (found if isinstance(found, (tuple, list)) else (found,))]
        elif node.op == "get_attr":
            name = f"_pyactcomp_{len(list(owner.buffers()))}"
            owner.register_buffer(name, getattr(function, str(node.target)))
            copies[node] = owner.graph.get_attr(name)
        elif node.op != "placeholder":
            copies[node] = owner.graph.node_copy(node, copies.__getitem__)
        if node.op not in ("placeholder", "output"):
            copies[node].meta = dict(node.meta)
            tensor = value(node)
            if tensor is not None:
                # AOTAutograd compares storages, and equal blocks share a trace.
                copies[node].meta["val"] = tensor.new_empty_strided(tensor.shape, tensor.stride())
    return results
