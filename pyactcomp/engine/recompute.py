"""Recipes: how backward recomputes an output, such as a fused function's, from what is stored.

The library finds the recipes of torch's operators and stores them, ``csrc/engine/recompute.hpp``. Functions written in
Python offer theirs here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..readers.observer import being_traced, observer
from ..torch_private import graph_is_retained, saves_are_dropped
from . import saved
from .marks import PACKS, RECIPE, Packs
from .record import is_recording
from .saved import PLAIN

Compute = Callable[..., Tensor]


def offer(ctx: Any, out: Tensor, compute: Compute, *operands: Tensor, stored: tuple[Tensor, ...] = ()) -> None:
    """Offer a recipe for ``out``: operators that save ``out``, a view or autocast's cast of ``out`` store the recipe.

    Call this in the ``forward`` of an autograd function, with the context and the output, and :func:`withdraw` in its
    ``backward``. Until then the recipe lives as long as the node, or a saved form that uses the recipe. Where saved
    tensors are dropped unread (the first run of a checkpointed function) kernels write no codes: the recipe is empty.

    Parameters
    ----------
    ctx : FunctionCtx
    out : Tensor
        The output. Must be dense and the owner of the storage.
    compute : callable
        Maps the tensors of ``stored`` and a dtype (the dtype of ``out``, or the target of an autocast cast) to a tensor
        with the values and shape of ``out``, in any layout, whose memory belongs to the caller. Must never hold ``out``
        or the graph.
    *operands : Tensor
        Tensors read unpacked by ``compute``, such as a weight: a write before backward raises autograd's error.
    stored : tuple of Tensor
        Tensors that the function saves too, such as codes. ``compute`` is given them and must not hold them: their
        memory may leave the device meanwhile.
    """
    if being_traced():  # no hook will use the recipe, and sizes may be symbols
        return
    observer().note_offering(type(ctx))
    dropped = saves_are_dropped()
    RECIPE.set(ctx, saved.Recipe(out, None, (), ()) if dropped else saved.Recipe(out, compute, stored, operands))


def withdraw(ctx: Any) -> None:
    """Release the operands of an offered recipe, as backward releases saved tensors; saved forms keep their own."""
    if observer().is_offering(type(ctx)) and not graph_is_retained():
        RECIPE.drop(ctx)


def stable_copies(*parameters: Tensor | None) -> list[Tensor | None]:
    """Return the parameters, detached, as they stay valid until backward ends; clones if training is distributed.

    FSDP frees a parameter after forward and gathers the parameter only for the backward of its module. Operators that
    read the module's output recompute it before that.
    """
    bare = observer().bare
    copies = [None if parameter is None else bare(parameter) for parameter in parameters]
    return [None if copy is None else copy.clone() for copy in copies] if may_be_freed() else copies


_DISTRIBUTED = torch.distributed.is_available()


@saved.for_library
def may_be_freed() -> bool:
    """Return whether FSDP may free parameters between the forward and the backward of their module."""
    return _DISTRIBUTED and torch.distributed.is_initialized()


@saved.for_library
def mark_as_packed(codes: Tensor, x: Tensor, *, overwritten: bool = False) -> Tensor:
    """Let a report count ``codes``, saved by an autograd function, as the packed form of ``x``; return ``codes``.

    If the function writes the result over ``x`` (``overwritten``), the memory of ``x`` counts for the result.
    """
    if is_recording():
        storage = None if overwritten else ref(x.untyped_storage())
        PACKS.set(codes, Packs(tuple(x.shape), x.dtype, x.nbytes, storage))
    return codes


def recomputation_of(tensor: Tensor) -> Callable[[], Tensor] | None:
    """Return a function that recomputes an offered output, or autocast's cast of one; None without a recipe."""
    recipe = saved.library().recipe_of(tensor)
    if recipe is None or not recipe.computes or (tensor.dtype is not recipe.dtype and not recipe.casts):
        return None
    return functools.partial(_recomputed, recipe, tensor.dtype, tensor.size(), recipe.forms())


def _recomputed(recipe: saved.Recipe, dtype: torch.dtype, shape: torch.Size, forms: tuple[object, ...]) -> Tensor:
    """Recompute an output or its cast; ``forms`` keeps alive the stored forms that the recipe reads."""
    out = recipe.compute(dtype)
    # The source may have been reshaped before the cast. A view would hold the tensor it is of.
    return out if out.shape == shape else out.view(shape)


def offer_norm(out: Tensor) -> None:
    """Offer a recipe for the output of a norm of rows, or of a gain: autocast's casts do not lead to the output."""
    saved.library().offer_norm(out, may_be_freed())


def offer_exact_layer_norm(out: Tensor, module: torch.nn.LayerNorm) -> None:
    """Offer a recipe for a layer norm's output to the bit, with ``eps`` from the module: the node does not tell it."""
    # Autocast casts the parameters, and then the operator did not read the module's own.
    for each in (module.weight, module.bias):
        if each is not None and (each.dtype is not out.dtype or type(each) not in PLAIN):
            return
    saved.library().offer_exact_layer_norm(out, module.eps, module.weight, module.bias, may_be_freed())
