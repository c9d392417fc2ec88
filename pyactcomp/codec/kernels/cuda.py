"""The codec for CUDA tensors, in CUDA C++: one launch on the current stream for each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ImplementationUnavailableError
from ...torch_private import current_raw_stream
from ..layouts import Rows
from . import Comparison, Kernel, native_codes, native_form

if TYPE_CHECKING:
    from ... import _core

VECTOR = 8
"""Elements that a lane reads at once."""
MOST = 2**35
"""Elements of a tensor with gaps: the kernel counts vectors in 32 bits."""


def unavailable_reason() -> str | None:
    """Return why the CUDA C++ kernels cannot run here, or None."""
    try:
        from ... import _core
    except ImportError as error:
        return f"the native module pyactcomp._core does not load ({error}); reinstall pyactcomp with a C++17 compiler"
    if not _core.has_cuda_codec:
        return "pyactcomp was built without nvcc; install the CUDA toolkit, put nvcc on PATH and reinstall pyactcomp"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return None


def bind(
    dtype: torch.dtype, bits: int, group_size: int, stochastic: bool, keep_positive: bool, device: torch.device
) -> Kernel:
    """Return the kernel for one format on one device.

    Raises
    ------
    ImplementationUnavailableError
        If :func:`unavailable_reason` returns a reason.
    """
    index = _index(device)
    native = native_codes("cuda", index, dtype, bits, group_size, stochastic, keep_positive)
    # Only graphs pack rows in place; they use 8 bits, rounded to nearest.
    return CudaKernel(native, index, serves_rows=bits == 8 and not stochastic)


def bind_form(
    encoding: str,
    dtype: torch.dtype,
    device: torch.device,
    narrow: torch.dtype | None,
    comparison: Comparison | None,
) -> Kernel:
    """Return the kernel for one form between codes and the tensor as it is, on one device.

    Raises
    ------
    ImplementationUnavailableError
        If :func:`unavailable_reason` returns a reason.
    """
    index = _index(device)
    return CudaKernel(native_form("cuda", index, encoding, dtype, narrow, comparison), index, serves_rows=False)


def _index(device: torch.device) -> int:
    reason = unavailable_reason()
    if reason is not None:
        raise ImplementationUnavailableError(f"the CUDA kernels cannot run here: {reason}")
    return torch.cuda.current_device() if device.index is None else device.index


class CudaKernel:
    """A native kernel on one CUDA device."""

    def __init__(self, native: _core.Kernel, device_index: int, *, serves_rows: bool) -> None:
        # For callers in C++, by `native.bound`.
        self.native = native
        self.packed_nbytes = native.packed_nbytes
        self._encode = native.encode
        self._encode_rows = native.encode_rows
        self._decode = native.decode
        self._device_index = device_index
        self._serves_rows = serves_rows

    def encode(self, source: Tensor, out: Tensor, seed: int) -> None:
        """Launch the packing of ``source`` into ``out`` on the current stream."""
        stream = current_raw_stream(self._device_index)
        self._encode(source.data_ptr(), out.data_ptr(), source.numel(), seed, stream)

    def encode_rows(self, source: Tensor, rows: Rows, out: Tensor, seed: int) -> None:
        """Launch the packing of ``source``; 8 bits to nearest read rows of whole vectors where they are."""
        if not self._serves_rows or rows.length % VECTOR or rows.gap % VECTOR or source.numel() >= MOST:
            self.encode(source.contiguous(), out, seed)
            return
        stream = current_raw_stream(self._device_index)
        self._encode_rows(source.data_ptr(), *rows, out.data_ptr(), source.numel(), stream)

    def decode(self, packed: Tensor, out: Tensor) -> None:
        """Launch the restoring of ``packed`` into ``out`` on the current stream."""
        self._decode(packed.data_ptr(), out.data_ptr(), out.numel(), current_raw_stream(self._device_index))
