"""Triton's interpreter without its repetitions; ``conftest.py`` imports this file where Triton interprets.

Each call of a device function, one that a kernel calls, replaces the functions of ``triton.language`` by interpreted
ones. The launch around the call has done so already: half of the time of an interpreted test. Of what is left, more
than half makes the same few shapes and types anew for each operator, and sums in 64 bits that look for an overflow,
of which the interpreter tells nobody: it asserts under its option ``debug`` alone, which no launch sets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_launch: Callable[..., None] = interpreter.GridExecutor.__call__
_patch: Callable[[Any], Any] = interpreter._patch_lang
_patched: set[int] = set()
"""Modules, by the address of their variables, whose view of ``triton.language`` this launch has replaced."""


def _launched(self: interpreter.GridExecutor, *arguments: Any, **keywords: Any) -> None:
    _patched.clear()
    _launch(self, *arguments, **keywords)


def _patched_once(function: Any) -> Any:
    module = id(function.__globals__)
    if module in _patched:
        return None
    _patched.add(module)
    return _patch(function)


interpreter.GridExecutor.__call__ = _launched
interpreter._patch_lang = _patched_once


_block_type: Callable[..., None] = core.block_type.__init__
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
"""The variables of types of blocks, by the type of the elements and the shape."""


@functools.cache
def _of_tensors(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """Return the shape of all tensors of a shape, and their number of elements."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _block_made_once(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    key = str(element_ty), tuple([core._unwrap_if_constexpr(size) for size in shape])
    if key not in _blocks:
        _block_type(self, element_ty, shape)
        self.of_tensors = _of_tensors(key[1])
        _blocks[key] = vars(self)
    vars(self).update(_blocks[key])


def _tensor(self: core.tensor, handle: interpreter.TensorHandle, type: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _of_tensors(())


_scalar_dtype: Callable[[core.dtype], np.dtype[Any]] = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: core.dtype) -> np.dtype[Any]:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _scalar_dtype(dtype.scalar)


_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value


def _broadcast_unless_alike(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> Any:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(self, lhs, rhs)


@functools.cache
def _interpreted(package: Any) -> dict[str, Any]:
    """Return the functions that a launch puts in place of those of a package or class."""
    made = interpreter._LangPatchScope()
    _patch_builtin(package, interpreter.interpreter_builder, made)
    functions = {name: getattr(package, name) for _, name, _ in made._changes}
    made.restore()
    return functions


def _patch_from_those(package: Any, _: object, scope: interpreter._LangPatchScope) -> None:
    for name, function in _interpreted(package).items():
        scope.set_attr(package, name, function)


_patch_builtin: Callable[..., None] = interpreter._patch_builtin
interpreter._patch_builtin = _patch_from_those

assert not interpreter.InterpreterOptions().debug
core.block_type.__init__ = _block_made_once
core.tensor.__init__ = _tensor
TritonSemantic.broadcast_impl_value = _broadcast_unless_alike
interpreter._get_np_dtype = _np_dtype
TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
