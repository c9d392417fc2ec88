"""The codec in Triton: for CUDA tensors, and for CPU tensors in Triton's interpreter."""

from __future__ import annotations

import functools
import operator
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import PyactcompError
from ...torch_private import current_cuda_device, current_raw_stream
from .. import format as fmt
from . import none

if TYPE_CHECKING:
    from . import Kernel
    from .triton_direct import Direct

# Elements and warps of a program, and registers of a thread. Each thread has 16 elements: for bfloat16, two independent
# 16-byte loads. The ordinary path needs 64 registers to avoid spills, and 64 let 32 warps run on a multiprocessor; only
# the rare paths would use more. Measured on an H200 over tiles of 1024 to 8192, 2 to 16 warps and 40 to 128 registers,
# bfloat16 of 256 MiB, as a share of the copy's rate: packing 0.88 with 1024, 2, 64, then 0.86 with 2048, 4, 64; without
# a limit on registers 0.77. With divisions without branches, 1024, 2, 64 reaches 0.94. Restoring reaches 0.98 with
# 2048, 4 and 64 or more registers.
TILE = 1024
WARPS = 2
REGISTERS = 64
DECODE_TILE = 2048
DECODE_WARPS = 4

# Triton compiles a kernel for pointers aligned to this many bytes, and another for other pointers.
_ALIGNED = 16
_dtype_of = Tensor.dtype.__get__  # type: ignore[attr-defined]


def interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter."""
    from . import triton_ops

    return triton_ops.INTERPRETED


def unavailable_reason() -> str | None:
    """Return why the Triton kernels cannot run here, or None."""
    try:
        on_cpu = interpreted()
    except ImportError as error:
        return f"triton cannot be imported ({error}); install it with: pip install triton"
    if on_cpu or torch.cuda.is_available():
        return None
    return (
        "torch finds no CUDA device; install a torch with CUDA on a machine with a GPU, or set TRITON_INTERPRET=1 "
        "before triton is imported to run the kernels on CPU tensors, slowly"
    )


class Launcher:
    """A Triton kernel with bound constants, launched on the current stream of one device.

    Triton's own dispatch hashes every argument on each launch. The launcher caches compiled kernels by the tensors'
    dtypes and the alignment of each pointer to 16 bytes, so a kernel must specialise on nothing else. It then calls the
    function in C that Triton's launch ends with (:mod:`.triton_direct`).

    Parameters
    ----------
    kernel : triton.JITFunction
        Takes tensors, then integers, then constants.
    constants : tuple
        Values of the constants.
    warps : int
    device : torch.device
    registers : int, optional
        Limit on registers of a thread.
    """

    def __init__(
        self,
        kernel: Any,
        constants: tuple[Any, ...],
        warps: int,
        device: torch.device,
        registers: int | None = None,
    ) -> None:
        self._nothing = none.launches_nothing()
        if self._nothing:
            return
        from . import triton_direct

        self._direct, self._hooks = triton_direct.direct, triton_direct.hooks
        self._kernel = kernel
        self._constants = constants
        # No contraction: the arithmetic is part of the format.
        self._options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}
        self._index = torch.cuda.current_device() if device == torch.device("cuda") else device.index
        self._indices = {self._index}
        self._interpreted = interpreted()
        self._compiled: dict[tuple[object, ...], tuple[Any, Direct | None]] = {}

    def __call__(self, programs: int, tensors: tuple[Tensor, ...], scalars: tuple[int | float, ...]) -> None:
        """Launch ``programs`` programs; nothing if 0, or in an estimate."""
        if programs == 0 or self._nothing:
            return
        if self._interpreted:
            self._interpret(programs, tensors, scalars)
            return
        if current_cuda_device() != self._index:
            with torch.cuda.device(self._index):
                self(programs, tensors, scalars)
            return
        # Functions in C without a frame of Python for each tensor: a launch must cost less than the kernel takes.
        if {*map(Tensor.get_device, tensors)} != self._indices:
            devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
            raise ValueError(f"expected all tensors on cuda:{self._index}, got some on {devices}")
        try:
            pointers = [*map(Tensor.data_ptr, tensors)]
        except RuntimeError as error:
            raise PyactcompError(
                "a kernel was given a tensor without memory of its own, as batches of gradients are: compute gradients "
                "one by one (no is_grads_batched=True, vectorize=True or torch.func), or decompress the model"
            ) from error
        signature: tuple[object, ...] = (*map(_dtype_of, tensors),)
        if functools.reduce(operator.or_, pointers) % _ALIGNED:
            signature += (*[pointer % _ALIGNED == 0 for pointer in pointers],)
        compiled, start = self._compiled.get(signature, (None, None))
        if compiled is None:
            grid = (programs, 1, 1)
            compiled = self._kernel[grid](*tensors, *scalars, *self._constants, **self._options)
            self._compiled[signature] = compiled, self._direct(compiled)
            return
        # Integers save Triton a driver call for each pointer; a given stream saves the query of the current one.
        stream = current_raw_stream(self._index)
        arguments = (*pointers, *scalars, *self._constants)
        enter, leave = self._hooks()
        # A chain of hooks in Triton 3.5 and later, a function or None before.
        watched = (enter is not None and getattr(enter, "calls", True)) or (
            leave is not None and getattr(leave, "calls", True)
        )
        if start is None or watched:
            compiled[programs, 1, 1](*arguments, stream=stream)
        else:
            start.function(programs, 1, 1, stream, *start.fixed, *((arguments,) if start.packs else arguments))

    def _interpret(self, programs: int, tensors: tuple[Tensor, ...], scalars: tuple[int | float, ...]) -> None:
        import numpy

        # NaN and infinities are part of the format: suppress numpy's warnings about them.
        with warnings.catch_warnings(), numpy.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            self._kernel[(programs, 1, 1)](*tensors, *scalars, *self._constants)


class _FloatKernel:
    def __init__(self, bits: int, group_size: int, stochastic: bool, keep_positive: bool, device: torch.device) -> None:
        from . import triton_kernels

        form = self._form = (bits, group_size)
        self._stochastic = stochastic
        self._tile, self._decode_tile = TILE, DECODE_TILE
        encode = (*form, TILE // group_size, stochastic, keep_positive)
        decode = (*form, DECODE_TILE // group_size)
        self._encode = Launcher(triton_kernels.encode_kernel, encode, WARPS, device, REGISTERS)
        self._decode = Launcher(triton_kernels.decode_kernel, decode, DECODE_WARPS, device, REGISTERS)

    def packed_nbytes(self, numel: int) -> int:
        return fmt.packed_nbytes(numel, *self._form)

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        numel = source.numel()
        keys = fmt.random_keys(seed) if self._stochastic else (0, 0)
        self._encode(-(-numel // self._tile), (source, out), (numel, *keys))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        numel = out.numel()
        self._decode(-(-numel // self._decode_tile), (packed, out), (numel,))


class _BoolKernel:
    def __init__(self, device: torch.device) -> None:
        from . import triton_kernels

        self._encode = Launcher(triton_kernels.encode_bool_kernel, (TILE // 8,), WARPS, device)
        self._decode = Launcher(triton_kernels.decode_bool_kernel, (TILE // 8,), WARPS, device)

    def packed_nbytes(self, numel: int) -> int:
        return fmt.packed_bool_nbytes(numel)

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        self._encode(-(-source.numel() // TILE), (source, out), (source.numel(),))

    def decode(self, packed: Tensor, out: Tensor) -> None:
        self._decode(-(-out.numel() // TILE), (packed, out), (out.numel(),))


def widen(source: Tensor, out: Tensor) -> None:
    """Cast ``source``, bfloat16 or float16 [n], to ``out``, float32 [n], exactly.

    torch's own cast loads one element at a time: on an H200, for tensors of 12 to 500 million elements, the 6 bytes of
    each element move at 2.1 TB/s, half of a copy's rate.
    """
    _elementwise("widen_kernel", source, out)


def encode_probabilities(source: Tensor, out: Tensor, log: bool) -> None:
    """Store probabilities, or their logarithms, float32 [n], as codes of ``codec.probability`` in ``out``, int16 [n].

    A code may differ from torch's by one, as the exponential and the logarithm do by a rounding.
    """
    _elementwise("encode_probability_kernel", source, out, log)


def decode_probabilities(codes: Tensor, out: Tensor, log: bool) -> None:
    """Fill ``out``, float32 [n], with the probabilities, or their logarithms, of ``codes``, int16 [n]."""
    _elementwise("decode_probability_kernel", codes, out, log)


def _elementwise(kernel: str, source: Tensor, out: Tensor, *constants: object) -> None:
    launch = _elementwise_launcher(kernel, constants, out.device)
    launch(-(-out.numel() // DECODE_TILE), (source, out), (out.numel(),))


@functools.lru_cache(maxsize=64)
def _elementwise_launcher(kernel: str, constants: tuple[object, ...], device: torch.device) -> Launcher:
    from . import triton_kernels

    return Launcher(getattr(triton_kernels, kernel), (DECODE_TILE, *constants), DECODE_WARPS, device)


def bind(
    dtype: torch.dtype, bits: int, group_size: int, stochastic: bool, keep_positive: bool, device: torch.device
) -> Kernel:
    """Return the kernel for a dtype, a width, a group size, a rounding and a device."""
    if dtype is torch.bool:
        return _BoolKernel(device)
    return _FloatKernel(bits, group_size, stochastic, keep_positive, device)
