"""Where the rules over names do not give a model: what single architectures need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .breadth_inputs import Inputs

CONFIGS: dict[str, dict[str, Any]] = {
    "mpt": {"attn_pdrop": 0, "emb_pdrop": 0},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
}

INPUTS: dict[str, Callable[[Inputs, dict[str, Any]], dict[str, Any]]] = {}
