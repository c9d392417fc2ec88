"""Notes the line of the program that makes each tensor, while a leak check runs."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..torch_private import on_top
from .held import tensors_in

_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
# Reading a gradient makes no tensor.
_READING = cast(Any, Tensor.grad).__get__


class Line(NamedTuple):
    """A line of the program."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


class Recorder(TorchFunctionMode):
    """Notes the innermost line outside of torch for the result of each call of torch's functions.

    Gradients and other tensors made in C++ have no line. A mode that sees calls, not operators, changes nothing about
    autograd and runs no compiled graph anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: Any = WeakTensorKeyDictionary()
        self._noting = False
        self._in_library: dict[CodeType, bool] = {}

    def start(self) -> None:
        """Begin to note, in this thread and the threads of its backward."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._noting = True

    def stop(self) -> None:
        """Note no more. A mode that the program has entered since, and not left, keeps this one in place, idle."""
        self._noting = False
        if on_top(self):
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._noting and isinstance(out, (Tensor, tuple, list)) and func != _READING:
            line = None
            for tensor in tensors_in(out):
                if tensor not in self.lines:
                    line = line or self._line()
                    self.lines[tensor] = line
        return out

    def _line(self) -> Line:
        frame: Any = sys._getframe(2)
        while self._is_library(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def _is_library(self, code: CodeType) -> bool:
        known = self._in_library.get(code)
        if known is None:
            known = self._in_library[code] = code.co_filename.startswith(_LIBRARIES)
        return known
