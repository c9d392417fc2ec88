"""Swap modules for fused ones, and back: only the class of a module and one attribute change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch.nn import Module

from ..config import Config
from ..engine.classes import give_class, given_of
from ..engine.marks import FUSING
from ..engine.record import is_compiled
from . import families, head, written
from .fusion import Fused, Fusion, is_fused_class, original_of
from .state import FusionState, LeftAlone
from .tampering import replaced_reason, tampering_reason

__all__ = ["FusionState", "fuse", "fused_modules", "left_alone", "unfuse"]


def fuse(model: Module, config: Config, skipped: Collection[Module] = ()) -> FusionState:
    """Swap the class of every module of ``model`` with a known fused class.

    Parameters
    ----------
    model : Module
    config : Config
        ``fuse`` and ``fuse_head`` select the modules; lossless mode fuses only modules whose result stays the same to
        the bit.
    skipped : collection of Module
        Modules to leave as they are, with all their children.

    Returns
    -------
    FusionState
        State shared by the fused modules; while it is paused, they run the forward of their own class.

    Raises
    ------
    ValueError
        If ``fuse_head`` is set and the model has no head to fuse. The model stays unchanged.
    """
    exempt = {module for root in skipped for module in root.modules()}
    plan: dict[Module, type[Module]] = {}
    alone: list[LeftAlone] = []
    for name, module, fusion in _candidates(model, config, exempt):
        reason = _reason_to_leave(module, fusion, exempt)
        if reason is None:
            plan[module] = fusion.fused
        else:
            alone.append(LeftAlone(name, type(module).__name__, reason))
    headed = any(issubclass(fused, head.Head) for fused in plan.values())
    if config.fuse_head and not headed and not any(map(is_compiled, model.modules())):
        headless = _headless(model, alone)
        raise ValueError(
            f"fuse_head=True needs a language model whose loss can be taken in chunks, got {headless.type}: "
            f"{headless.reason}; leave fuse_head out, or compile the module with the loss before compress: a graph "
            "takes torch.nn.functional.cross_entropy of a Linear's result in chunks"
        )
    state = FusionState(config, tuple(alone))
    FUSING.set(model, state)
    for module, fused in plan.items():
        give_class(module, fused)
        FUSING.set(module, state)
    return state


def unfuse(model: Module) -> None:
    """Give every fused module the original class back.

    A class derived from the fused one, as ``fully_shard`` makes one, stays and runs the module's own forward.
    """
    for module in model.modules():
        FUSING.pop(module)
        if is_fused_class(type(module)):
            give_class(module, original_of(type(module)))


def fused_modules(model: Module) -> list[tuple[str, str]]:
    """Return the qualified name of each fused module, with the name of the fused class."""
    return [
        (name, next(given_of(base).mixin.__name__ for base in type(module).__mro__ if is_fused_class(base)))
        for name, module in model.named_modules()
        if isinstance(module, Fused) and FUSING.get(module) is not None
    ]


def left_alone(model: Module) -> list[LeftAlone]:
    """Return the modules with a known fused class that stay as they are: skipped, or changed by other code."""
    state: FusionState | None = FUSING.get(model)
    return list(state.left_alone) if state is not None else []


def _candidates(model: Module, config: Config, exempt: set[Module]) -> Iterator[tuple[str, Module, Fusion]]:
    """Yield each module whose class, or a base of the class, has a fused class selected by ``config``."""
    classes = {type(module) for module in model.modules()}
    by_class = written.by_class(model.modules()) | families.by_class(classes) if config.fuse else {}
    by_place = _by_place(model) if config.fuse else {}
    losses = _with_losses(model) if config.fuse_head else ()
    for name, module in model.named_modules():
        if module in exempt:
            continue
        headed = head.fused_head_class(module) if module in losses else None
        if headed is not None:
            yield name, module, Fusion(headed)
            continue
        # A class derived from a norm may be one written out, or not: the first that suits.
        bases = (by_class[cls] for cls in type(module).__mro__ if cls in by_class)
        known = (by_place[module],) if module in by_place else bases
        fusion = next((each for each in known if each.suits is None or each.suits(module)), None)
        if fusion is None or (config.mode == "lossless" and not fusion.exact):
            continue
        if not _mixes_rows(module, fusion, config):
            yield name, module, fusion


def _mixes_rows(module: Module, fusion: Fusion, config: Config) -> bool:
    """Return whether a group of codes would span several rows, each divided by a deviation of its own.

    The engine stores such rows in 16 bits.
    """
    # A derived class is left alone, and may have other parameters.
    derived = type(module) is not original_of(fusion.fused)
    if config.mode == "lossless" or derived or not issubclass(fusion.fused, Fused):
        return False
    length = fusion.fused.row_length(module)
    return length is not None and length < config.group_size


def _with_losses(model: Module) -> list[Module]:
    """Return the modules that take labels as models of transformers do; the model itself, if there is none."""
    return [each for each in model.modules() if head.takes_labels(type(each))] or [getattr(model, "_orig_mod", model)]


def _headless(model: Module, alone: list[LeftAlone]) -> LeftAlone:
    """Return the module with the loss, and why its head is not fused; ``alone`` says so of a changed module."""
    losses = _with_losses(model)
    name, module = next((name, module) for name, module in model.named_modules() if module in losses)
    changed = next((each.reason for each in alone if each.name == name), "it is skipped")
    return LeftAlone(name, type(module).__name__, head.unsupported_head(module) or changed)


def _by_place(model: Module) -> dict[Module, Fusion]:
    """Return the fusions of modules by their place in a parent, if nothing else calls the modules or sees results."""
    calls = Counter(child for module in model.modules() for child in module._modules.values())
    return {
        module: fusion
        for parent in model.modules()
        if not isinstance(parent, torch.jit.ScriptModule)  # nothing in there runs Python
        for module, fusion in families.by_place(parent).items()
        if calls[module] == 1 and tampering_reason(module) is None
    }


def _reason_to_leave(module: Module, fusion: Fusion, exempt: set[Module]) -> str | None:
    own = original_of(fusion.fused)
    if type(module) is not own:
        return f"its class is derived from {own.__name__}"
    # A model with a fused head returns no logits; any other fused module returns what its own forward returns.
    reason = (tampering_reason if issubclass(fusion.fused, head.Head) else replaced_reason)(module)
    for name in fusion.bypassed if reason is None else ():
        child = getattr(module, name, None)
        if child in exempt:
            return f"its {name} is skipped"
        if isinstance(child, Module) and (inside := tampering_reason(child)) is not None:
            return f"its {name}: {inside}"
    return reason
