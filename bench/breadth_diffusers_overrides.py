"""Where the rules over names do not give a model of diffusers: what single classes need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .breadth_diffusers import BATCH, FRAMES, SIDE, WIDTH, Made

Change = Callable[[Made, dict[str, Any]], dict[str, Any]]

FIELDS: dict[str, dict[str, Any]] = {
    "AutoencoderKLKVAE": {"channels": 32},
    "AutoencoderKLKVAEVideo": {"ch": 32},
    "AutoencoderKLLTX2Audio": {"base_channels": 32},
    "AutoencoderKLQwenImage": {"base_dim": 16},
    "AutoencoderKLTemporalDecoder": {"block_out_channels": (32,)},
    "AutoencoderKLWan": {"base_dim": 16},
    "AutoencoderVidTok": {"ch": 32},
    "OmniGenTransformer2DModel": {"pad_token_id": 0},
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "UNetSpatioTemporalConditionModel": {
        "block_out_channels": (32, 32, 32, 32),  # normed in 32 groups whatever the configuration says
        "num_attention_heads": (2, 2, 2, 2),
        "projection_class_embeddings_input_dim": 192,
    },
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
}


def _with(**made: Callable[[Made], Any]) -> Change:
    """Return a change of inputs that adds some, and takes those away whose value is None."""

    def change(inputs: Made, found: dict[str, Any]) -> dict[str, Any]:
        found = {**found, **{name: make(inputs) for name, make in made.items()}}
        return {name: value for name, value in found.items() if value is not None}

    return change


def _frames_first(inputs: Made) -> torch.Tensor:
    return inputs.normal(BATCH, FRAMES, inputs.field("in_channels", default=16), SIDE, SIDE)


_FLOAT_TIME = _with(timestep=lambda inputs: torch.tensor([500.0, 250.0]))

INPUTS: dict[str, Change] = {
    "AutoencoderDC": _with(sample=lambda inputs: inputs.normal(BATCH, 3, 4 * SIDE, 4 * SIDE)),
    "AutoencoderKLTemporalDecoder": _with(
        sample=lambda inputs: inputs.normal(FRAMES, 3, 2 * SIDE, 2 * SIDE), num_frames=lambda inputs: FRAMES
    ),
    "AutoencoderOobleck": _with(sample=lambda inputs: inputs.normal(BATCH, 2, 4096)),
    "CogVideoXTransformer3DModel": _with(
        hidden_states=_frames_first, encoder_hidden_states=lambda inputs: inputs.normal(BATCH, 64, WIDTH)
    ),
    "ConsisIDTransformer3DModel": _with(hidden_states=_frames_first),
    "DiTTransformer2DModel": _with(class_labels=lambda inputs: torch.tensor([1, 2])),
    "HunyuanImageTransformer2DModel": _FLOAT_TIME,
    "HunyuanVideo15Transformer3DModel": _FLOAT_TIME,
    "LTXVideoTransformer3DModel": _with(
        hidden_states=lambda inputs: inputs.normal(BATCH, 64, inputs.field("in_channels")),
        num_frames=lambda inputs: 4,
        height=lambda inputs: 4,
        width=lambda inputs: 4,
    ),
    "PriorTransformer": _with(
        hidden_states=lambda inputs: inputs.normal(BATCH, WIDTH),
        encoder_hidden_states=lambda inputs: inputs.normal(BATCH, inputs.field("num_embeddings"), WIDTH),
    ),
    "UNetSpatioTemporalConditionModel": _with(sample=_frames_first),
}
