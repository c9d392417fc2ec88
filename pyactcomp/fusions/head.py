"""Take the loss of language models in chunks, without the logits of the whole batch.

The fused model runs the forward of its own class, but the Linear of the output embeddings (:func:`head_of`) returns
lazy logits (:mod:`.logits`).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from ..engine.marks import FUSING, GIVEN
from .fusion import Fused, fused_class, original_of
from .logits import Call, Logits, computed, projecting_later
from .state import FusionState, active_codes
from .tampering import bypassable_as, tampering_reason

# Settings of transformers' models that change logits before the loss: the loss then needs all logits.
_BETWEEN = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "unpadded_vocab_size",
)


class Head(Fused):
    """A model whose ``forward`` computes a loss of labels: takes the loss in chunks, returns no logits.

    Runs fused in training, if a loss is asked for and the head has no hooks; else the forward of the model's own class
    runs. A model of transformers is asked by ``labels`` given by name, another by a second argument.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        given = GIVEN.get(cls)
        if given is None or not issubclass(given.mixin, Head):  # a class derived from the fused one
            return
        original = given.own
        by_name = takes_labels(original)

        # Keeps the signature: frameworks read the parameter names of a model's forward.
        @functools.wraps(original.forward)
        def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
            if by_name:
                has_loss = kwargs.get("labels") is not None
            else:
                has_loss = len([value for value in (*args, *kwargs.values()) if value is not None]) > 1
            if torch.compiler.is_compiling():
                # A pass over the graph takes the loss in chunks, unless the graph returns the logits.
                output = original.forward(self, *args, **kwargs)
                trains = self.training and torch.is_grad_enabled() and has_loss
                return _without_columns(output, None if by_name else head_of(self)) if trains else output
            codes = active_codes(self) if has_loss else None
            head: Any = head_of(self)
            if codes is None or not bypassable_as(head, nn.Linear) or type(head.weight) is not Parameter:
                return original.forward(self, *args, **kwargs)
            state: FusionState | None = FUSING.get(self)
            tile = None if state is None else state.config.tile
            with projecting_later(head, codes.impl, tile if isinstance(tile, int) else None) as call:
                output = original.forward(self, *args, **kwargs)
                if by_name:
                    return _without_logits(output, by_name)
                if not call.taken:
                    _warn_of_whole_logits(self, call)
                    return computed(output)
                return _without_logits(output, by_name)

        cls.forward = forward


def _without_logits(output: Any, by_name: bool) -> Any:
    """Put None in place of lazy logits, unless a function of them, other than a cap, was computed.

    The tuples of transformers leave out what is None.
    """

    def is_lazy(part: Any) -> bool:
        return isinstance(part, Logits) and not (part.projection.steps and part.projection.computed)

    def shown(part: Any) -> Any:
        return part.computed() if isinstance(part, Logits) else part

    if isinstance(output, dict):
        return type(output)(**{name: None if is_lazy(part) else shown(part) for name, part in output.items()})
    if type(output) is tuple:
        return tuple(None if is_lazy(part) else shown(part) for part in output if not (by_name and is_lazy(part)))
    return computed(output)


def _without_columns(output: Any, head: Any) -> Any:
    """Leave out logits while torch.compile traces: in a tuple with a loss, what has as many columns as the head."""
    if isinstance(output, dict) and "logits" in output:
        return type(output)(**{name: part for name, part in output.items() if name != "logits"})
    if type(output) is tuple and isinstance(head, nn.Linear) and any(map(_is_scalar, output)):
        columns = head.weight.shape[0]
        return tuple(
            None if isinstance(part, Tensor) and part.dim() > 1 and part.shape[-1] == columns else part
            for part in output
        )
    return output


def _is_scalar(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0


_warned: WeakSet[Module] = WeakSet()


def _warn_of_whole_logits(model: Module, call: Call) -> None:
    """Say once that a forward computed the logits of the whole batch."""
    if model in _warned:
        return
    _warned.add(model)
    name = original_of(type(model)).__name__
    if call.reader is not None:
        reason = f"{call.reader} took the logits before torch.nn.functional.cross_entropy"
    else:
        reason = (
            "no torch.nn.functional.cross_entropy took the result of its last nn.Linear; a get_output_embeddings() of "
            f"{name} may return another head"
        )
    warnings.warn(f"fuse_head=True has no effect in the forward of {name}: {reason}", stacklevel=4)


def head_of(model: Module) -> Module | None:
    """Return the module that computes a model's logits.

    The model names it by ``get_output_embeddings``. Else it is the Linear that shares the weight of an Embedding, or
    the last Linear. If another one computes the logits, results are the same, and a warning says that no loss is taken
    in chunks.
    """
    named = getattr(model, "get_output_embeddings", None)
    if callable(named):
        return cast("Module | None", named())
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            for linear in linears:
                if linear.weight is module.weight:
                    return linear
    return linears[-1] if linears else None


def takes_labels(cls: type[Module]) -> bool:
    """Return whether a model names its head and asks for its loss as those of transformers do."""
    return hasattr(cls, "get_output_embeddings") and "labels" in inspect.signature(cls.forward).parameters


def fused_head_class(module: Module) -> type[Module] | None:
    """Return the fused class with the chunked loss, or None where :func:`unsupported_head` has a reason against it."""
    return fused_class(Head, original_of(type(module))) if unsupported_head(module) is None else None


def unsupported_head(module: Module) -> str | None:
    """Return why the loss of ``module`` cannot be taken in chunks, or None."""
    name = original_of(type(module)).__name__
    parameters = inspect.signature(module.forward).parameters
    several = len(parameters) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    if not several:
        return f"the forward of {name} takes no targets"
    head: Any = head_of(module)
    if not isinstance(head, Module):
        return f"{name} has no output embeddings, nor another nn.Linear"
    if not bypassable_as(head, nn.Linear):
        reason = tampering_reason(head) or "expected nn.Linear"
        return f"the output embeddings of {name} are {type(head).__name__}: {reason}"
    config = getattr(module, "config", None)
    for setting in _BETWEEN:
        if getattr(config, setting, None) is not None:
            return f"{name} changes its logits before the loss ({setting})"
    return None
