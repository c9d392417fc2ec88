"""Where the rules over names do not give a model: what single architectures need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .breadth_inputs import BATCH, FRAMES, LENGTH, Inputs

_DEPTH = {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}, "neck_hidden_sizes": [16] * 4,
          "fusion_hidden_size": 16}  # fmt: skip

# Their width doubles from stage to stage.
_HIERARCHY = {"embed_dim": 16, "num_heads": [2, 2, 4, 4]}

CONFIGS: dict[str, dict[str, Any]] = {
    "mpt": {"attn_pdrop": 0, "emb_pdrop": 0},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "albert/PRETRAINING": {"num_labels": 2},
    "bit": {"num_groups": 8},
    "efficientnet": {"width_coefficient": 0.25, "hidden_dim": 320},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},
    "lilt": {"hidden_size": 96},
    "depth_anything": _DEPTH,
    "prompt_depth_anything": _DEPTH,
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4},
    "glm5_next": {"text_config": {"num_key_value_heads": 4}},
    "reformer/MASKED_LM": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8]},
    "reformer/CAUSAL_LM": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8], "is_decoder": True},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16] * 4,
        "fusion_hidden_size": 16,
    },
    "zoedepth": {**_DEPTH, "bottleneck_features": 16},
    "chmv2": _DEPTH,
    "beit/SEMANTIC_SEGMENTATION": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "data2vec-vision/SEMANTIC_SEGMENTATION": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "led": {"attention_window": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "levit": {"image_size": 224},
    "pvt": {"image_size": 224},
    "patchtst": {"num_targets": 2},
    "swin": _HIERARCHY,
    "swinv2": _HIERARCHY,
    "donut-swin": _HIERARCHY,
    "maskformer-swin": _HIERARCHY,
    "focalnet": _HIERARCHY,
    "hiera": _HIERARCHY,
    "vjepa2": {"frames_per_clip": 8},
    "radio": {"max_img_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_headdim": 16},
}


def _with(**made: Callable[[Inputs], Any]) -> Callable[[Inputs, dict[str, Any]], dict[str, Any]]:
    """Return a change of inputs that adds some."""
    return lambda inputs, found: {**found, **{name: make(inputs) for name, make in made.items()}}


def _flat_patches(inputs: Inputs, found: dict[str, Any]) -> dict[str, Any]:
    """Return images as rows of patches, with their shapes."""
    patch = inputs.vision.patch_size
    return {
        **found,
        "pixel_values": inputs.normal(BATCH, 64, 3 * patch * patch),
        "pixel_attention_mask": torch.ones(BATCH, 64, dtype=torch.long),
        "spatial_shapes": torch.tensor([[8, 8]] * BATCH),
    }


_FRAMES_MASK = _with(attention_mask=lambda inputs: torch.ones(BATCH, FRAMES, dtype=torch.long))

INPUTS: dict[str, Callable[[Inputs, dict[str, Any]], dict[str, Any]]] = {
    "siglip2": _flat_patches,
    "siglip2_vision_model": _flat_patches,
    "parakeet_ctc": _FRAMES_MASK,
    "lasr_ctc": _FRAMES_MASK,
    "lxmert": _with(
        visual_feats=lambda inputs: inputs.normal(BATCH, 36, inputs.config.visual_feat_dim),
        visual_pos=lambda inputs: inputs.normal(BATCH, 36, 4),
    ),
    "visual_bert": _with(
        visual_embeds=lambda inputs: inputs.normal(BATCH, 10, inputs.config.visual_embedding_dim),
        labels=lambda inputs: inputs.words(LENGTH + 10),
    ),
    "videomae/PRETRAINING": _with(bool_masked_pos=lambda inputs: _masked(inputs)),
}


def _masked(inputs: Inputs) -> torch.Tensor:
    """Return which patches of a video are masked, as many in each row."""
    config = inputs.config
    count = (config.image_size // config.patch_size) ** 2 * (config.num_frames // config.tubelet_size)
    return (torch.arange(count) % 4 != 0).expand(BATCH, -1)
