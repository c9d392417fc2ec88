"""Kernels of the forms between codes and the tensor as it is: 16 bits an element, or one bit for a comparison."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..codec import probability
from ..codec.kernels import Kernel, triton
from ..readers.forms import (
    ARTANH,
    BFLOAT16,
    LOG,
    LOG_PROBABILITY,
    PROBABILITY,
    SCALED,
    Comparison,
    Form,
)
from .narrow import NarrowKernel, takes_triton

_HALF_MAX = 65504.0
_SCALE_BYTES = 4


def _flat(dense: Tensor) -> Tensor:
    """Return the elements of a dense tensor in storage order."""
    return dense.as_strided((dense.numel(),), (1,))


def half_nbytes(numel: int, form: Form) -> int:
    """Return the size in bytes of the buffer of a 16-bit form."""
    return 2 * numel if form is not SCALED else _scale_offset(numel) + _SCALE_BYTES


def _scale_offset(numel: int) -> int:
    return -(-2 * numel // _SCALE_BYTES) * _SCALE_BYTES


class _Bfloat16(NarrowKernel):
    """Bfloat16; a finite value stays finite."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        super().encode(source, out, seed)
        narrow = out.view(self.dtype)
        # Infinity's bits minus one are the largest finite number, for either sign.
        overflowed = narrow.isinf().logical_and_(_flat(source.detach()).isfinite())
        out.view(torch.int16).sub_(overflowed.to(torch.int16))


class _Saturating(NarrowKernel):
    """Float16, saturating: a logit below -65504 becomes -65504, and the exponential of both is zero."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        super().encode(source, out, seed)
        out.view(self.dtype).clamp_(-_HALF_MAX, _HALF_MAX)


_PART = 1 << 22


def _by_parts(function: Callable[[Tensor], Tensor], source: Tensor, target: Tensor) -> None:
    """Fill ``target`` from ``source`` in parts: intermediate results would take several times the tensor."""
    for part, out in zip(torch.split(source, _PART), torch.split(target, _PART), strict=True):
        out.copy_(function(part))


class _Probability:
    """The logit of a probability, or of the exponential of the tensor, on a grid; see `codec.probability`."""

    def __init__(self, log: bool, by_triton: bool) -> None:
        self._log, self._by_triton = log, by_triton
        self._encode = probability.encode_log if log else probability.encode
        self._decode = probability.decode_log if log else probability.decode

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        x, codes = _flat(source.detach()), out.view(torch.int16)
        if self._by_triton and takes_triton(x):
            triton.encode_probabilities(x, codes, self._log)
        else:
            _by_parts(self._encode, x, codes)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        codes, x = packed.view(torch.int16), _flat(out)
        if self._by_triton and takes_triton(x):
            triton.decode_probabilities(codes, x, self._log)
        else:
            _by_parts(lambda part: self._decode(part, x.dtype), codes, x)


class _Mapped:
    """Float16 of a function that stretches the ends of the tensor's range."""

    def __init__(self, function: Callable[[Tensor], Tensor], inverse: Callable[..., Tensor]) -> None:
        self._function, self._inverse = function, inverse

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        out.view(torch.float16).copy_(self._function(_flat(source.detach())))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        self._inverse(packed.view(torch.float16).to(out.dtype), out=_flat(out))


class _Scaled:
    """Float16 of the tensor times a power of two, chosen so that the largest magnitude lies in [2**14, 2**15).

    With a NaN or an infinity in the tensor the power is one, so the other elements come back, if below 65504.
    """

    _TOP = 15
    # Float32 has powers of two from -126 to 127.
    _LARGEST = 126

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        if source.numel() == 0:  # no largest magnitude
            return
        x = _flat(source.detach())
        offset = _scale_offset(x.numel())
        largest = torch.linalg.vector_norm(x, float("inf")).nan_to_num_(2.0**14, 2.0**14)
        exponent = self._TOP - torch.frexp(largest).exponent
        exponent = exponent.clamp_(-self._LARGEST, self._LARGEST).to(torch.float32)
        scale = torch.ldexp(torch.ones_like(exponent), exponent)
        torch.mul(x, scale.to(x.dtype), out=out[: 2 * x.numel()].view(torch.float16))
        out[offset:].view(torch.float32).copy_(scale.reciprocal())

    def decode(self, packed: Tensor, out: Tensor) -> None:
        x = _flat(out)
        inverse = packed[_scale_offset(x.numel()) :].view(torch.float32)
        torch.mul(packed[: 2 * x.numel()].view(torch.float16).to(x.dtype), inverse.to(x.dtype), out=x)


class BitsKernel:
    """The answer to a comparison, one bit an element, packed by the kernel for booleans."""

    def __init__(self, comparison: Comparison, booleans: Kernel) -> None:
        self._comparison, self._booleans = comparison, booleans

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Compare each element of ``source``, a dense tensor in storage order, and pack the answers into ``out``."""
        self._booleans.encode(self._comparison(_flat(source.detach())), out, seed)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Fill ``out``, a dense tensor in storage order, with values for which the comparison answers the same."""
        x = _flat(out)
        answers = torch.empty_like(x, dtype=torch.bool)
        self._booleans.decode(packed, answers)
        x.fill_(self._comparison.no).masked_fill_(answers, self._comparison.yes)


def half_kernel(form: Form, by_triton: bool) -> Kernel:
    """Return the kernel of a 16-bit form."""
    kernels: dict[Form, Kernel] = {
        BFLOAT16: _Bfloat16(torch.bfloat16, by_triton),
        LOG: _Saturating(torch.float16, by_triton),
        LOG_PROBABILITY: _Probability(True, by_triton),
        PROBABILITY: _Probability(False, by_triton),
        # Relative precision for the distance from plus and minus one.
        ARTANH: _Mapped(torch.atanh, torch.tanh),
        SCALED: _Scaled(),
    }
    return kernels[form]
