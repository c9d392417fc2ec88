"""Models and batches for an estimate: from a name or a file, never by download. Runs in the child process."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PyactcompError
from .sending import receive

_SEQ = 1024
_CHANNELS = 3
_SIDE = 224  # of ImageNet's pictures, for a configuration that names no size, as ResNet's and SegFormer's


@dataclass(frozen=True)
class Program:
    """A model on the device, its batch, and the function of both that gives the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]
    seq: int | None


Build = Callable[[int, "int | None", "torch.dtype | None"], Program]


def builder(model: str | bytes) -> Build:
    """Return the function of batch, sequence length and dtype that builds a program.

    A model that was sent with its batch has that batch alone.

    Raises
    ------
    PyactcompError
        If the model cannot be found; the error names the missing file.
    """
    if isinstance(model, bytes):
        received, values, loss = receive(model)
        values = _on_device(values)
        program = Program(received, _loss_of(received, values, loss), _tensors(values), None)
        return lambda batch, seq, dtype: program
    kind, _, rest = model.partition(":")
    if kind == "timm" and rest:
        return _of_timm(rest)
    if rest:
        return _of_function(_function(kind, rest))
    return _of_config(_config(model))


def _function(where: str, name: str) -> Callable[..., Any]:
    if where.endswith(".py"):
        path = Path(where).resolve()
        if not path.exists():
            raise PyactcompError(f"there is no file {where}: MODEL is file.py:function")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.parent))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise PyactcompError(f"there is no module {where!r} ({error}): MODEL is module:function") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise PyactcompError(f"{where} has no function {name!r}: give one that returns a model and a batch")
    return found  # type: ignore[no-any-return]


def _of_function(function: Callable[..., Any]) -> Build:
    name, takes = getattr(function, "__name__", str(function)), inspect.signature(function).parameters
    if "batch" not in takes:
        raise PyactcompError(f"the function {name} takes the number of samples, as batch; it takes {tuple(takes)}")

    def build(batch: int, seq: int | None, dtype: torch.dtype | None) -> Program:
        if seq is not None and "seq" not in takes:
            raise PyactcompError(f"the function {name} takes no seq, and seq={seq} was given")
        made = function(batch=batch) if seq is None else function(batch=batch, seq=seq)
        if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
            raise PyactcompError(
                f"the function {name} returns (model, batch) or (model, batch, loss); it returned {type(made).__name__}"
            )
        model = made[0].to("cuda")
        if dtype is not None:
            model = model.to(dtype)
        values = _on_device(made[1])
        criterion = made[2] if len(made) == 3 else None
        return Program(model, _loss_of(model, values, criterion), _tensors(values), seq)

    return build


def _on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("cuda")
    if isinstance(value, Mapping):
        return {key: _on_device(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_on_device(each) for each in value)
    return value


def _tensors(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    each = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return tuple(tensor for part in each for tensor in _tensors(part))


def _loss_of(model: nn.Module, values: Any, criterion: Callable[..., Any] | None) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        if isinstance(values, Mapping):
            out = model(**values)
        elif isinstance(values, tuple):
            out = model(*values)
        else:
            out = model(values)
        if criterion is not None:
            out = criterion(out, values) if _takes_batch(criterion) else criterion(out)
        elif isinstance(out, Mapping) and "loss" in out:
            out = out["loss"]
        elif hasattr(out, "loss"):
            out = out.loss
        if not (isinstance(out, Tensor) and out.numel() == 1):
            shape = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise PyactcompError(f"the model returns {shape}, not a loss: return (model, batch, loss)")
        return out

    return loss


def _takes_batch(criterion: Callable[..., Any]) -> bool:
    """Return whether a loss takes the batch beside the output."""
    try:
        return len(inspect.signature(criterion).parameters) > 1
    except ValueError:  # of torch's functions, some tell no parameters
        return False


def _of_timm(name: str) -> Build:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise PyactcompError(f"timm is not installed ({error}): pip install timm") from None
    if not timm.is_model(name):
        raise PyactcompError(f"timm has no model {name!r}; timm.list_models() names all")

    def build(batch: int, seq: int | None, dtype: torch.dtype | None) -> Program:
        with torch.device("cuda"):
            model: nn.Module = timm.create_model(name)
            if dtype is not None:
                model = model.to(dtype)
            channels, height, width = timm.data.resolve_model_data_config(model)["input_size"]
            images = torch.randn(batch, channels, height, width, dtype=dtype or torch.float32)
            labels = torch.zeros(batch, dtype=torch.int64)
        return Program(
            model, lambda: nn.functional.cross_entropy(model(images).float(), labels), (images, labels), None
        )

    return build


def _config(name: str) -> Any:
    """Return a configuration of transformers: of a file, a folder, a class by its model type, or one in the cache."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise PyactcompError(
            f"transformers is not installed ({error}), and {name!r} is no module:function, file.py:function or "
            "timm:NAME: pip install transformers"
        ) from None
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        if not path.exists():
            raise PyactcompError(f"there is no file {path}")
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise PyactcompError(f"{path} is not JSON: {error}") from None
        kind = values.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            raise PyactcompError(f"{path} has model_type {kind!r}, which transformers does not know")
        return transformers.CONFIG_MAPPING[kind](**values)
    if name in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[name]()
    cached = transformers.utils.cached_file(
        name,
        "config.json",
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if cached is None:
        raise PyactcompError(
            f"{name!r} is no model type of transformers, and its config.json is not in the cache of Hugging Face. "
            "Nothing is downloaded: save the config.json and give its path"
        )
    return _config(cached)


def _length(config: Any, seq: int | None) -> int:
    """Return the tokens of a sequence, no more than the model has positions."""
    most = getattr(config, "max_position_embeddings", None) or -1
    if most < 0:  # the positions are relative, or the model is recurrent
        most = sys.maxsize
    if seq is not None and seq > most:
        raise PyactcompError(f"the model has {most} positions; got --seq {seq}")
    return seq or min(_SEQ, most)


def _class_of(config: Any) -> tuple[Any, str]:
    """Return transformers' automatic class for a configuration, and the kind of its batch: tokens, images."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    kinds = (
        ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", "tokens"),
        ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "tokens"),
        ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", "tokens"),
        ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "images"),
    )
    # The look-up imports the model's module: here once, and not in each fork.
    served = [
        (name, kind) for name, mapping, kind in kinds if getattr(auto, mapping).get(type(config), None) is not None
    ]
    # Encoders have a head for generation too: without a name of the head, a masked model is one.
    named = " ".join(getattr(config, "architectures", None) or ())
    if "MaskedLM" in named or not named:
        served.sort(key=lambda each: each[0] != "AutoModelForMaskedLM")
    if not served:
        raise PyactcompError(
            f"{type(config).__name__} is no language model or image classifier: give a function that builds the model "
            "and a batch (module:function)"
        )
    return getattr(importlib.import_module("transformers"), served[0][0]), served[0][1]


def _image_of(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of a classifier's images; of CLIP and its kin, the part for images has them."""
    part = getattr(config, "vision_config", None) or config
    channels = getattr(part, "num_channels", None) or _CHANNELS
    side = getattr(part, "image_size", None) or _SIDE
    height, width = (side, side) if isinstance(side, int) else side
    return channels, height, width


def _of_config(config: Any) -> Build:
    auto, kind = _class_of(config)
    config.use_cache = False
    for name in ("pad_token_id", "decoder_start_token_id"):
        if kind == "tokens" and getattr(config, "is_encoder_decoder", False) and getattr(config, name, None) is None:
            setattr(config, name, 0)

    def build(batch: int, seq: int | None, dtype: torch.dtype | None) -> Program:
        length = _length(config, seq) if kind == "tokens" else None
        with torch.device("cuda"):
            model: nn.Module = auto.from_config(config, dtype=dtype or torch.float32)
            if length is not None:
                tokens = torch.zeros(batch, length, dtype=torch.int64)
                values = {"input_ids": tokens, "labels": torch.zeros_like(tokens)}
            else:
                images = torch.randn(batch, *_image_of(config), dtype=dtype or torch.float32)
                values = {"pixel_values": images, "labels": torch.zeros(batch, dtype=torch.int64)}
        return Program(model, _loss_of(model, values, None), tuple(values.values()), length)

    return build
