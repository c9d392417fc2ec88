"""Which blocks of a model keep, compress, send to the host or run again: a plan decides, ``compress`` applies it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.nn import Module, ModuleList, Sequential

from .config import Mode
from .errors import PyactcompError

OFFLOAD = "+offload"
CHOICES = ("keep", "lossless", "int8", "checkpoint", "int8+checkpoint", f"lossless{OFFLOAD}", f"int8{OFFLOAD}")
"""The ways to run a block: as it is, with its saved tensors compressed, again in backward, and both; and compressed,
with the stored bytes on the host until backward."""

# The share of a module's parameters above which the blocks inside make it a stage.
_STAGE = 0.8


@dataclass(frozen=True)
class Layout:
    """How a model's blocks run.

    Attributes
    ----------
    mode : {"int8", "lossless"} or None
        How the model is compressed around the blocks, and in those whose choice says so; None for not at all.
    blocks : tuple of tuple of str
        Pairs of a block's qualified name and one of :data:`CHOICES`, in the order of the forward.
    fuse_head : bool
        Whether a language model computes its loss in chunks of tokens, so that the logits of a batch never exist.
    """

    mode: Mode | None
    blocks: tuple[tuple[str, str], ...]
    fuse_head: bool = False

    def kept(self) -> tuple[str, ...]:
        """Return the names of the blocks that save their tensors, or their inputs, as they are."""
        return tuple(name for name, choice in self.blocks if choice in ("keep", "checkpoint"))

    def offloaded(self) -> tuple[str, ...]:
        """Return the names of the blocks whose stored bytes leave the device."""
        return tuple(name for name, choice in self.blocks if choice.endswith(OFFLOAD))

    def checkpointed(self, model: Module) -> list[Module]:
        """Return the blocks of a model that run again in backward.

        Raises
        ------
        PyactcompError
            If the model lacks one of the layout's blocks, or checkpoints by itself.
        """
        named = dict(model.named_modules())
        if any(getattr(module, "gradient_checkpointing", False) is True for module in named.values()):
            raise PyactcompError(
                f"this {type(model).__name__} checkpoints its blocks already: call gradient_checkpointing_disable() "
                "first, the plan decides for each block"
            )
        for name, _ in self.blocks:
            if name not in named:
                raise PyactcompError(
                    f"the plan is for another model: this {type(model).__name__} has no block {name!r}; plan for it"
                )
        return [named[name] for name, choice in self.blocks if choice.endswith("checkpoint")]


def repeating(module: Module) -> Iterator[Module]:
    """Yield the blocks: children of one container, of one class, that have children themselves.

    A stage that consists of such blocks is no block: its blocks are.
    """
    for child in module.children():
        blocks = list(child.children())
        same = isinstance(child, (ModuleList, Sequential)) and len({type(each) for each in blocks}) == 1
        if same and len(blocks) > 1 and any(True for _ in blocks[0].children()):
            for block in blocks:
                inner = list(repeating(block))
                yield from inner if _size(inner) > _STAGE * _size([block]) else [block]
        else:
            yield from repeating(child)


def _size(modules: Iterable[Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
