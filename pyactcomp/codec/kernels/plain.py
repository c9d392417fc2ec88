"""The 16-bit forms, exact casts and answers to comparisons in plain torch: the definition of each.

The C++ kernels of csrc/codec/halves.hpp are compared with these. They serve GPUs where nvcc built no kernels, with
Triton's for float32 where a chain of torch's operators would take several times as long; and graphs being traced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import probability
from . import Comparison, Kernel, triton

HALF_MAX = 65504.0
PART = 256
"""Elements that share a power of two."""


def bind(encoding: str, narrow: torch.dtype | None, by_triton: bool) -> Kernel:
    """Return the kernel of one form; ``by_triton`` takes Triton's kernels for float32, where there are some."""
    return _KERNELS[encoding](by_triton) if narrow is None else _Cast(narrow, by_triton)


def bind_answers(comparison: Comparison, booleans: Kernel) -> Kernel:
    """Return the kernel of a comparison's answers, which packs them by a kernel for booleans."""
    return _Answers(comparison, booleans)


def _flat(dense: Tensor) -> Tensor:
    """Return the elements of a dense tensor in storage order."""
    return dense.as_strided((dense.numel(),), (1,))


class _Cast:
    def __init__(self, narrow: torch.dtype, by_triton: bool) -> None:
        self.dtype = narrow
        self._by_triton = by_triton

    def packed_nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        out.view(self.dtype).copy_(_flat(source.detach()))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        if self._by_triton:
            triton.widen(packed.view(self.dtype), _flat(out))
        else:
            _flat(out).copy_(packed.view(self.dtype))


class _Bfloat16(_Cast):
    """Bfloat16; a finite value stays finite."""

    def __init__(self, by_triton: bool) -> None:
        super().__init__(torch.bfloat16, by_triton)

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        super().encode(source, out, seed)
        overflowed = out.view(self.dtype).isinf().logical_and_(_flat(source.detach()).isfinite())
        # Infinity's bits minus one are the largest finite number, for either sign.
        out.view(torch.int16).sub_(overflowed.to(torch.int16))


class _Float16(_Cast):
    """Float16, saturating: a logit below -65504 becomes -65504, and the exponential of both is zero."""

    def __init__(self, by_triton: bool) -> None:
        super().__init__(torch.float16, by_triton)

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        super().encode(source, out, seed)
        out.view(self.dtype).clamp_(-HALF_MAX, HALF_MAX)


class _TwoBytes:
    """Base of the other kernels of two bytes an element."""

    def packed_nbytes(self, numel: int) -> int:
        return 2 * numel


_SLICE = 1 << 22


def _by_slices(function: Callable[[Tensor], Tensor], source: Tensor, target: Tensor) -> None:
    """Fill ``target`` from ``source`` in slices: intermediate results would take several times the tensor."""
    for part, out in zip(torch.split(source, _SLICE), torch.split(target, _SLICE), strict=True):
        out.copy_(function(part))


class _Probability(_TwoBytes):
    """The logit of a probability, or of the exponential of the tensor, on a grid; see `codec.probability`."""

    def __init__(self, log: bool, by_triton: bool) -> None:
        self._log, self._by_triton = log, by_triton
        self._encode = probability.encode_log if log else probability.encode
        self._decode = probability.decode_log if log else probability.decode

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        x, codes = _flat(source.detach()), out.view(torch.int16)
        if self._by_triton:
            triton.encode_probabilities(x, codes, self._log)
        else:
            _by_slices(self._encode, x, codes)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        codes, x = packed.view(torch.int16), _flat(out)
        if self._by_triton:
            triton.decode_probabilities(codes, x, self._log)
        else:
            _by_slices(lambda part: self._decode(part, x.dtype), codes, x)


class _Artanh(_TwoBytes):
    """Float16 of the inverse hyperbolic tangent: relative precision for the distance from plus and minus one."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        out.view(torch.float16).copy_(torch.atanh(_flat(source.detach())))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        _flat(out).copy_(torch.tanh(packed.view(torch.float16).to(out.dtype)))


class _Scaled:
    """Float16 times a power of two for each part of ``PART`` consecutive elements.

    The power makes the largest magnitude of the part lie in [2**14, 2**15); the exponents follow the elements, in
    int16. With a NaN or an infinity in a part the power is one, so the other elements come back, saturated.
    """

    _TOP = 15
    # Float32 has powers of two from -126 to 127, and the inverses of the first 126.
    _LARGEST = 126

    def packed_nbytes(self, numel: int) -> int:
        return 2 * (numel + -(-numel // PART))

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        numel = source.numel()
        parts = torch.nn.functional.pad(_flat(source.detach()), (0, -numel % PART)).view(-1, PART)
        largest = parts.abs().amax(1, keepdim=True)
        # The smallest number has the exponent -125: clamped below, zeros have a power of two as well.
        exponent = self._TOP - torch.frexp(largest.clamp(min=torch.finfo(torch.float32).tiny)).exponent
        exponent = exponent.clamp_(-self._LARGEST, self._LARGEST).masked_fill_(largest.isfinite().logical_not_(), 0)
        halves = (parts * _power(exponent, parts.dtype)).to(torch.float16)
        halves = torch.where(parts.isinf(), halves, halves.clamp(-HALF_MAX, HALF_MAX))
        out[: 2 * numel].view(torch.float16).copy_(halves.view(-1)[:numel])
        out[2 * numel :].view(torch.int16).copy_(exponent.view(-1))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        numel = out.numel()
        halves = packed[: 2 * numel].view(torch.float16).to(out.dtype)
        exponent = packed[2 * numel :].view(torch.int16).to(torch.int32)
        inverse = _power(-exponent, out.dtype).repeat_interleave(PART)[:numel]
        _flat(out).copy_(halves * inverse)


def _power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent)


class _Answers:
    """The answer to a comparison, one bit an element, packed by the kernel for booleans."""

    def __init__(self, comparison: Comparison, booleans: Kernel) -> None:
        self._comparison, self._booleans = comparison, booleans

    def packed_nbytes(self, numel: int) -> int:
        return -(-numel // 8)

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        self._booleans.encode(self._comparison(_flat(source.detach())), out, seed)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Fill ``out`` with values for which the comparison answers the same."""
        x = _flat(out)
        answers = torch.empty_like(x, dtype=torch.bool)
        self._booleans.decode(packed, answers)
        x.fill_(self._comparison.no).masked_fill_(answers, self._comparison.yes)


_KERNELS: dict[str, Callable[[bool], Kernel]] = {
    "bfloat16": _Bfloat16,
    "float16": _Float16,
    "probability": lambda by_triton: _Probability(False, by_triton),
    "log_probability": lambda by_triton: _Probability(True, by_triton),
    "artanh": lambda _: _Artanh(),
    "scaled": lambda _: _Scaled(),
}
