"""What the tests of the observer's library share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyactcomp.readers.observer import Observer, observer
from pyactcomp.torch_private import extensions


def library() -> Observer:
    built, reason = extensions.load("_observer")
    if built is None:
        pytest.skip(f"needs the observer: {reason}")
    return observer()


def leaf(*shape: int) -> Tensor:
    return (torch.rand(*shape) + 0.5).requires_grad_()
