"""Tiny configurations of transformers' architectures: one table of rules over the names of a configuration's fields."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

VOCABULARY = 384
LABELS = 8
IMAGE = 64
POSITIONS = 256
FIRST_SPECIAL = 8
"""Token numbers below it are special ones; the inputs' own start after ``FIRST_SPECIAL + 40``."""

Rule = tuple[str, int]

# The first rule whose pattern is found in a field's name gives its value, where the default is an integer; a default
# that is smaller already stays. Widths: 64, in 4 heads of 16.
RULES: tuple[Rule, ...] = (
    (r"vocab_size|vocabulary_size|n_tokens|^num_embeddings$|group_vocab", VOCABULARY),
    (r"codebook_size", 256),
    (r"^(pad|bos|eos|sep|cls|unk|mask)_token_id$|token_type_vocab|type_vocab_size", 10**9),
    (r"num_labels", LABELS),
    (r"image_size|input_size|resolution", IMAGE),
    (r"patch_stride|downsampling_ratio|conv_kernel|kernel|stride|patch_size_t|temporal_patch", 10**9),
    (r"patch_size|patch_dim", 8),
    (r"max_.*position|n_positions|n_ctx|max_seq|seq_length|max_target_pos|max_source_pos|max_sequence", POSITIONS),
    (r"mm_tokens_per_image|image_seq_length|num_image_tokens", 16),
    (r"window_size|sliding_window|chunk_size|block_size|chunk_length", 32),
    (r"n_group$|topk_group|num_expert_group", 1),
    (r"num_experts_per|experts_per_tok|^moe_k$|top_k|topk|num_selected", 2),
    (r"num_.*shared_experts|n_shared_experts", 1),
    (r"expert_interval|layer_(freq|period|offset|step|interval|stride)|every|frequency", 10**9),
    (r"expert.*(size|dim)|moe.*(size|dim)", 64),
    (r"experts", 4),
    (r"first_k_dense|num_dense_layers|num_hidden_groups|num_nextn|num_mtp", 1),
    (r"mamba_n_heads|mamba_num_heads|ssm_num_heads", 8),
    (r"n_head_kv|key_value_heads|kv_heads|multi_query_group_num|n_kv_head", 2),
    (r"(num|n)_?heads?$|attention_heads|n_head|_heads$|num_head", 4),
    (r"num_.*queries|num_query|num_latents|n_query", 16),
    (r"layers|n_layer|num_.*blocks|^depth$|_depth$|num_.*block$|resblocks|n_blocks", 2),
    (r"q_lora_rank|kv_lora_rank|lora_rank|low_rank|_rank$", 32),
    (
        r"rotary_dim|rope_head_dim|nope_head_dim|v_head_dim|head_dim|head_size|d_kv|d_head|key_size|attention_head_dim",
        16,
    ),
    (r"state_size|ssm_state|d_state|time_step_rank", 16),
    (r"intermediate|ffn|n_inner|d_ff|feed_?forward|mlp_dim|inner_dim|mlp_hidden|linear_units|ffw", 128),
    (r"num_mel|n_mels|mel_bins|num_filters", 32),
    (r"hidden_size|d_model|n_embd|embed_dim|embed_size|embedding_dim|embedding_size|model_dim|emb_dim|dim_model", 64),
    (r"^dim$|^width$|_dim$|_width$|proj_size|projection_size|hidden_dim|d_embed|units|_channels|_features", 64),
)

_COMPILED = tuple((re.compile(pattern), value) for pattern, value in RULES)
_UNTOUCHED = re.compile(
    r"num_channels|in_channels|in_chans|input_channels|out_features|sampling_rate|out_indices|num_codebooks|version|"
    r"position_embedding_type|group_norm|num_groups|n_groups|dtype|downsample_rate|spatial_dim|out_channels$"
)
_DROPOUT = re.compile(r"drop|^(attn|resid|embd)_pdrop$")
_WITHOUT_DROPOUT = re.compile(r"layerdrop|drop_rate_.*path|tokens|dropless|scale|router|every|drop_block")
_TOKEN = re.compile(r"token_(id|index)$|_token$|_id$|_idx$")


def _integer(name: str, value: int) -> int:
    if _UNTOUCHED.search(name) or isinstance(value, bool):
        return value
    if name == "window_size":  # of patches, or of pixels
        return 32 if value > IMAGE else min(value, 2)
    for pattern, limit in _COMPILED:
        if pattern.search(name):
            return min(value, limit)
    return value


def _scaled(values: list[int], largest: int, unit: int) -> list[int]:
    """Return the values in about the same proportions, multiples of ``unit``, none above ``largest``."""
    divisor = max(values) / largest
    if divisor <= 1:
        return list(values)
    return [max(unit, unit * round(value / divisor / unit)) for value in values]


def _listed(name: str, values: list[Any]) -> list[Any]:
    """Return the list of a field that has one value for each stage."""
    if not values or not all(type(value) is int for value in values) or _UNTOUCHED.search(name):
        return values
    if re.search(r"depths|layers|num_blocks|repeats|^depth$|block_repeats", name):
        return [min(value, 1 + (index == 0)) for index, value in enumerate(values)]
    if re.search(r"image_size|input_size|resolution", name):
        return [IMAGE] * len(values)
    if re.search(
        r"patch_size|stride|kernel|ratio|window|padding|sr_ratios|dilat|indices|indexes|section|rates|stage", name
    ):
        return values
    if "heads" in name:
        return [min(value, 2) for value in values]
    if re.search(r"hidden_size|dims?$|channels|widths?|sizes|filters|neck", name):
        return _scaled(values, 64, 8)
    return values


def shrunk(name: str, value: Any, dropout: float) -> Any:
    """Return the tiny value of one field."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if _DROPOUT.search(name) and isinstance(value, (int, float)):
        return 0.0 if _WITHOUT_DROPOUT.search(name) or "path" in name else dropout
    if isinstance(value, int):
        return _integer(name, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_listed(name, list(value)))
    return value


def _special_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    """Return numbers inside the vocabulary, each another, for the tokens whose own are outside."""
    found = {}
    number = FIRST_SPECIAL
    for name, value in fields.items():
        if _TOKEN.search(name) and type(value) is int and value >= FIRST_SPECIAL:
            found[name] = number
            number += 1
        elif _TOKEN.search(name) and isinstance(value, list) and all(type(each) is int for each in value):
            found[name] = [min(each, FIRST_SPECIAL - 1) for each in value]
    return found


@functools.cache
def _defaults(kind: type) -> dict[str, Any]:
    """Return the fields of a configuration class with their defaults, before anything is derived from them."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


# What is nothing by default, and taken for a number by the model.
_UNSET = {
    "head_dim": 16, "num_experts_per_tok": 2, "vocab_size": VOCABULARY, "n_shared_experts": 1, "n_routed_experts": 4,
    "prediction_length": 8, "routed_scaling_factor": 1.0, "moe_intermediate_size": 64, "rotary_dim": 16,
}  # fmt: skip
_SECTIONED = re.compile(r"vl|glm4v|glm46v|glm_ocr|glm_image|glmga|omni")

COMMON = {"use_cache": False, "layerdrop": 0.0, "use_pretrained_backbone": False, "apply_spec_augment": False}


def _changed(config: Any) -> dict[str, Any]:
    """Return the fields in which a nested configuration differs from one of its class, those of single layers aside."""
    plain = type(config)()
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        simple = isinstance(value, (bool, int, float, str)) or (isinstance(value, list) and "out_" in field.name)
        if simple and value != getattr(plain, field.name, None):
            found[field.name] = value
    return found


def tiny(kind: type, dropout: float, overrides: dict[str, Any] | None = None, like: Any = None) -> Any:
    """Return a tiny configuration of a class, its nested ones included.

    Parameters
    ----------
    kind : type
        A configuration class of transformers.
    dropout : float
        What every dropout of the model is set to; dropped paths and layers are left out.
    overrides : dict, optional
        Values that take precedence; a nested configuration's name maps to another such dictionary.
    like : configuration, optional
        One of this class that is not its default: a nested one as the outer class makes it.
    """
    own = dict(overrides or {})
    plain = _defaults(kind)
    changed = {} if like is None else {name: value for name, value in _changed(like).items() if name in plain}
    defaults = {**plain, **changed}
    fields = {name: shrunk(name, value, dropout) for name, value in defaults.items()}
    fields.update(_special_tokens(defaults))
    fields.update({name: value for name, value in COMMON.items() if name in defaults})
    fields = {name: value for name, value in fields.items() if value != plain[name] or name in COMMON}
    fields.update({name: value for name, value in _UNSET.items() if name in defaults and defaults[name] is None})
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:
        fields["num_key_value_heads"] = 4  # latent attention has a key for each query's head
    subs = getattr(kind, "sub_configs", {})
    whole = kind() if subs else None
    for name in subs:
        inner = getattr(whole, name, None)
        given = own.pop(name, {})
        if inner is not None and dataclasses.is_dataclass(inner):
            given = {} if given is None else given
            fields[name] = given if not isinstance(given, dict) else tiny(type(inner), dropout, given, inner)
        elif given is not None and given != {}:
            fields[name] = given
    if "num_labels" not in defaults:
        fields["num_labels"] = LABELS
    fields.update(own)
    return completed(kind(**fields))


def completed(config: Any) -> Any:
    """Return a configuration with what its model reads of it but its class does not set."""
    rotary = getattr(config, "rope_parameters", None)
    if isinstance(rotary, dict) and (_SECTIONED.search(config.model_type) or "mrope_section" in rotary):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(width * rotary.get("partial_rotary_factor", 1.0)) // 2
        count = len(rotary.get("mrope_section", "thw"))
        section = [max(1, half // count)] * count
        rotary["mrope_section"] = [half - sum(section[1:]), *section[1:]]
    if getattr(config, "is_encoder_decoder", False):
        for name, value in (("decoder_start_token_id", 1), ("pad_token_id", 0)):
            if getattr(config, name, None) is None:
                setattr(config, name, value)
    return config
