"""Pairs of an architecture and a head, each a tiny model with inputs and one scalar loss."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIBRARIES = ("transformers", "diffusers", "torch_geometric")
_SKIPPED_OUTPUTS = frozenset({"past_key_values", "hidden_states", "attentions", "decoder_hidden_states",
    "encoder_hidden_states", "decoder_attentions", "encoder_attentions", "cross_attentions", "cache_params",
    "encoder_last_hidden_state", "router_logits", "image_hidden_states"})  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """An architecture of a library with one head."""

    library: str
    architecture: str
    head: str

    def __str__(self) -> str:
        return f"{self.library}/{self.architecture}/{self.head}"


def _module(library: str) -> Any:
    return importlib.import_module(f"{__package__}.breadth_{library.removeprefix('torch_')}")


def pairs(libraries: Iterable[str] = LIBRARIES) -> list[Pair]:
    """Return all pairs of the libraries that are installed, library by library."""
    found = [library for library in libraries if find_spec(library) is not None]
    return [Pair(library, *names) for library in found for names in _module(library).pairs()]


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of an output that a loss can be taken of."""
    if isinstance(output, Tensor):
        if output.requires_grad and (output.is_floating_point() or output.is_complex()):
            yield torch.view_as_real(output) if output.is_complex() else output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name not in _SKIPPED_OUTPUTS:
                yield from tensors_of(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors_of(value)
    elif hasattr(output, "__dataclass_fields__"):
        yield from tensors_of({name: getattr(output, name) for name in output.__dataclass_fields__})


class Step(nn.Module):
    """A model, its inputs and its loss in one forward: the model's own, or the distance of its outputs to noise.

    ``own_loss`` says which it was in the last forward.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.own_loss = False

    def forward(self) -> Tensor:
        # Inputs that a model writes to must not reach the next step.
        inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.inputs.items()}
        output = self.model(**inputs)
        loss = getattr(output, "loss", None)
        self.own_loss = isinstance(loss, Tensor) and loss.grad_fn is not None
        if self.own_loss:
            return loss.sum()
        terms = []
        for number, tensor in enumerate(tensors_of(output)):
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
            terms.append(F.mse_loss(tensor, noise.to(tensor.dtype)))
        if not terms:
            raise ValueError("no output requires grad")
        return torch.stack([term.float() for term in terms]).sum()


def _alive(model: nn.Module) -> None:
    """Give parameters that start as nothing a value: behind a zero all gradients are zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            largest = float(parameter.abs().max())
            if parameter.dim() >= 2 and largest == 0:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
            elif 0 < largest < 0.01 and float(parameter.min()) == float(parameter.max()):
                parameter.fill_(0.1)  # the scale of a branch, as ConvNeXt has it
            elif not largest < float("inf"):
                raise ValueError(f"{name} is not finite")


def build(pair: Pair, dropout: float) -> Step:
    """Return a tiny training step of a pair, in training mode, from the same weights whatever the dropout."""
    torch.manual_seed(0)
    model, inputs = _module(pair.library).build(pair.architecture, pair.head, dropout)
    _alive(model)
    return Step(model, inputs).train()
