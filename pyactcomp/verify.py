"""One exact and one compressed step from the same state, compared gradient by gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .compress import Compressed, fused_by, paused, session_of
from .config import Config
from .errors import PyactcompError


@dataclass(frozen=True)
class Verification:
    """How far compressed gradients are from exact ones.

    Attributes
    ----------
    error : float
        Relative L2 error over all gradients together: ``|compressed - exact| / |exact|``.
    errors : dict of str to float
        The same for each parameter; infinite where only the exact gradient is zero.
    worst : str
        Name of the parameter with the largest error; empty if no parameter has a gradient.
    loss_exact, loss_compressed : float
        The two losses; the forward computes the same, so they differ by less than its own noise.
    """

    error: float
    errors: dict[str, float]
    worst: str
    loss_exact: float
    loss_compressed: float

    def __str__(self) -> str:
        lines = [f"gradients: relative error {self.error:.3%} over all {len(self.errors)} parameters"]
        for name in sorted(self.errors, key=lambda name: -self.errors[name])[:5]:
            lines.append(f"  {self.errors[name]:.3%}  {name}")
        lines.append(f"loss: exact {self.loss_exact:.6g}, compressed {self.loss_compressed:.6g}")
        return "\n".join(lines)


def verify(model: Module, batch: Any, loss_fn: Callable[[Any], Tensor], **options: Any) -> Verification:
    """Compare the gradients of a compressed step with those of an exact one.

    Parameters
    ----------
    model : Module
        Compressed or not; parameters, their ``.grad``, buffers, hooks and mode are left as they were, and so are
        torch's random generators.
    batch : mapping, tuple, list or anything else
        Passed to the model as keyword arguments, positional arguments or the one argument.
    loss_fn : callable
        Takes the model's output, returns a scalar loss; targets come in by closure, as in
        ``lambda output: F.cross_entropy(output, target)`` or ``lambda output: output.loss``.
    **options
        The fields of :class:`Config`; by default those the model was compressed with.

    Returns
    -------
    Verification
        Plain data that prints as a few lines.

    Raises
    ------
    TypeError, ValueError
        For a wrong option, or a loss that is no scalar tensor with a graph.

    Notes
    -----
    Uses ``torch.autograd.grad``, so that no ``.grad`` is touched and no optimizer or reduction that hangs on
    accumulation runs; reentrant checkpointing does not support that and raises torch's own error. Call it inside
    ``torch.autocast`` to verify a step under autocast.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> v = pyactcomp.verify(model, torch.randn(1024, 256), lambda y: y.square().mean())
    >>> v.error < 0.02
    True
    """
    if not isinstance(model, Module):
        raise TypeError(f"verify expects a torch.nn.Module, got {type(model).__name__}")
    config = _config(model, options)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with paused(model), _state_kept(model):
        loss_exact, exact = _gradients(model, batch, loss_fn, parameters)
    hooks = Compressed(model, **{**vars(config), "fuse": False, "fuse_head": False})
    with paused(model), _state_kept(model), fused_by(model, config), hooks:
        loss_compressed, compressed = _gradients(model, batch, loss_fn, parameters)

    errors: dict[str, float] = {}
    squared_difference = squared_norm = 0.0
    for name, reference in exact.items():
        difference = float((compressed[name].double() - reference.double()).norm())
        norm = float(reference.double().norm())
        errors[name] = _ratio(difference, norm)
        squared_difference += difference**2
        squared_norm += norm**2
    return Verification(
        error=_ratio(squared_difference**0.5, squared_norm**0.5),
        errors=errors,
        worst=max(errors, key=lambda name: errors[name], default=""),
        loss_exact=loss_exact,
        loss_compressed=loss_compressed,
    )


def _config(model: Module, options: dict[str, Any]) -> Config:
    if options:
        return Config(**options)
    try:
        return session_of(model).config
    except PyactcompError:
        return Config()


def _ratio(difference: float, norm: float) -> float:
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def _gradients(
    model: Module, batch: Any, loss_fn: Callable[[Any], Tensor], parameters: dict[str, torch.nn.Parameter]
) -> tuple[float, dict[str, Tensor]]:
    with torch.enable_grad():
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        loss = loss_fn(output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return a scalar tensor, got {got}")
    if not parameters:
        return float(loss.detach()), {}
    if loss.grad_fn is None:
        raise ValueError("the loss does not depend on any parameter that requires grad")
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return float(loss.detach()), found


@contextmanager
def _state_kept(model: Module) -> Iterator[None]:
    """Put buffers and torch's random generators back as they were."""
    devices = sorted({t.get_device() for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"})
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, copy in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(copy)
