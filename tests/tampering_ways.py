"""What programs do with a part of a model: look at it, change it, replace it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from pyactcomp.fusions.fusion import original_of

# No weight and no gradient has this factor by chance, and every dtype multiplies by it exactly or nearly so.
FACTOR = 1.25
Seen = list[tuple[str, Tensor]]


def note(seen: Seen, what: str, *values: Any) -> None:
    seen += [(what, value.detach().clone()) for value in values if isinstance(value, Tensor)]


def first(out: Any) -> Tensor:
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def scaled(out: Any) -> Any:
    return (out[0] * FACTOR, *out[1:]) if isinstance(out, tuple) else out * FACTOR


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight, scaled."""
        return weight * FACTOR


class Around(nn.Module):
    """A module in the place of another, which it calls."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scaled output."""
        return scaled(self.part(*args, **kwargs))


# Each way: (model, name of a part, what a hook sees, what to undo afterwards) -> None.


def look(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    part = model.get_submodule(name)
    part.register_forward_pre_hook(lambda _, args, named: note(seen, "in", *args, *named.values()), with_kwargs=True)
    part.register_forward_hook(lambda _, args, out: note(seen, "out", first(out)))


def look_at_gradients(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    model.get_submodule(name).register_full_backward_hook(lambda _, grads, out: note(seen, "grad", *out))


def look_at_a_gradient_of_the_output(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    def hook(part: nn.Module, args: Any, out: Any) -> None:
        first(out).register_hook(lambda grad: note(seen, "grad", grad))

    model.get_submodule(name).register_forward_hook(hook)


def look_at_all_modules(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    part = model.get_submodule(name)

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        if module is part:
            note(seen, "out", first(out))

    undo.callback(all_modules.register_module_forward_hook(hook).remove)


def change_the_input(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    def change(part: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (args[0] * FACTOR, *args[1:]), named
        return args, named | {"hidden_states": named["hidden_states"] * FACTOR}

    model.get_submodule(name).register_forward_pre_hook(change, with_kwargs=True)


def change_the_output(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    model.get_submodule(name).register_forward_hook(lambda _, args, out: scaled(out))


def change_the_gradient(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    def change(part: nn.Module, grads: Any) -> Any:
        return tuple(None if grad is None else grad * FACTOR for grad in grads)

    model.get_submodule(name).register_full_backward_pre_hook(change)


def give_another_forward(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    part: Any = model.get_submodule(name)
    own = part.forward
    part.forward = lambda *args, **named: scaled(own(*args, **named))


def give_a_derived_class(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    part = model.get_submodule(name)

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return scaled(super(Derived, self).forward(*args, **named))

    Derived = type(type(part).__name__, (type(part),), {"forward": forward})
    part.__class__ = Derived


def give_the_class_another_forward(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    patch = undo.enter_context(pytest.MonkeyPatch.context())
    cls: Any = original_of(type(model.get_submodule(name)))
    own = cls.forward
    patch.setattr(cls, "forward", lambda self, *args, **named: scaled(own(self, *args, **named)))


def put_a_module_around(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, Around(model.get_submodule(name)))


def parametrize(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    for part in model.get_submodule(name).modules():
        if isinstance(part._parameters.get("weight"), nn.Parameter):
            nn.utils.parametrize.register_parametrization(part, "weight", Scaled())


def evaluate(model: nn.Module, name: str, seen: Seen, undo: ExitStack) -> None:
    model.get_submodule(name).eval()


WAYS = [
    look,
    look_at_gradients,
    look_at_a_gradient_of_the_output,
    look_at_all_modules,
    change_the_input,
    change_the_output,
    change_the_gradient,
    give_another_forward,
    give_a_derived_class,
    give_the_class_another_forward,
    put_a_module_around,
    parametrize,
    evaluate,
]
