"""Norms that programs write out: recognised by what they compute, however they spell it.

A class of a program's own is a norm if its forward computes and does nothing else (:mod:`.purity`), and gives a norm's
output and gradients for sample inputs. The samples go through a copy of the module with parameters of its own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from ..engine.saved import PLAIN
from ..functional.norms.own_forward import OwnForward
from ..functional.norms.written import norm_by
from ..functional.saving import recorded
from .fusion import Fused, Fusion, codes_for, fused_class, original_of
from .purity import constants, is_pure
from .sharded import local_rows, of_rows

_OF_TORCH = frozenset(vars(Module()))
_SIMPLE = (int, float, bool, str, type(None), torch.dtype)
# Rows of ordinary size, and rows so small that eps counts.
_SCALES = (1.0, 30.0, 0.1, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5)
# The module may compute in float32. An eps that is another number differs by at least a ten-thousandth of itself.
_TOLERANCE = 1e-4


class NormFormula(NamedTuple):
    """What a module computes: ``row * (weight + offset) + bias``, of rows divided by a deviation.

    Attributes
    ----------
    centred : bool
        Whether the mean of a row is subtracted first.
    weight : str
        Name of a parameter.
    bias : str or None
        Name of a parameter, if rows are centred.
    offset : float
    eps : float
        Added to the variance, or to the mean square.
    """

    centred: bool
    weight: str
    bias: str | None
    offset: float
    eps: float

    def of(self, x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of ``x`` by the definition."""
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        out = out * (parameters[self.weight] + self.offset)
        return out if self.bias is None else out + parameters[self.bias]


class WrittenNorm(Fused):
    """A norm over the last dimension in a class of the program's own.

    In float32 the fused functions compute what the class does. In other dtypes the class may round in its own way: its
    own forward gives the output, and the fused functions give codes and gradients.
    """

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return next((p.numel() for p in module._parameters.values() if p is not None), None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Normalise the one argument."""
        # A look-up while torch.compile traces would end the graph.
        known = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and not torch.compiler.is_compiling()
        found = formula_of(self) if known else None
        if found is None:
            return cast(Tensor, super().forward(*args, **kwargs))
        (x,) = args
        bias = None if found.bias is None else getattr(self, found.bias)
        rows, weight, bias = local_rows(x, 1, getattr(self, found.weight), bias)
        given = [p for p in (weight, bias) if p is not None]
        codes = codes_for(self, rows, constant=True)
        unknown = any(type(p) not in PLAIN or p.shape != x.shape[-1:] for p in given)
        if codes is None or unknown or not recorded(rows, *given):
            return cast(Tensor, super().forward(x))
        narrow = torch.is_autocast_enabled(x.device.type) or any(t.dtype is not torch.float32 for t in (rows, *given))
        # The class rounds in its own way, and its result may have the strides of its input.
        itself = narrow or not rows.is_contiguous()
        if itself and rows is not x:  # the class multiplies a DTensor by a DTensor
            return cast(Tensor, super().forward(x))
        forward: Any = functools.partial(original_of(type(self)).forward, self) if itself else None
        if found.offset:
            weight = (weight.float() if narrow else weight) + found.offset
        out = norm_by(OwnForward(forward), rows, weight, bias, found.eps, centred=found.centred, codes=codes)
        return out if rows is x else of_rows(out, x)


# Each module with the attributes that its formula was found with.
_formulas: WeakKeyDictionary[Module, tuple[dict[str, Any], NormFormula | None]] = WeakKeyDictionary()


def formula_of(module: Module) -> NormFormula | None:
    """Return the formula of a module that computes a norm; None for any other."""
    known = _formulas.get(module)
    attributes = vars(module)
    if known is None or any(attributes.get(name, known) is not value for name, value in known[0].items()):
        settings = {name: value for name, value in attributes.items() if _is_setting(name)}
        known = _formulas[module] = settings, _formula(module, settings)
    return known[1]


def _is_setting(name: str) -> bool:
    return name not in _OF_TORCH and not name.startswith("_pyactcomp")


def _formula(module: Module, settings: dict[str, Any]) -> NormFormula | None:
    cls: Any = original_of(type(module))
    plain = all(isinstance(each, _SIMPLE) for value in settings.values() for each in _flat(value))
    if not plain or not _has_gains(module) or not is_pure(cls.forward, cls):
        return None
    parameters = {name: p.numel() for name, p in module._parameters.items() if p is not None}
    return _formula_of(cls, tuple(parameters), max(parameters.values()), _Settings(settings))


def _has_gains(module: Module) -> bool:
    """Return whether a module has nothing but a parameter or two, with one number for each element of a row."""
    if any(p is not None and is_lazy(p) for p in module._parameters.values()):
        return False
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    alone = not module._modules and not module._buffers and 1 <= len(shapes) <= 2
    return alone and len(set(shapes)) == 1 and len(shapes[0]) == 1 and shapes[0][0] > 1


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


class _Settings:
    """The attributes of a module, as the key of a cache."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = dict(values)
        self._key = repr(sorted(values.items()))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self._key == other._key


@functools.lru_cache(maxsize=256)
def _formula_of(cls: Any, names: tuple[str, ...], length: int, settings: _Settings) -> NormFormula | None:
    """Return the formula with the outputs and gradients of a module of ``cls`` with these parameters and attributes."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    module: Any = object.__new__(cls)
    vars(module).update(vars(Module()))
    vars(module).update(settings.values)
    parameters = {name: Parameter(numbers(length)) for name in names}
    module._parameters.update(parameters)
    scales = torch.tensor(_SCALES, dtype=torch.float32, device="cpu")[:, None]
    x = ((numbers(len(_SCALES), length) + 0.5) * scales).unsqueeze(0)
    grad = numbers(*x.shape)
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            expected = _results(module, x, grad, parameters)
    except Exception:  # whatever a program's own code raises for a sample, it is no norm
        return None
    if expected is None:
        return None
    wide = {name: parameter.double() for name, parameter in parameters.items()}
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for candidate in _candidates(names, _numbers(cls, settings.values)):
            found = _results(lambda x, of=candidate: of.of(x, wide), x.double(), grad, wide)
            if found is not None and all(map(_agree, found, expected)):
                return candidate
    return None


def _results(function: Any, x: Tensor, grad: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor] | None:
    """Return the output of a function of rows and its gradients; None if it does not depend on each."""
    x = x.clone().requires_grad_()
    out = function(x)
    if not isinstance(out, Tensor) or out.shape != x.shape or not out.requires_grad:
        return None
    found = torch.autograd.grad(out, [x, *parameters.values()], grad.to(out.dtype), allow_unused=True)
    return None if any(each is None for each in found) else [out.detach(), *found]


def _agree(a: Tensor, b: Tensor) -> bool:
    """Return whether each row of two tensors agrees; a NaN agrees with nothing."""
    difference = (a - b).abs().amax(-1)
    return bool((difference <= _TOLERANCE * b.abs().amax(-1)).all())


def _candidates(names: tuple[str, ...], numbers: list[float]) -> Iterator[NormFormula]:
    for centred, offset, eps in itertools.product((False, True), (0.0, 1.0), numbers):
        for weight, *biases in itertools.permutations(names):
            bias = biases[0] if biases else None
            if centred or bias is None:
                yield NormFormula(centred, weight, bias, offset, eps)


def _numbers(cls: type[Module], settings: dict[str, Any]) -> list[float]:
    """Return the numbers that may be eps: attributes, and constants in the source."""
    found = [value for value in settings.values() if isinstance(value, float)]
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "torch":
            for function in filter(inspect.isfunction, vars(base).values()):
                found += constants(function)
    return sorted({value for value in found if 0 <= value < 1})


def by_class(modules: Iterable[Module]) -> dict[type[Module], Fusion]:
    """Return a fusion for each class outside torch of which a module may be a norm."""
    classes: set[Any] = {type(module) for module in modules if _has_gains(module)}
    return {
        cls: Fusion(fused_class(WrittenNorm, cls), suits=lambda module: formula_of(module) is not None)
        for cls in classes
        if cls.__module__.split(".")[0] != "torch" and is_pure(cls.forward, cls)
    }
