"""Diffusers: every model class, with the constructor's arguments shrunk by name and inputs by what forward takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .breadth_shrink import shrunk

BATCH, SIDE, FRAMES, WORDS = 2, 16, 4, 16
WIDTH = 64

# Classes that wrap several models, or take another model to be built.
_WRAPPERS = re.compile(
    r"^(ModelMixin|Multi\w+|\w+Multi\w+Model|UniDiffuserTextDecoder|MotionAdapter|ControlNetXSAdapter)$"
)

_RULES: tuple[tuple[str, Any], ...] = (
    (r"^(in|out|latent|vace_in|condition|ctrl_conditioning)_channels?$", None),
    (r"patch_size|kernel|freq_shift|scale|theta|ratio|eps$|stride|padding|factor|max_size|norm_groups", None),
    (r"norm_num_groups|max_norm_num_groups", 8),
    (r"attention_head_dim|head_dim$|dim_head", 16),
    (r"kv_heads|key_value_heads", 2),
    (r"heads", 4),
    (r"layers_per_block|blocks_per", 1),
    (r"layers|blocks$|n_layers|depth$", 2),
    (r"sample_(size|height|width)|pos_embed_max_size", SIDE),
    (r"sample_frames|num_frames", FRAMES),
    (r"freq_dim", 32),
    (r"ffn|intermediate", 2 * WIDTH),
    (r"vocab|codebook|num_vq_embeddings|num_embeds_ada_norm", 256),
    (r"seq_len|text_len|max_text|max_pos", 64),
    (r"caption_channels|addition|_dim$|^dim$|hidden_size|channels$|_size$|embed", WIDTH),
)


def _kind(name: str) -> str:
    for part, head in (("ControlNet", "controlnet"), ("Adapter", "controlnet"), ("UNet", "unet"), ("UVit", "unet"),
                       ("Transformer", "transformer"), ("DiT", "transformer")):  # fmt: skip
        if part in name:
            return head
    return "autoencoder" if re.search(r"Autoencoder|VAE|Vae|^VQ|Tokenizer|Vocoder", name) else "other"


def pairs() -> list[tuple[str, str]]:
    """Return the name and the kind of each model class of diffusers."""
    import diffusers

    found = []
    for name in sorted(dir(diffusers)):
        if name.startswith(("_", "Flax")) or _WRAPPERS.match(name) or not re.search(r"[A-Z]", name):
            continue
        try:
            value = getattr(diffusers, name)
        except (ImportError, AttributeError, RuntimeError):
            continue
        if inspect.isclass(value) and issubclass(value, nn.Module):
            found.append((name, _kind(name)))
    return found


def _axes(values: Any, total: int) -> Any:
    """Return widths of rotary axes, even ones, that sum up to ``total``."""
    count = len(values)
    each = max(2, total // count // 2 * 2)
    found = [each] * count
    found[0] = total - each * (count - 1)
    return type(values)(found)


def _argument(name: str, value: Any, dropout: float) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if "drop" in name:
        return shrunk(name, value, dropout) if isinstance(value, (int, float)) else type(value)([dropout] * len(value))
    if isinstance(value, (tuple, list)):
        if not value or not all(type(each) is int for each in value):
            return value
        if re.search(r"rope|axes_dims?$", name):
            return _axes(value, 16)
        if name == "axes_lens":
            return type(value)([64] * len(value))
        if re.search(r"channels|dims?$|hidden", name) and "ratio" not in name:
            return type(value)(max(16, round(32 * each / max(value) / 16) * 16) for each in value)
        if re.search(r"heads", name):
            return type(value)([2] * len(value))
        if re.search(r"layers_per|num_layers|depth|blocks", name):
            return type(value)([1] * len(value))
        return value
    if type(value) is not int:
        return value
    for pattern, limit in _RULES:
        if re.search(pattern, name):
            return value if limit is None else min(value, limit)
    return value


UNSET = {
    "in_channels": 4,
    "sample_size": SIDE,
    "patch_size": 2,
    "joint_attention_dim": WIDTH,
    "caption_channels": WIDTH,
}
"""What is nothing by default, and taken for a number by the model."""


def arguments(kind: type, dropout: float) -> dict[str, Any]:
    """Return tiny arguments of a model's constructor."""
    found = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if parameter.default is inspect.Parameter.empty or name == "self":
            continue
        unset = None if _kind(kind.__name__) == "autoencoder" else UNSET.get(name)
        value = unset if parameter.default is None else _argument(name, parameter.default, dropout)
        if value != parameter.default:
            found[name] = value
    return found


def _get(config: Any, name: str, default: Any = None) -> Any:
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value


_TEXT_WIDTHS = (
    "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_embed_dim", "text_dim", "cap_feat_dim",
    "encoder_hidden_size", "context_in_dim", "text_in_dim", "caption_projection_dim", "encoder_hidden_states_channels",
)  # fmt: skip


_VIDEO = r"3D|Video|Motion|Wan|Magvit|Cosmos|CogVideoX|Mochi|Allegro|KLQwenImage|VidTok|ImageRefiner|6SRVAE|MiniMaxH3$"


class Made:
    """The inputs of one model."""

    def __init__(self, model: Any, name: str, head: str) -> None:
        self.model, self.name, self.head, self.config = model, name, head, model.config
        self.generator = torch.Generator().manual_seed(1)
        self.video = bool(re.search(_VIDEO, name))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def field(self, *names: str, default: int = WIDTH) -> int:
        for name in names:
            value = _get(self.config, name)
            if isinstance(value, (list, tuple)):
                value = value[0]
            if isinstance(value, int):
                return value
        return default

    def latents(self) -> Tensor:
        if self.head == "autoencoder":
            channels = self.field("in_channels", "image_channels", default=3)
            return self.normal(BATCH, channels, *((5,) if self.video else ()), 2 * SIDE, 2 * SIDE)
        channels = self.field("in_channels", "in_dim", "latent_channels", default=4)
        if self.packed():
            return self.normal(BATCH, 64, channels)
        if self.video:
            return self.normal(BATCH, channels, FRAMES, SIDE, SIDE)
        return self.normal(BATCH, channels, SIDE, SIDE)

    def packed(self) -> bool:
        taken = inspect.signature(self.model.forward).parameters
        return any(name in taken for name in ("img_ids", "img_shapes"))

    def words(self) -> Tensor:
        width = self.field(*_TEXT_WIDTHS)
        return self.normal(BATCH, WORDS, width)

    def condition(self) -> Tensor:
        if self.packed() or self.name.startswith(("SD3", "Sana")):
            return self.latents()
        return self.normal(BATCH, 3, 8 * SIDE, 8 * SIDE)

    def places(self) -> Tensor:
        """Return the rotary positions of 8 x 8 patches, one column for each axis."""
        axes = len(_get(self.config, "axes_dims_rope", (0, 0, 0)))
        grid = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
        return torch.cat([torch.zeros(64, 1), grid, torch.zeros(64, axes - 3)], 1)

    def values(self) -> dict[str, Callable[[], Any]]:
        """Return how to make each input that a forward may take."""
        image = {
            "hidden_states": self.latents,
            "sample": self.latents,
            "x": self.latents,
            "timestep": lambda: torch.tensor([500, 250]),
            "timesteps": lambda: torch.tensor([500, 250]),
            "encoder_hidden_states": self.words,
            "pooled_projections": lambda: self.normal(BATCH, self.field("pooled_projection_dim", "text_encoder_dim")),
            "img_ids": lambda: self.places(),
            "txt_ids": lambda: torch.zeros(WORDS, self.places().shape[1]),
            "guidance": lambda: torch.full((BATCH,), 3.5),
            "class_labels": lambda: torch.tensor([1, 2]),
            "img_shapes": lambda: [[(1, 8, 8)]] * BATCH,
            "encoder_attention_mask": lambda: torch.ones(BATCH, WORDS, dtype=torch.bool),
            "encoder_hidden_states_mask": lambda: torch.ones(BATCH, WORDS, dtype=torch.bool),
            "controlnet_cond": self.condition,
            "conditioning_scale": lambda: 1.0,
            "r_timestep": lambda: torch.tensor([250, 125]),
            "original_size": lambda: torch.full((BATCH, 2), 128.0),
            "target_size": lambda: torch.full((BATCH, 2), 128.0),
            "crop_coords": lambda: torch.zeros(BATCH, 2),
            "added_time_ids": lambda: torch.ones(BATCH, 3),
            "proj_embedding": lambda: self.normal(BATCH, WIDTH),
        }  # fmt: skip
        return image


OPTIONAL = frozenset({
    "encoder_hidden_states", "img_shapes", "encoder_attention_mask", "encoder_hidden_states_mask", "timestep",
    "pooled_projections", "img_ids", "txt_ids",
})  # fmt: skip


def build(architecture: str, head: str, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model of a class of diffusers, and its inputs."""
    import diffusers

    from .breadth_diffusers_overrides import FIELDS, INPUTS

    kind = getattr(diffusers, architecture)
    torch.manual_seed(0)
    model = kind(**{**arguments(kind, dropout), **FIELDS.get(architecture, {})}).float().train()
    made = Made(model, architecture, head)
    values = made.values()
    inputs = {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        needed = parameter.default is inspect.Parameter.empty
        guided = name == "guidance" and bool(_get(model.config, "guidance_embeds"))
        if name in values and (needed or name in OPTIONAL or guided):
            inputs[name] = values[name]()
    if head == "autoencoder":
        inputs = {name: value for name, value in inputs.items() if name in ("sample", "x", "hidden_states")}
    change = INPUTS.get(architecture)
    return model, inputs if change is None else change(made, inputs)
