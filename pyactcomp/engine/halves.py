"""Forms between codes and the tensor itself: sixteen bits an element for values of any size, one for a comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codec.kernels import Kernel
from ..readers.forms import ARTANH, BFLOAT16, LOG, LOGIT, SCALED, Comparison, Form
from .narrow import NarrowKernel

_HALF_MAX = 65504.0
_SCALE_BYTES = 4


def _flat(dense: Tensor) -> Tensor:
    """Return the elements of a dense tensor in storage order."""
    return dense.as_strided((dense.numel(),), (1,))


def half_nbytes(numel: int, form: Form) -> int:
    """Return the bytes of a buffer of a 16-bit form."""
    return 2 * numel if form is not SCALED else _scale_offset(numel) + _SCALE_BYTES


def _scale_offset(numel: int) -> int:
    return -(-2 * numel // _SCALE_BYTES) * _SCALE_BYTES


class _Bfloat16(NarrowKernel):
    """Bfloat16; what is finite stays so."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        super().encode(source, out, seed)
        narrow = out.view(self.dtype)
        # The number before infinity has the bits before its own, whatever the sign.
        overflowed = narrow.isinf().logical_and_(_flat(source.detach()).isfinite())
        out.view(torch.int16).sub_(overflowed.to(torch.int16))


class _Saturating(NarrowKernel):
    """Float16; a log-probability below -65504 is -65504, whose exponential is zero as well."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        super().encode(source, out, seed)
        out.view(self.dtype).clamp_(-_HALF_MAX, _HALF_MAX)


class _Logit:
    """Float16 of the logit: relative precision for a probability near zero and for its distance from one."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        out.view(torch.float16).copy_(torch.logit(_flat(source.detach())))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        torch.sigmoid(packed.view(torch.float16).to(out.dtype), out=_flat(out))


class _Artanh:
    """Float16 of the inverse hyperbolic tangent: relative precision for the distance from plus and minus one."""

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        out.view(torch.float16).copy_(torch.atanh(_flat(source.detach())))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        torch.tanh(packed.view(torch.float16).to(out.dtype), out=_flat(out))


class _Scaled:
    """Float16 of the tensor times a power of two that takes its largest magnitude to between 2**14 and 2**15."""

    _TOP = 15
    # Float32 has powers of two from -126 to 127.
    _LARGEST = 126

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        if source.numel() == 0:  # there is no largest
            return
        x = _flat(source.detach())
        offset = _scale_offset(x.numel())
        exponent = self._TOP - torch.frexp(torch.linalg.vector_norm(x, float("inf"))).exponent
        exponent = exponent.clamp_(-self._LARGEST, self._LARGEST).to(torch.float32)
        scale = torch.ldexp(torch.ones_like(exponent), exponent)
        torch.mul(x, scale.to(x.dtype), out=out[: 2 * x.numel()].view(torch.float16))
        out[offset:].view(torch.float32).copy_(scale.reciprocal())

    def decode(self, packed: Tensor, out: Tensor) -> None:
        x = _flat(out)
        inverse = packed[_scale_offset(x.numel()) :].view(torch.float32)
        torch.mul(packed[: 2 * x.numel()].view(torch.float16).to(x.dtype), inverse.to(x.dtype), out=x)


class BitsKernel:
    """The answer to a comparison, one bit an element, by the kernel that packs booleans."""

    def __init__(self, comparison: Comparison, booleans: Kernel) -> None:
        self._comparison, self._booleans = comparison, booleans

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Write the answers for ``source``, a dense tensor in storage order, into the bits of ``out``."""
        self._booleans.encode(self._comparison(_flat(source.detach())), out, seed)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Write values that answer as the source did into ``out``, a dense tensor in storage order."""
        x = _flat(out)
        answers = torch.empty_like(x, dtype=torch.bool)
        self._booleans.decode(packed, answers)
        x.fill_(self._comparison.no).masked_fill_(answers, self._comparison.yes)


def half_kernel(form: Form, by_triton: bool) -> Kernel:
    """Return the kernel of a 16-bit form."""
    kernels: dict[Form, Kernel] = {
        BFLOAT16: _Bfloat16(torch.bfloat16, by_triton),
        LOG: _Saturating(torch.float16, by_triton),
        LOGIT: _Logit(),
        ARTANH: _Artanh(),
        SCALED: _Scaled(),
    }
    return kernels[form]
