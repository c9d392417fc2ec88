"""The state of a training before a step, to put back after a failed one: what a step changes, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from .failures import gpu_in_use


class HasState(Protocol):
    """A scheduler, a GradScaler, an average of weights: what ``state_dict`` returns, ``load_state_dict`` takes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take a state."""


class RandomState:
    """Generators of torch, of Python, and of NumPy where the program uses it."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if gpu_in_use() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def put_back(self) -> None:
        """Set all generators back."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Others:
    """The state of objects besides model and optimizer."""

    def __init__(self, objects: Iterable[HasState]) -> None:
        self._saved = [(each, copy.deepcopy(each.state_dict())) for each in objects]

    def put_back(self) -> None:
        """Give each object its state back."""
        for each, saved in self._saved:
            if isinstance(each, GradScaler) and saved:
                # An update ends the step for the scaler: a failed one may have unscaled gradients and gone no further.
                # A scaler that has scaled nothing yet asserts here, and has no step to end.
                with contextlib.suppress(AssertionError):
                    each.update(saved["scale"])
            each.load_state_dict(copy.deepcopy(saved))


class Buffers:
    """A model's buffers, such as the statistics of batch norms, in copies on their device."""

    def __init__(self, model: Module) -> None:
        self._saved = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def put_back(self) -> None:
        """Write the values back into the same tensors."""
        with torch.no_grad():
            for module, name, buffer, value in self._saved:
                buffer.copy_(value)
                module._buffers[name] = buffer


class Gradients:
    """A model's gradients, in copies on the host."""

    def __init__(self, model: Module) -> None:
        self._saved = [(p, p.grad, None if p.grad is None else _on_host(p.grad)) for p in model.parameters()]

    def put_back(self) -> None:
        """Write the values back into the same tensors; gradients made since are dropped."""
        with torch.no_grad():
            for parameter, grad, value in self._saved:
                parameter.grad = grad
                if grad is not None and value is not None:
                    grad.copy_(value)


class Weights:
    """A model's parameters and gradients, and its optimizer's state, in copies on the host."""

    def __init__(self, model: Module, optimizer: Optimizer | None) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        parameters = {id(p): p for p in (*model.parameters(), *(p for group in groups for p in group["params"]))}
        self._parameters = [
            (p, _on_host(p), p.grad, None if p.grad is None else _on_host(p.grad)) for p in parameters.values()
        ]
        self._optimizer = optimizer
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups
        ]
        self._state = {} if optimizer is None else {p: _saved(state) for p, state in optimizer.state.items()}

    def put_back(self) -> None:
        """Write the values back into the same tensors; states and gradients made since are dropped."""
        with torch.no_grad():
            for parameter, value, grad, grad_value in self._parameters:
                parameter.copy_(value)
                parameter.grad = grad
                if grad is not None and grad_value is not None:
                    grad.copy_(grad_value)
            if self._optimizer is None:
                return
            for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
                for key in [key for key in group if key != "params" and key not in options]:
                    del group[key]
                group.update(copy.deepcopy(options))
            for parameter in [each for each in self._optimizer.state if each not in self._state]:
                del self._optimizer.state[parameter]
            for parameter, saved in self._state.items():
                self._optimizer.state[parameter] = _restored(saved)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _saved(value: Any) -> Any:
    """Return a copy of a state: each tensor with a copy on the host, so that it can be written back in place."""
    if isinstance(value, Tensor):
        return _Copied(value)
    if isinstance(value, dict):
        return {key: _saved(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_saved(each) for each in value])
    return copy.deepcopy(value)


def _restored(value: Any) -> Any:
    if isinstance(value, _Copied):
        value.tensor.copy_(value.value)
        return value.tensor
    if isinstance(value, dict):
        return {key: _restored(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_restored(each) for each in value])
    return copy.deepcopy(value)


class _Copied:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.value = _on_host(tensor)
