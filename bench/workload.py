"""What a workload is: a model at one size, its batch, and how its loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Batch = tuple[Tensor, ...]

TINY_VOCABULARY = 2048
"""Still wide enough that the logits of a tiny model are large enough to be compressed."""


class LanguageModelLoss(nn.Module):
    """A Hugging Face model whose output is its loss, so that no other output outlives the forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss


class ClassifierLoss(nn.Module):
    """An image classifier with its criterion, so that what covers the module covers the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(images), labels)


class Objective(nn.Module):
    """Any other model and the function that computes its loss.

    ``checkpoint`` turns the model's own gradient checkpointing on, where its library has one.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], checkpoint: Callable[[], object] | None = None
    ) -> None:
        super().__init__()
        self.model, self.loss, self.checkpoint = model, loss, checkpoint

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


@dataclass(frozen=True)
class Workload:
    """One model at one size.

    ``build(tiny)`` makes it on the current default device, ``inputs(batch, device, tiny)`` draws a batch and
    ``blocks(module)`` names what gradient checkpointing wraps.
    """

    name: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[int, str, bool], Batch]
    blocks: Callable[[Any], list[nn.Module]]
    batch: int
    conditions: str
    autocast: bool = False
    tf32: bool = False
    first_batch: int = 8
    language_model: bool = False
    """Whether the loss is that of a Hugging Face language model, whose head can be fused with it."""
    written_loss: bool = False
    """Whether the module calls the head and a cross-entropy itself: a compiled graph can take that loss in chunks."""
    liger: bool = False
    """Whether Liger-Kernel has a patch for the architecture."""
    checkpoints_itself: bool = False
    """Whether :class:`Objective` knows the model's own gradient checkpointing; there are no ``blocks`` then."""
    steps: int | None = None
    """How many steps are timed, where not as many as the method says."""
    methods: tuple[str, ...] | None = None
    """The methods that are measured unless others are asked for; None: all."""

    def batch_size(self, tiny: bool) -> int:
        return 2 if tiny else self.batch
