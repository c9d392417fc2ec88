"""What is alive: tensors and stored forms that Python sees, and the memory that autograd's graphs hold for backward."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module

from ..engine.record import dense_parts
from ..torch_private import StoredForm, function_of, held_by_node


def alive(*kinds: type) -> list[Any]:
    """Return all live objects of some classes, apart from those that ``gc.freeze()`` has set aside."""
    # type(), not isinstance(): the attribute __class__ of some stand-ins runs code.
    known: dict[type, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        wanted = known.get(kind)
        if wanted is None:
            wanted = known[kind] = issubclass(kind, kinds)
        if wanted:
            found.append(each)
    return found


def tensors_in(values: object) -> Iterator[Tensor]:
    """Yield the tensors in a tensor, or in nested mappings and sequences."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for each in values.values():
            yield from tensors_in(each)
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from tensors_in(each)


def memory_of(tensor: Tensor) -> Iterator[tuple[torch.device, int, int]]:
    """Yield device, address and bytes of each storage of a tensor; nothing of a tensor without memory."""
    try:
        storages = [part.untyped_storage() for part in dense_parts(tensor)]
        # A fake tensor has a device, and a storage of the device "meta", which warns if asked for its address.
        real = [storage for storage in storages if storage.device.type != "meta"]
        found = [(storage.device, storage.data_ptr(), storage.nbytes()) for storage in real]
    except (RuntimeError, NotImplementedError):  # in a transform, or of a device that gives no address
        return
    yield from (each for each in found if each[1] and each[2])


def nodes_from(tensors: Iterable[Tensor]) -> set[Node]:
    """Return the nodes of the graphs that tensors hold."""
    stack = [tensor.grad_fn for tensor in tensors]
    nodes: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        stack += [following for following, _ in node.next_functions]
    return nodes


def saved_in(nodes: Iterable[Node]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that nodes hold for backward: codes of functions of this package, and all others."""
    codes: list[Tensor] = []
    others: list[Tensor] = []
    for node in nodes:
        function = function_of(node)
        # In a graph of torch.compile this package's partitioner alone saves bytes.
        owns = function is not None and (
            function.__module__.startswith("pyactcomp.") or function.__name__ == "CompiledFunction"
        )
        for each in held_by_node(node):
            for tensor in kept_in(each) if isinstance(each, StoredForm) else tensors_in(each):
                (codes if owns and tensor.dtype is torch.uint8 else others).append(tensor)
    return codes, others


def kept_in(form: StoredForm) -> list[Tensor]:
    """Return the tensors that a stored form holds as they are, for itself or for its recipe."""
    recipe = getattr(form, "recipe", None)
    held = (getattr(form, "tensor", None), *(() if recipe is None else recipe.operands))
    return [each for each in held if each is not None]


def of_modules(modules: Iterable[Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters and buffers of modules, without those of their children, and the gradients."""
    tensors = [each for module in modules for each in (*module.parameters(False), *module.buffers(False))]
    gradients = [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return tensors, gradients


def of_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the tensors of the states of optimizers, and the tensors among their settings."""
    found: list[Tensor] = []
    for optimizer in optimizers:
        found += tensors_in(dict(optimizer.state))
        for group in optimizer.param_groups:
            found += tensors_in([value for name, value in group.items() if name != "params"])
    return found
