"""Compares the gradients of a compressed step with the gradients of an exact step from the same state."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ..compress import Compressed, fused_by, paused
from ..config import Config, Former, Options, warn_of_former
from ..engine.record import is_compiled
from ..errors import PyactcompError, check_integer
from ..model_hooks import session_of
from .checked import Checked
from .noise import rounded_again
from .state import State, state_of
from .verification import Look, Verification

if TYPE_CHECKING:
    from typing_extensions import Unpack

MakeOptimizer = Callable[[list[Parameter]], Optimizer]
_CLEAR = "\r\x1b[K"


def verify(
    model: Module,
    batch: Any,
    loss_fn: Callable[[Any], Tensor],
    *,
    steps: int = 0,
    optimizer: MakeOptimizer | None = None,
    **options: Unpack[Options],
) -> Verification:
    """Compare the gradients of a compressed step with those of an exact one.

    Parameters
    ----------
    model : Module
        Compressed or not; parameters, their ``.grad``, buffers, hooks, mode and torch's random generators are restored.
    batch : mapping, tuple, list or anything else
        Passed to the model as keyword arguments, positional arguments or the one argument. With ``steps``, an iterator
        may give one batch for each step and one for the last comparison.
    loss_fn : callable
        Takes the model's output, returns a scalar loss; targets come in by closure, as in
        ``lambda output: F.cross_entropy(output, target)`` or ``lambda output: output.loss``.
    steps : int
        Number of exact training steps, undone at the end. Gradients are compared before the first step, after 1, 2, 4,
        8, ... steps and after the last: the error in one state says little about later states. Progress shows on a
        terminal after two seconds.
    optimizer : callable, optional
        Maps a list of parameters to the optimizer for ``steps``; by default AdamW with a learning rate of 0.001.
    **options
        As in :func:`compress`; by default the options of this model.

    Returns
    -------
    Verification
        Plain data that prints as a few lines: the comparison with the largest error, and the history of all.

    Raises
    ------
    TypeError, ValueError
        For a wrong option, a loss other than a scalar tensor with a graph, or a loss that becomes infinite or NaN.
    PyactcompError
        If backward would restore other values than autograd saved: a tensor was written to through ``.data``.

    Notes
    -----
    Each comparison takes three steps: an exact step, a step in lossless mode, and a step with the given options. The
    lossless step compares each restored tensor with the tensor saved by autograd. If tensors have 16 bits, a fourth
    step, exact again, rounds the layers' results once more (:mod:`.noise`): an error below that noise is no harm to a
    training that the noise does not harm.

    Uses ``torch.autograd.grad``, so no ``.grad`` changes and no hook on gradient accumulation (an optimizer in
    backward, DDP's reduction) runs. Reentrant checkpointing does not support ``torch.autograd.grad`` and raises
    torch's own error. Call ``verify`` inside ``torch.autocast`` to verify a step under autocast.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> v = pyactcomp.verify(model, torch.randn(1024, 256), lambda y: y.square().mean(), steps=5)
    >>> v.error < 0.02
    True
    >>> [look.step for look in v.history]
    [0, 1, 2, 4, 5]
    """
    if not isinstance(model, Module):
        raise TypeError(f"verify expects a torch.nn.Module, got {type(model).__name__}")
    check_integer("steps", steps, 2**31)
    if optimizer is not None and not steps:
        raise ValueError("optimizer is for the training between looks: pass steps=... as well")
    warn_of_former("verify", {name: value for name, value in options.items() if name in Former.__annotations__})
    config = _config(model, options)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not steps:
        found, state = _look(model, batch, loss_fn, parameters, config)
        history: tuple[Look, ...] = (Look(0, found.loss_exact, found.error, found.noise),)
    else:
        found, state, history = _look_while_training(
            model, batch, loss_fn, parameters, config, steps, optimizer or _adamw
        )
    return replace(found, notes=() if config.mode == "lossless" else _notes(state, history), history=history)


def _adamw(parameters: list[Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _look(
    model: Module, batch: Any, loss_fn: Callable[[Any], Tensor], parameters: dict[str, Parameter], config: Config
) -> tuple[Verification, State]:
    """Compare in the current state of the model."""

    def compressed_by(config: Config, hooks: Compressed) -> tuple[Tensor, dict[str, Tensor]]:
        with paused(model), _state_kept(model), fused_by(model, config), hooks:
            loss = _loss(model, batch, loss_fn)
            return loss.detach(), _gradients(loss, parameters)

    with paused(model), _state_kept(model):
        loss = _loss(model, batch, loss_fn)
        state = state_of(loss)
        exact = _gradients(loss, parameters)
        loss_exact = float(loss.detach())
        del loss
    lossless = replace(config, mode="lossless", fuse_head=False)
    checked = Checked(model, replace(lossless, fuse=False))
    loss_compressed, compressed = compressed_by(lossless, checked)
    noise = None
    if config.mode != "lossless":
        del compressed
        hooks = Compressed(model, replace(config, fuse=False, fuse_head=False))
        loss_compressed, compressed = compressed_by(config, hooks)
        # Not of a compiled model: new hooks would compile it anew.
        if checked.session.rounding and not any(map(is_compiled, model.modules())):
            with paused(model), _state_kept(model), rounded_again(model):
                noise = _error(_gradients(_loss(model, batch, loss_fn), parameters), exact)

    errors = {name: _error({name: compressed[name]}, {name: reference}) for name, reference in exact.items()}
    found = Verification(
        error=_error(compressed, exact),
        errors=errors,
        columns={name: _worst_column(compressed[name], each) for name, each in exact.items() if each.dim() > 1},
        noise=noise,
        worst=max(errors, key=lambda name: errors[name], default=""),
        loss_exact=loss_exact,
        loss_compressed=float(loss_compressed),
    )
    return found, state


def _look_while_training(
    model: Module,
    batch: Any,
    loss_fn: Callable[[Any], Tensor],
    parameters: dict[str, Parameter],
    config: Config,
    steps: int,
    make_optimizer: MakeOptimizer,
) -> tuple[Verification, State, tuple[Look, ...]]:
    """Compare repeatedly between exact training steps; return the worst comparison, the last state and the history."""
    batches = batch if isinstance(batch, Iterator) else itertools.repeat(batch)
    looks: list[tuple[int, Verification]] = []
    optimizer = make_optimizer(list(parameters.values()))
    with _state_kept(model, parameters.values()), _optimizer_kept(optimizer), _Progress(steps) as progress:
        for step, current in enumerate(itertools.islice(batches, steps + 1)):
            if step.bit_count() <= 1 or step == steps:
                found, state = _look(model, current, loss_fn, parameters, config)
                looks.append((step, found))
            if step == steps:
                break
            with paused(model):
                trained = _loss(model, current, loss_fn)
                gradients = _gradients(trained, parameters)
            loss = float(trained.detach())
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} at step {step}: pass optimizer=... with a lower learning rate")
            for name, parameter in parameters.items():
                parameter.grad = gradients.get(name)
            optimizer.step()
            progress.show(step + 1, loss)
        else:
            raise ValueError(f"{steps} steps need {steps + 1} batches, one more for the last look; they ended early")
    _, worst = max(looks, key=lambda look: look[1].error if math.isfinite(look[1].error) else math.inf)
    return worst, state, tuple(Look(step, look.loss_exact, look.error, look.noise) for step, look in looks)


def _notes(state: State, history: tuple[Look, ...]) -> tuple[str, ...]:
    """Return sentences about the state compared last."""
    steps, loss = history[-1][:2]
    if steps:
        lowest = min(look.loss for look in history)
        notes = [f"verified at {len(history)} states in {steps} steps, at losses down to {lowest:.4g}"]
    else:
        notes = [
            f"verified at one state, where the loss is {loss:.4g}; the error may differ in other states: pass "
            "steps=... to compare again while the model trains"
        ]
    if state.looks_untrained:
        notes.append(
            f"the model looks untrained{' still' if steps else ''}: the entropy of its classes is "
            f"{state.uniformity:.0%} of the largest possible, and the error of a trained model may be larger"
        )
    if state.attention_logit is not None:
        notes.append(
            f"no logit of a fused attention was above {state.attention_logit:.3g}; larger logits amplify the rounding "
            "of queries and keys"
        )
    return tuple(notes)


def _config(model: Module, options: Options) -> Config:
    if options:
        return Config(**options)
    try:
        return session_of(model).config
    except PyactcompError:
        return Config()


def _error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the relative L2 error of all tensors together."""
    difference = sum(float((got[name].double() - each.double()).norm()) ** 2 for name, each in exact.items())
    return _ratio(difference**0.5, sum(float(each.double().norm()) ** 2 for each in exact.values()) ** 0.5)


def _worst_column(got: Tensor, exact: Tensor) -> float:
    """Return the largest relative L2 error of a slice along the second dimension: an input column or channel."""
    sums = tuple(dim for dim in range(exact.dim()) if dim != 1)
    difference, norm = ((t.double() ** 2).sum(sums).sqrt() for t in (got.double() - exact.double(), exact))
    ratios = torch.where(difference == 0, 0.0, difference / norm)
    return float(ratios.max()) if ratios.numel() else 0.0


def _ratio(difference: float, norm: float) -> float:
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm


def _loss(model: Module, batch: Any, loss_fn: Callable[[Any], Tensor]) -> Tensor:
    # Under autocast, the cache holds casts of the parameters from before the last training step.
    torch.clear_autocast_cache()
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
    return loss


def _gradients(loss: Tensor, parameters: dict[str, Parameter]) -> dict[str, Tensor]:
    if not parameters:
        return {}
    if loss.grad_fn is None:
        raise ValueError("the loss does not depend on any parameter that requires grad")
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


@contextmanager
def _state_kept(model: Module, parameters: Collection[Parameter] = ()) -> Iterator[None]:
    """Restore buffers, torch's random generators, and the given parameters with their gradients on exit."""
    devices = sorted({t.get_device() for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"})
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    trained = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    module._buffers[name] = buffer
                    buffer.copy_(value)
                if trained:
                    torch.clear_autocast_cache()
                for parameter, value, gradient in trained:
                    parameter.copy_(value)
                    parameter.grad = gradient


@contextmanager
def _optimizer_kept(optimizer: Optimizer) -> Iterator[None]:
    """Restore the state of an optimizer on exit: the caller may own the optimizer."""
    before = copy.deepcopy(optimizer.state_dict())
    try:
        yield
    finally:
        optimizer.load_state_dict(before)


class _Progress:
    """A progress line on a terminal, shown once the steps take a while and erased at the end."""

    _PATIENCE_S = 2.0

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._begin = time.monotonic()
        self._shown = False

    def __enter__(self) -> _Progress:
        return self

    def show(self, step: int, loss: float) -> None:
        """Show the number of finished steps."""
        if sys.stderr.isatty() and time.monotonic() - self._begin > self._PATIENCE_S:
            self._write(f"{_CLEAR}verify: step {step} of {self._steps}, loss {loss:.4g}")
            self._shown = True

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
