"""The (architecture, head) pairs of transformers, and how each is built without a download."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .breadth_inputs import Inputs
from .breadth_overrides import CONFIGS, INPUTS
from .breadth_shrink import tiny

# Heads that are one Linear on the trunk of another: one is measured where an architecture has no other.
_LINEAR_HEADS = (
    "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE",
    "NEXT_SENTENCE_PREDICTION", "DOCUMENT_QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING",
    "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR",
)  # fmt: skip
# A class that stands in several mappings is named for the first of these.
_FIRST = ("IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM")
# Mappings that repeat classes of others: for architectures that have nothing else.
_LAST = ("BACKBONE", "TEXT_ENCODING", "DECISION", "MULTIMODAL_LM", "RETRIEVAL", "MODEL")


def _mappings() -> dict[str, dict[str, Any]]:
    from transformers.models.auto import modeling_auto

    found = {}
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("MAPPING_NAMES") and name.startswith("MODEL"):
            found[name.removesuffix("_MAPPING_NAMES").removeprefix("MODEL_FOR_")] = dict(mapping)
    return found


def pairs() -> list[tuple[str, str]]:
    """Return every architecture with each head that is its own, by model type and mapping."""
    mappings = _mappings()
    others = sorted(mappings.keys() - {*_FIRST, *_LINEAR_HEADS, *_LAST, "IMAGE", "PRETRAINING"})
    own = (*_FIRST, *others, "PRETRAINING")
    found: dict[str, dict[str, str]] = {}
    for head in (*own, *_LINEAR_HEADS, *_LAST):
        for architecture, classes in mappings.get(head, {}).items():
            mine = found.setdefault(architecture, {})
            if head in own or not mine:
                mine.setdefault(str(classes), head)
    return [(architecture, head) for architecture, mine in sorted(found.items()) for head in mine.values()]


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
    change = INPUTS.get(f"{architecture}/{head}", INPUTS.get(architecture))
    made = inputs.make()
    if change is not None:
        made = change(inputs, made)
    return model, made
