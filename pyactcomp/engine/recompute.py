"""Outputs that backward computes again from what their operator keeps, instead of keeping them too.

Where an operator saves a tensor, the node that made it tells which operator that was, and what it saved itself. If
that is enough to compute the tensor again cheaply, and the tensor provably still is what came out, the stored forms
of the operands are held in its place. No node is held: after its backward its saved tensors are gone, and long
chains of nodes overflow the stack when they are freed.

Longer than 400 lines: the recipes, and the search for the operands that they need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional as F

from ..codec.layouts import layout_of
from ..readers.forms import ITSELF
from ..readers.observer import being_traced, observer
from ..torch_private import saved_form, saves_are_dropped
from .marks import PACKS, RECIPE, Packs, attach, output_of
from .policy import CAST, PLAIN, source
from .policy import producer as made_by
from .recipes import Compute, Recipe, Redone
from .record import is_recording
from .saved import (
    Kept,
    Pending,
    Region,
    Same,
    View,
)

# A recipe may rest on an operand that is itself computed again, as SwiGLU's product does on SiLU's result, but on no
# longer chain of them.
_DEEPEST = 2


Stored = Kept | Region | View | Redone


def offer(ctx: Any, out: Tensor, compute: Compute, *operands: Tensor) -> None:
    """Let operators that save ``out``, a view of it or autocast's cast of it keep its recipe instead.

    To be called in the ``forward`` of an autograd function, with its context and its output. The recipe lives as long
    as the output or what saved it. Where what is saved is thrown away kernels write no codes, so there is nothing to
    compute from.

    Parameters
    ----------
    ctx : FunctionCtx
    out, compute, *operands
        As in :class:`Recipe`.
    """
    if torch.compiler.is_compiling() or being_traced():  # no hook will ask for it, and sizes may be symbols
        return
    attach(ctx, out, Recipe(out, None) if saves_are_dropped() else Recipe(out, compute, operands))


def held(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter as a recipe may read it until backward is over.

    Where training is distributed that is a copy. FSDP frees parameters after forward and gathers them again for the
    backward of their own module, which comes after that of what read its output.
    """
    if parameter is None:
        return None
    bare = observer().bare(parameter)
    return bare.clone() if _may_be_freed() else bare


def _may_be_freed() -> bool:
    """Return whether parameters may have no memory between forward and their own module's backward."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def mark_as_packed(codes: Tensor, x: Tensor, *, overwritten: bool = False) -> Tensor:
    """Let a report count ``codes``, which an autograd function saves, as the packed form of ``x``; returns the codes.

    Where the function's result is ``overwritten`` on ``x``, the memory of ``x`` counts for the result.
    """
    if is_recording():
        storage = None if overwritten else ref(x.untyped_storage())
        PACKS.set(codes, Packs(tuple(x.shape), x.dtype, x.nbytes, storage))
    return codes


def source_of(tensor: Tensor, node: Node) -> tuple[Recipe, Tensor, torch.dtype] | None:
    """Return how to compute what no cast made again, an output and the dtype that it is wanted in; or None.

    Parameters
    ----------
    tensor : Tensor
        A plain tensor, dense or a view.
    node : Node
        What made it, or what it is a view of.
    """
    out = tensor if tensor._base is None else tensor._base
    recipe = RECIPE.get(out)
    if recipe is None and out._version == 0:
        build = _OPERATORS.get(node.name())
        # Written to nowhere since it was made, and nothing but what was made: an operator's output owns its storage.
        if build is not None and out.grad_fn is node:
            recipe = build(out, node)
            if recipe is not None:
                attach(node, out, recipe)
    if recipe is None or not recipe.computes or not recipe.serves(tensor) or tensor.dtype is not out.dtype:
        return None
    return recipe, out, recipe.dtype


def cast_recipe(copy: Tensor, node: Node) -> tuple[Recipe, Tensor] | None:
    """Return the recipe of what a cast read, and that, while it is alive and provably unchanged."""
    if copy.grad_fn is not node or copy._version != 0 or not copy.is_contiguous():
        return None
    producer, number = source(node)
    out = None if producer is None else output_of(producer)
    if out is None or out.output_nr != number or out.numel() != copy.numel() or out.device != copy.device:
        return None
    recipe = RECIPE.get(out)
    return (recipe, out) if recipe is not None and recipe.serves(out) and out.is_contiguous() else None


def source_of_cast(
    copy: Tensor, node: Node, known: tuple[Recipe, Tensor] | None
) -> tuple[Recipe, Tensor, torch.dtype] | None:
    """Return how to compute what a cast made again, as :func:`source_of`; ``known`` is the cast's ``cast_recipe``."""
    if known is not None:
        return (*known, copy.dtype) if known[0].casts else None
    if copy.grad_fn is not node or copy._version != 0:
        return None
    producer, number = source(node)
    if producer is None:
        return None
    stored = _stored_result(producer)
    if stored is None or stored.layout != layout_of(copy) or number != 0:
        return None
    exact = is_exact(stored)
    return Recipe(copy, lambda dtype: stored.restore().to(dtype), exact=exact), copy, copy.dtype


def again(tensor: Tensor) -> Callable[[], Tensor] | None:
    """Return what computes an offered output, or autocast's cast of one, again; None where that is not known."""
    recipe = RECIPE.get(tensor)
    if recipe is None and tensor.grad_fn is not None and tensor.grad_fn.name() == CAST:
        known = cast_recipe(tensor, tensor.grad_fn)
        recipe = None if known is None or not known[0].casts else known[0]
    elif recipe is not None and not (recipe.computes and recipe.serves(tensor)):
        recipe = None
    if recipe is None:
        return None
    dtype, shape = tensor.dtype, tensor.size()
    # What was cast may have been reshaped before.
    return lambda: recipe.compute(dtype).view(shape)


_SAVING_THEIR_RESULT = frozenset({"SoftmaxBackward0", "LogSoftmaxBackward0", "TanhBackward0", "SigmoidBackward0"})


def _stored_result(node: Node) -> Region | Kept | None:
    """Return the stored result of an operator that saves it, if it has not been written to."""
    if node.name() not in _SAVING_THEIR_RESULT:
        return None
    stored = saved_form(node, "result")
    return stored if isinstance(stored, (Region, Kept)) and stored.unchanged else None


def is_result_to_store(x: Tensor) -> bool:
    """Return whether ``x``, or what it is a view of, is the result of an operator that saves it.

    By the operator's name alone: a checkpointed function must take the same way when it runs again.
    """
    return made_by(x)[0] in _SAVING_THEIR_RESULT


def _operand(node: Node, name: str) -> Stored | None:
    """Return the stored form of an operand, if it is one to compute from."""
    stored = saved_form(node, name)
    if isinstance(stored, (Same, Pending)):
        stored = stored.stored
    return stored if isinstance(stored, (Kept, Region, View, Redone)) and _depth(stored) < _DEEPEST else None


# A product is this many times larger than a factor that is copied for it: the copy takes 1.6 % of what it saves.
_COPIED = 64


def _lasting(stored: Stored | None, made_by: Node | None, out: Tensor) -> Stored | None:
    """Return a stored factor of ``out`` as :func:`held` returns a parameter: one that no operator made may be such."""
    made = made_by is not None and type(made_by).__name__ != "AccumulateGrad"
    if made or not isinstance(stored, Kept):
        return stored
    # By now it may be freed already.
    copied = stored.tensor.untyped_storage().nbytes() > 0 and stored.tensor.numel() * _COPIED <= out.numel()
    return Kept(stored.tensor.clone()) if copied else None


def _shared(stored: object) -> object:
    """Return what a stored form is a view of, or itself."""
    if isinstance(stored, Pending) and not isinstance(stored.stored, Kept):
        stored = stored.stored
    return stored.region if isinstance(stored, View) else stored


def is_exact(stored: Stored) -> bool:
    """Return whether a stored form gives its tensor bit by bit."""
    shared = _shared(stored)
    if isinstance(shared, Redone):
        return shared.recipe.exact
    return not isinstance(shared, Region) or shared.form is ITSELF


def _depth(stored: Stored) -> int:
    shared = _shared(stored)
    return shared.recipe.depth if isinstance(shared, Redone) else 0


def _narrowed(stored: Stored) -> bool:
    shared = _shared(stored)
    return isinstance(shared, Region) and shared.narrowed


def _gelu(out: Tensor, node: Any) -> Recipe | None:
    x = _operand(node, "self")
    if x is None:
        return None
    approximate = node._saved_approximate
    again = functools.partial(F.gelu, approximate=approximate)
    return Recipe(out, lambda dtype: again(x.restore()).to(dtype), depth=_depth(x) + 1, exact=is_exact(x))


def _silu(out: Tensor, node: Node) -> Recipe | None:
    x = _operand(node, "self")
    if x is None:
        return None
    return Recipe(out, lambda dtype: F.silu(x.restore()).to(dtype), depth=_depth(x) + 1, exact=is_exact(x))


def _mul(out: Tensor, node: Node) -> Recipe | None:
    a, b = _operand(node, "self"), _operand(node, "other")
    if _may_be_freed():
        (of_a, _), (of_b, _) = node.next_functions
        a, b = _lasting(a, of_a, out), _lasting(b, of_b, out)
    if a is None or b is None:
        return None
    depth, exact = max(_depth(a), _depth(b)) + 1, is_exact(a) and is_exact(b)
    return Recipe(out, lambda dtype: (a.restore() * b.restore()).to(dtype), depth=depth, exact=exact)


def _dropout_of_result(out: Tensor, node: Any) -> Recipe | None:
    """Serve dropout of a tensor that its own operator stores: attention probabilities."""
    mask, (producer, _) = _operand(node, "result1"), source(node)
    stored = None if producer is None else _stored_result(producer)
    # Only a mask that was drawn is packed. The node does not tell ``train``.
    if not isinstance(mask, Region) or stored is None or stored.layout != layout_of(out):
        return None
    # In 16 bits the CPU's forward rounds the scale, too, and its backward does not.
    if not out.is_cuda and out.dtype.itemsize < 4:
        return None
    scale = _scale_of_dropout(node._saved_p, out.is_cuda and out.dtype is not torch.float64)
    # What dropout does to its input is, with the scale of the forward, what its backward does to a gradient.
    backward = torch.ops.aten.native_dropout_backward
    exact = is_exact(stored)
    return Recipe(out, lambda dtype: backward(stored.restore(), mask.restore(), scale).to(dtype), exact=exact)


@functools.lru_cache(maxsize=64)
def _scale_of_dropout(probability: float, narrow: bool) -> float:
    """Return what the forward of dropout multiplies kept elements by.

    On CUDA that is the reciprocal, in float32, of a difference in float32. Backward rounds once, and otherwise.
    """
    if probability == 1:
        return 0.0
    kept = torch.tensor(1 - probability, dtype=torch.float32 if narrow else torch.float64)
    return float(kept.reciprocal())


_OPERATORS: dict[str, Callable[[Tensor, Node], Recipe | None]] = {
    "GeluBackward0": _gelu,
    "SiluBackward0": _silu,
    "MulBackward0": _mul,
    "NativeDropoutBackward0": _dropout_of_result,
}


def offer_layer_norm(out: Tensor, module: torch.nn.LayerNorm) -> None:
    """Make known how a layer norm's output is computed again. Its node does not tell ``eps``, the module does."""
    node: Any = out.grad_fn
    if node is None or node.name() != "NativeLayerNormBackward0" or out._version != 0:
        return
    shape, eps = module.normalized_shape, module.eps
    # Where autocast has cast them, what was read is not what the module holds.
    for each in (module.weight, module.bias):
        if each is not None and (each.dtype is not out.dtype or type(each) not in PLAIN):
            return
    x = _operand(node, "input")
    # To restore what is kept in a narrower dtype and normalise it moves 14 bytes to save 4.
    if x is None or _narrowed(x):
        return

    # Read now: by backward a parameter's ``.data`` may be other memory, or none.
    gamma, beta = held(module.weight), held(module.bias)
    affine = tuple(each for each in (gamma, beta) if each is not None)

    def compute(dtype: torch.dtype) -> Tensor:
        return torch.native_layer_norm(x.restore(), shape, gamma, beta, eps)[0].to(dtype)

    # To normalise in float32 and then cast moves 14 bytes to save 2; that the casts are the same is worth more.
    attach(node, out, Recipe(out, compute, affine, depth=_depth(x) + 1, casts=False, exact=is_exact(x)))
