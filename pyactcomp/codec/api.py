"""Pack and restore one tensor: validation, layouts and the choice of an implementation."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, cast

import torch
from torch import Tensor

from ..errors import ImplementationUnavailableError, PyactcompError, check_choice, check_integer
from . import format as fmt
from . import reference
from .kernels import Comparison, Kernel, plain
from .layouts import is_dense

Impl = Literal["auto", "cuda", "triton", "cpu", "reference"]
Rounding = Literal["nearest", "stochastic"]

IMPLS: tuple[Impl, ...] = ("auto", "cuda", "triton", "cpu", "reference")
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Implementations tried by "auto" on each type of device, fastest first. "none" is there in an estimate alone.
_PREFERENCE: dict[str, tuple[str, ...]] = {
    "cuda": ("none", "cuda", "triton", "reference"),
    "cpu": ("cpu", "reference"),
}


class _ReferenceKernel:
    """The reference implementation with the interface of the kernels."""

    def __init__(self, dtype: torch.dtype, bits: int, group_size: int, stochastic: bool, keep_positive: bool) -> None:
        self.dtype, self.bits, self.group_size = dtype, bits, group_size
        self.stochastic, self.keep_positive = stochastic, keep_positive

    def packed_nbytes(self, numel: int) -> int:
        return fmt.packed_nbytes(numel, self.bits, self.group_size)

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        flat = source.detach().as_strided((source.numel(),), (1,))
        if self.dtype is torch.bool:
            out.copy_(reference.pack_bool(flat))
        else:
            out.copy_(
                reference.quantize(
                    flat,
                    bits=self.bits,
                    group_size=self.group_size,
                    stochastic=self.stochastic,
                    seed=seed,
                    keep_positive=self.keep_positive,
                )
            )

    def decode(self, packed: Tensor, out: Tensor) -> None:
        flat = out.as_strided((out.numel(),), (1,))
        if self.dtype is torch.bool:
            flat.copy_(reference.unpack_bool(packed, out.numel()))
        else:
            flat.copy_(
                reference.dequantize(packed, out.numel(), dtype=self.dtype, bits=self.bits, group_size=self.group_size)
            )


def _module(impl: str) -> ModuleType:
    return importlib.import_module(f".kernels.{impl}", __package__)


def unavailable_reason(impl: str, device: torch.device) -> str | None:
    """Return why ``impl`` cannot serve tensors on ``device``, or None."""
    if impl == "reference":
        return None
    reason: str | None = _module(impl).unavailable_reason()
    if reason is not None:
        return reason
    if impl == "triton" and device.type == "cpu":
        if _module("triton").interpreted():
            return None
        return "on CPU tensors Triton needs its interpreter: set TRITON_INTERPRET=1 before triton is imported"
    expected = "cpu" if impl == "cpu" else "cuda"
    if device.type != expected:
        return f"it serves tensors on {expected}, and this one is on {device}"
    return None


@functools.lru_cache(maxsize=64)
def resolve(impl: str, device: torch.device) -> str:
    """Return the implementation for ``impl`` on ``device``.

    Parameters
    ----------
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        ``"auto"`` selects the fastest implementation available on the device.
    device : torch.device

    Returns
    -------
    str
        Name of an implementation.

    Raises
    ------
    ValueError
        If ``impl`` is unknown.
    ImplementationUnavailableError
        If the named implementation, or for ``"auto"`` every implementation, cannot serve the device.
    """
    check_choice("impl", impl, IMPLS)
    if impl != "auto":
        reason = unavailable_reason(impl, device)
        if reason is not None:
            raise ImplementationUnavailableError(f"impl={impl!r} cannot be used for {device}: {reason}")
        return impl
    candidates = _PREFERENCE.get(device.type, ())
    for candidate in candidates:
        if unavailable_reason(candidate, device) is None:
            return candidate
    raise ImplementationUnavailableError(
        f"no implementation serves tensors on {device}; supported devices are {sorted(_PREFERENCE)}"
    )


@functools.lru_cache(maxsize=1024)
def bind(
    impl: str,
    dtype: torch.dtype,
    bits: int,
    group_size: int,
    stochastic: bool,
    keep_positive: bool,
    device: torch.device,
) -> Kernel:
    """Return the kernel of the implementation for ``impl``, bound to the parameters of the format.

    Raises the errors of :func:`resolve`.
    """
    name = resolve(impl, device)
    if name == "reference":
        return _ReferenceKernel(dtype, bits, group_size, stochastic, keep_positive)
    return cast(Kernel, _module(name).bind(dtype, bits, group_size, stochastic, keep_positive, device))


@functools.lru_cache(maxsize=1024)
def bind_form(
    impl: str,
    encoding: str,
    dtype: torch.dtype,
    device: torch.device,
    narrow: torch.dtype | None = None,
    comparison: Comparison | None = None,
) -> Kernel:
    """Return the kernel of a form between codes and the tensor as it is; :mod:`.kernels.plain` defines each form.

    Parameters
    ----------
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        ``"triton"`` and ``"reference"`` take plain torch, the first with Triton's kernels where there are some.
    encoding : {"bfloat16", "float16", "probability", "log_probability", "artanh", "scaled", "cast", "comparison"}
    dtype : torch.dtype
        Of the tensor: float32 or float64, for a comparison any float.
    device : torch.device
    narrow : torch.dtype, optional
        The narrower dtype of a cast.
    comparison : Comparison, optional
        The comparison whose answers are stored.

    Raises
    ------
    ImplementationUnavailableError
        As :func:`resolve`.
    """
    name = resolve(impl, device)
    if name in ("none", "cpu", "cuda"):
        return cast(Kernel, _module(name).bind_form(encoding, dtype, device, narrow, comparison))
    if comparison is not None:
        return plain.bind_answers(comparison, bind(name, torch.bool, 1, 64, False, False, device))
    by_triton = name == "triton" and device.type == "cuda" and dtype is torch.float32
    return plain.bind(encoding, narrow, by_triton)


@dataclass(frozen=True)
class Packed:
    """A packed tensor, from :func:`quantize` and for :func:`dequantize`.

    Attributes
    ----------
    buffer : Tensor, uint8, [packed_nbytes]
        Codes, then the groups' parameters; see ``reference.py`` for the layout.
    shape, stride : tuple of int
        Shape and strides of the restored tensor.
    dtype : torch.dtype
        Dtype of the restored tensor.
    bits : {8, 4, 2, 1}
        Width of a code; 1 for booleans (packed without loss).
    group_size : int
        Elements with a common minimum and step.
    """

    buffer: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.buffer.numel()

    @property
    def numel(self) -> int:
        """Number of elements packed."""
        count = 1
        for length in self.shape:
            count *= length
        return count


def _check_options(bits: object, group_size: object, rounding: object, impl: object, seed: object) -> None:
    for name, value, allowed in (
        ("bits", bits, fmt.BITS),
        ("group_size", group_size, fmt.GROUP_SIZES),
        ("rounding", rounding, ROUNDINGS),
        ("impl", impl, IMPLS),
    ):
        check_choice(name, value, allowed)
    check_integer("seed", seed, 2**64)


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    group_size: int = 64,
    rounding: Rounding | None = None,
    seed: int = 0,
    impl: Impl = "auto",
) -> Packed:
    """Pack a tensor into ``bits`` bits an element plus 4 bytes a group.

    Parameters
    ----------
    x : Tensor, any shape, float32 | bfloat16 | float16 | float64 | bool
        Read in storage order if dense (in any order of dimensions), otherwise copied once. float64 is cast to
        float32 first. Booleans take one bit, without loss, and ignore the other options.
    bits : {8, 4, 2}
        Width of a code.
    group_size : {64, 128, 256}
        Elements with a common minimum and step.
    rounding : {"nearest", "stochastic"}, optional
        By default nearest for 8 bits and stochastic (unbiased) for fewer.
    seed : int
        64-bit seed of the stochastic rounding.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; all give the same bytes. A named implementation never falls back.

    Returns
    -------
    Packed
        Packed tensor on the device of ``x``, detached from autograd.

    Raises
    ------
    TypeError
        If ``x`` is not a strided tensor of a supported dtype.
    ValueError
        If an option has an unknown value.
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of ``x``.

    Notes
    -----
    For a finite element of a group with step ``s`` and largest magnitude ``m <= 2**126``, the error is at most
    ``s / 2`` (stochastic: ``s``) plus 2 ulp of ``m``, plus half an ulp of a 16-bit output
    (:func:`pyactcomp.codec.reference.error_bound`). Infinities and NaN are restored as such. Runs on the current
    stream and never synchronises.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> x = torch.randn(1000)
    >>> packed = pyactcomp.codec.quantize(x)
    >>> packed.nbytes, x.nbytes
    (1072, 4000)
    >>> bool((pyactcomp.codec.dequantize(packed) - x).abs().max() < 0.05)
    True
    """
    if rounding is None:
        rounding = "nearest" if bits == 8 else "stochastic"
    _check_options(bits, group_size, rounding, impl, seed)
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise TypeError(f"quantize expects a strided torch.Tensor, got {getattr(x, 'layout', type(x).__name__)}")
    if x.dtype not in (*FLOAT_DTYPES, torch.bool):
        raise TypeError(f"quantize takes {FLOAT_DTYPES} and torch.bool, got {x.dtype}; integers are not packed")
    if x.dtype is torch.bool:
        bits = 1
    if x.dtype is torch.float64:
        source = x.detach().to(torch.float32)
    else:
        source = x.detach()
    if not is_dense(tuple(source.shape), source.stride()):
        source = source.contiguous()
    signed = seed - 2**64 if seed >= 2**63 else seed  # an operator's integers are signed
    buffer = torch.ops.pyactcomp.quantize(source, bits, group_size, rounding == "stochastic", signed, impl)
    return Packed(buffer, tuple(x.shape), source.stride(), x.dtype, bits, group_size)


def dequantize(packed: Packed, *, impl: Impl = "auto") -> Tensor:
    """Restore a tensor packed by :func:`quantize`.

    Parameters
    ----------
    packed : Packed
    impl : {"auto", "cuda", "triton", "cpu", "reference"}

    Returns
    -------
    Tensor
        A new tensor with the shape, strides, dtype and device of the original (contiguous if the original was not
        dense).

    Raises
    ------
    TypeError
        If ``packed`` is not a :class:`Packed`.
    PyactcompError
        If the fields of ``packed`` contradict each other: wrong buffer size, or a layout with gaps or overlaps.
    ImplementationUnavailableError
        If ``impl`` cannot serve the device of the buffer.
    """
    if not isinstance(packed, Packed):
        raise TypeError(f"dequantize expects a Packed as quantize returns it, got {type(packed).__name__}")
    _check_packed(packed)
    carrier = torch.float32 if packed.dtype is torch.float64 else packed.dtype
    restored = torch.ops.pyactcomp.dequantize(
        packed.buffer, packed.shape, packed.stride, carrier, packed.bits, packed.group_size, impl
    )
    return cast(Tensor, restored.to(packed.dtype))


def is_format(dtype: object, bits: object, group_size: object) -> bool:
    """Return whether tensors of ``dtype`` are packed with ``bits`` bits in groups of ``group_size``."""
    if dtype is torch.bool:
        return bits == 1
    whole = isinstance(bits, int) and isinstance(group_size, int)
    return whole and dtype in FLOAT_DTYPES and bits in fmt.BITS and group_size in fmt.GROUP_SIZES


def _are_lengths(numbers: object) -> bool:
    return isinstance(numbers, tuple) and all(isinstance(n, int) and n >= 0 for n in numbers)


def _check_packed(packed: Packed) -> None:
    buffer = packed.buffer
    sound = is_format(packed.dtype, packed.bits, packed.group_size)
    if not sound or not _are_lengths(packed.shape) or not _are_lengths(packed.stride):
        raise PyactcompError(
            f"no such packed format: dtype {packed.dtype}, {packed.bits} bits in groups of {packed.group_size}, "
            f"shape {packed.shape}, strides {packed.stride}; use a Packed as quantize returned it"
        )
    if not isinstance(buffer, Tensor) or buffer.dtype is not torch.uint8 or buffer.dim() != 1:
        raise PyactcompError(
            f"the packed buffer must be a flat uint8 tensor, got {getattr(buffer, 'dtype', type(buffer).__name__)}"
        )
    if len(packed.stride) != len(packed.shape) or not is_dense(packed.shape, packed.stride):
        raise PyactcompError(f"the packed layout is not dense: shape {packed.shape}, strides {packed.stride}")
    expected = fmt.packed_nbytes(packed.numel, packed.bits, packed.group_size)
    if buffer.numel() != expected or not buffer.is_contiguous():
        raise PyactcompError(
            f"the packed buffer is truncated or altered: {packed.numel} elements of {packed.bits} bits in groups of "
            f"{packed.group_size} take {expected} contiguous bytes, got {buffer.numel()}"
        )
