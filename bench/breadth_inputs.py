"""Inputs of transformers' models, made from what their forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .breadth_shrink import FIRST_SPECIAL, IMAGE

BATCH = 2
LENGTH = 64
FIRST_WORD = FIRST_SPECIAL + 40
SAMPLES = 16000
FRAMES = 64

_MEL_FIRST = ("qwen2_audio_encoder", "voxtral_encoder", "moss_transcribe_diarize_audio", "glmasr_encoder")
_BINS = ("feature_projection_input_dim", "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel")
CLASSES = ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION")


def parameters_of(model: nn.Module) -> set[str]:
    """Return the names that a model's forward takes."""
    return set(inspect.signature(type(model).forward).parameters)


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """Return the first of the fields that a configuration, or one nested in it, has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None and (value := _first(inner, names, None)) is not None:
            return value
    return default


def _side(value: Any) -> tuple[int, int]:
    if isinstance(value, Mapping):
        value = [value.get("height", IMAGE), value.get("width", IMAGE)]
    if isinstance(value, (list, tuple)):
        return (int(value[-2] if len(value) > 1 else value[0]), int(value[-1]))
    return int(value), int(value)


class Inputs:
    """The inputs of one model.

    Parameters
    ----------
    model : Module
        A model of transformers.
    head : str
        The mapping that it comes from, such as "CAUSAL_LM".
    """

    def __init__(self, model: Any, head: str) -> None:
        self.model, self.head, self.config = model, head, model.config
        self.names = parameters_of(model)
        self.generator = torch.Generator().manual_seed(1)

    # Parts

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    @property
    def vision(self) -> Any:
        for name in ("vision_config", "image_config", "vision_encoder_config", "vit_config", "image_encoder_config"):
            if getattr(self.config, name, None) is not None:
                return getattr(self.config, name)
        return self.config

    @property
    def text(self) -> Any:
        return self.config.get_text_config(decoder=False) if hasattr(self.config, "get_text_config") else self.config

    def vocabulary(self, decoder: bool = False) -> int:
        config = self.config.get_text_config(decoder=decoder)
        return int(_first(config, ("vocab_size", "text_vocab_size"), None) or _first(self.config, ("vocab_size",), 384))

    def words(self, length: int = LENGTH, decoder: bool = False) -> Tensor:
        last = self.vocabulary(decoder)
        positions = int(_first(self.text, ("max_position_embeddings",), length))
        length = min(length, positions) if positions > 0 else length
        return self.integers(min(FIRST_WORD, last // 2), last, BATCH, length)

    def pixels(self) -> Tensor:
        channels = int(_first(self.vision, ("num_channels", "in_channels", "in_chans"), 3))
        size = _side(_first(self.vision, ("image_size", "input_size", "img_size"), IMAGE))
        frames = _first(self.vision, ("num_frames", "frames_per_clip"), None)
        if self.head == "VIDEO_CLASSIFICATION" or self.config.model_type in ("xclip", "videoprism"):
            return self.normal(BATCH, int(frames or 8), channels, *size)
        return self.normal(BATCH, channels, *size)

    def grids(self) -> dict[str, Tensor]:
        """Return images of 8 x 8 patches in a row, with their grids, as Qwen2-VL and its like take them."""
        vision = self.vision
        patch = int(_first(vision, ("patch_size", "spatial_patch_size"), 8))
        depth = int(getattr(vision, "temporal_patch_size", 1) or 1)
        channels = int(_first(vision, ("in_channels", "in_chans", "num_channels"), 3))
        pixels = self.normal(BATCH * 64, channels * depth * patch * patch)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 8]] * BATCH)}

    def audio_features(self) -> Tensor:
        bins = int(_first(self.config, _BINS, 32))
        positions = _first(self.config, ("max_source_positions",), None)
        if self.model.main_input_name == "input_features" and positions is not None and "whisper" in self.kind():
            return self.normal(BATCH, bins, 2 * int(positions))
        name = type(self.model).__name__
        if "Encoder" in name and positions is not None and self.config.model_type in _MEL_FIRST:
            return self.normal(BATCH, bins, 2 * int(positions))
        return self.normal(BATCH, FRAMES, bins)

    def kind(self) -> str:
        return " ".join([self.config.model_type, *(getattr(self.config, n).model_type for n in self.nested())])

    def nested(self) -> list[str]:
        return [name for name in getattr(self.config, "sub_configs", {}) if getattr(self.config, name, None)]

    # All

    def labels(self, words: Tensor | None, mask: Tensor | None) -> Any:
        """Return the labels of a head, or None where its loss is taken of its outputs."""
        if self.head in CLASSES:
            return self.integers(0, int(self.config.num_labels), BATCH)
        if self.head == "TOKEN_CLASSIFICATION":
            return self.integers(0, int(self.config.num_labels), BATCH, LENGTH)
        if self.head == "CTC":
            return self.integers(1, self.vocabulary(), BATCH, 6)
        if self.head == "SEMANTIC_SEGMENTATION":
            return self.integers(0, int(self.config.num_labels), BATCH, *_side(IMAGE))
        if self.head == "MULTIPLE_CHOICE":
            return self.integers(0, 2, BATCH)
        if words is None:
            return None
        labels = words.clone()
        if mask is not None and mask.shape == labels.shape:
            labels[mask == 0] = -100
        return labels

    def make(self) -> dict[str, Any]:
        """Return everything that the model's forward can take and does not make itself."""
        found: dict[str, Any] = {}
        words = mask = None
        if "input_ids" in self.names and not self.speech():
            words = self.words()
            mask = torch.ones_like(words)
            mask[-1, words.shape[1] * 3 // 4 :] = 0
            found["input_ids"] = words
            if "attention_mask" in self.names:
                found["attention_mask"] = mask
        found.update(self.images())
        found.update(self.sounds())
        if "image_sizes" in self.names and "pixel_values" in found and self.config.model_type != "llava":
            found["image_sizes"] = torch.tensor([list(_side(IMAGE))] * BATCH)
        if (token := self.image_token()) is not None and "pixel_values" in found and words is not None:
            words, mask = self.with_image_tokens(token, found)
            found["input_ids"] = words
            if "attention_mask" in self.names:
                found["attention_mask"] = mask
            for name in ("mm_token_type_ids", "token_type_ids"):
                if name in self.names:
                    found[name] = (words == token).long()
        if "decoder_input_ids" in self.names and "labels" not in self.names:
            found["decoder_input_ids"] = self.words(decoder=True)
        if "bbox" in self.names and words is not None:
            corners = self.integers(0, 100, *words.shape, 2)
            found["bbox"] = torch.cat([corners, corners + 50], -1).clamp(max=200)
        if self.head == "MULTIPLE_CHOICE":
            found = {name: torch.stack([value, value.roll(1, 0)], 1) for name, value in found.items()}
        if self.head == "QUESTION_ANSWERING" and "start_positions" in self.names:
            found["start_positions"] = self.integers(0, 16, BATCH)
            found["end_positions"] = self.integers(16, 32, BATCH)
        found.update(self.targets(words, mask))
        if "return_loss" in self.names and self.head == "ZERO_SHOT_IMAGE_CLASSIFICATION":
            found["return_loss"] = True
        found.update(self.series())
        return found

    def series(self) -> dict[str, Any]:
        """Return a time series, where the model takes one."""
        if "past_values" not in self.names:
            return {}
        channels = getattr(self.config, "num_input_channels", None)
        past = int(getattr(self.config, "context_length", None) or 64)
        if channels is not None:
            found = {"past_values": self.normal(BATCH, past, int(channels))}
            if self.head.endswith("CLASSIFICATION"):
                found["target_values"] = self.integers(0, 2, BATCH)
            return found
        if "past_time_features" not in self.names:
            return {"past_values": [self.normal(past) for _ in range(BATCH)]}
        lags, ahead = max(self.config.lags_sequence), self.config.prediction_length
        features = int(self.config.num_time_features)
        return {
            "past_values": self.normal(BATCH, past + lags),
            "past_time_features": self.normal(BATCH, past + lags, features),
            "past_observed_mask": torch.ones(BATCH, past + lags),
            "future_values": self.normal(BATCH, ahead),
            "future_time_features": self.normal(BATCH, ahead, features),
        }

    def targets(self, words: Tensor | None, mask: Tensor | None) -> dict[str, Any]:
        if "labels" not in self.names or self.head in ("MODEL", "OBJECT_DETECTION", "MASK_GENERATION"):
            return {}
        decoder = "decoder_input_ids" in self.names
        if decoder and (words is None or self.head in ("SEQ_TO_SEQ_CAUSAL_LM", "PRETRAINING", "MODEL")):
            return {"labels": self.words(LENGTH // 2, decoder=True)}
        found = {"labels": self.labels(words, mask)}
        for name in ("next_sentence_label", "sentence_order_label"):
            if name in self.names:
                found[name] = self.integers(0, 2, BATCH)
        return {} if found["labels"] is None else found

    def speech(self) -> bool:
        return self.model.main_input_name in ("input_features", "input_values") and self.head in (
            "SPEECH_SEQ_2_SEQ",
            "CTC",
            "AUDIO_CLASSIFICATION",
        )

    def images(self) -> dict[str, Any]:
        if {"hidden_states", "grid_thw"} <= self.names:
            found = self.grids()
            return {"hidden_states": found["pixel_values"], "grid_thw": found["image_grid_thw"]}
        if "vision_config" in getattr(self.config, "sub_configs", {}) and self.config.vision_config is None:
            return {}
        if "pixel_values" not in self.names:
            return {"pixel_values_videos": self.pixels()} if "pixel_values_videos" in self.names else {}
        if "image_grid_thw" in self.names or "grid_thw" in self.names:
            found = self.grids()
            if "grid_thw" in self.names:
                found["grid_thw"] = found.pop("image_grid_thw")
            return found
        pixels = self.pixels()
        # One image a row, which may have several.
        return {"pixel_values": pixels[:, None] if "pixel_attention_mask" in self.names else pixels}

    def sounds(self) -> dict[str, Any]:
        if "input_features" in self.names and self.model.main_input_name != "input_ids":
            return {"input_features": self.audio_features()}
        if "input_values" in self.names and self.model.main_input_name != "input_ids":
            length = getattr(self.config, "max_length", None)
            if self.config.model_type == "audio-spectrogram-transformer" and length:
                return {"input_values": self.normal(BATCH, int(length), int(self.config.num_mel_bins))}
            return {"input_values": self.normal(BATCH, SAMPLES)}
        return {}

    def image_token(self) -> int | None:
        for name in ("image_token_id", "image_token_index", "media_token_id", "im_patch_id"):
            value = getattr(self.config, name, None)
            if value is not None:
                return int(value)
        return None

    def with_image_tokens(self, token: int, found: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return words with as many image tokens among them as the model has features of an image."""
        count = 0
        taker = next(
            (m for m in (self.model, getattr(self.model, "model", None)) if hasattr(m, "get_image_features")), None
        )
        if taker is not None:
            taken = {n: v for n, v in found.items() if n in inspect.signature(taker.get_image_features).parameters}
            with torch.no_grad():
                features = taker.get_image_features(**taken)
            features = getattr(features, "pooler_output", features)
            parts = [features] if isinstance(features, Tensor) else list(features)
            count = sum(part.numel() // part.shape[-1] for part in parts) // BATCH
        words = self.words(LENGTH + count)
        words[:, 4 : 4 + count] = token
        mask = torch.ones_like(words)
        mask[-1, -(LENGTH // 4) :] = 0
        return words, mask
