"""The (architecture, head) pairs of transformers, and how each is built without a download."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .breadth_inputs import Inputs
from .breadth_overrides import CONFIGS, INPUTS
from .breadth_shrink import tiny

# Heads that are one Linear on the trunk of another: measured only where an architecture has no other.
_LINEAR_HEADS = (
    "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE",
    "NEXT_SENTENCE_PREDICTION", "DOCUMENT_QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING",
    "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR",
)  # fmt: skip
# Mappings that repeat classes of others.
_LAST = ("BACKBONE", "TEXT_ENCODING", "DECISION", "MULTIMODAL_LM", "RETRIEVAL", "MODEL")


def _mappings() -> dict[str, dict[str, Any]]:
    from transformers.models.auto import modeling_auto

    found = {}
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("MAPPING_NAMES") and name.startswith("MODEL"):
            found[name.removesuffix("_MAPPING_NAMES").removeprefix("MODEL_FOR_")] = dict(mapping)
    return found


def pairs() -> list[tuple[str, str]]:
    """Return every architecture with each of its heads, by model type and mapping."""
    mappings = _mappings()
    own = [head for head in sorted(mappings) if head not in (*_LINEAR_HEADS, *_LAST, "IMAGE")]
    found: dict[str, dict[str, str]] = {}
    for heads, alone in ((own, False), (_LINEAR_HEADS, True), (_LAST, True)):
        for head in heads:
            for architecture, classes in mappings.get(head, {}).items():
                mine = found.setdefault(architecture, {})
                for name in classes if isinstance(classes, (tuple, list)) else (classes,):
                    if name not in mine and not (alone and mine and head in _LAST) and not (alone and _full(mine)):
                        mine[name] = head
    return [
        (architecture, head) for architecture, mine in sorted(found.items()) for head in dict.fromkeys(mine.values())
    ]


def _full(mine: dict[str, str]) -> bool:
    return any(head not in _LINEAR_HEADS for head in mine.values())


def build(architecture: str, head: str, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model of an architecture with a head, and its inputs.

    Raises
    ------
    Exception
        Whatever the model's classes raise where the architecture cannot be built from a configuration alone.
    """
    import transformers

    name = _mappings()[head][architecture]
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    if getattr(cls, "config_class", None) is None:
        raise ImportError(f"{name} cannot be imported here")
    overrides = {**CONFIGS.get(architecture, {}), **CONFIGS.get(f"{architecture}/{head}", {})}
    config = tiny(cls.config_class, dropout, overrides)
    torch.manual_seed(0)
    model = cls(config)
    if model.dtype != torch.float32:
        model = model.float()
    model.train()
    inputs = Inputs(model, head)
    change = INPUTS.get(architecture, INPUTS.get(head))
    made = inputs.make()
    if change is not None:
        made = change(inputs, made)
    return model, made
