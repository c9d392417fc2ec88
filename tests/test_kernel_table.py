"""Contract under test: the table of kernels as a library in another language sees it, through plain C types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_bool, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import native_cases as cases
import pytest
import torch

from pyactcomp import _core
from pyactcomp.codec import format as fmt
from pyactcomp.codec import reference

VERSION = 1
SEED = 0x1234_5678_9ABC_DEF0


class Comparison(ctypes.Structure):
    _fields_ = [("relation", c_int32), ("low", c_double), ("high", c_double), ("yes", c_double), ("no", c_double)]


class Format(ctypes.Structure):
    _fields_ = [
        ("encoding", c_int32),
        ("dtype", c_int32),
        ("bits", c_int32),
        ("group_size", c_int32),
        ("stochastic", c_bool),
        ("keep_positive", c_bool),
        ("narrow", c_int32),
        ("comparison", Comparison),
    ]


class Place(ctypes.Structure):
    _fields_ = [("device", c_int32), ("stream", c_void_p), ("threads", c_int32)]


class Keys(ctypes.Structure):
    _fields_ = [("low", c_uint32), ("high", c_uint32)]


ENCODE = ctypes.CFUNCTYPE(c_int32, POINTER(Format), c_void_p, c_void_p, c_int64, Keys, POINTER(Place))
DECODE = ctypes.CFUNCTYPE(c_int32, POINTER(Format), c_void_p, c_void_p, c_int64, POINTER(Place))


class Kernel(ctypes.Structure):
    _fields_ = [
        ("packed_nbytes", ctypes.CFUNCTYPE(c_int64, POINTER(Format), c_int64)),
        ("encode", ENCODE),
        ("encode_rows", c_void_p),
        ("decode", DECODE),
    ]


class Table(ctypes.Structure):
    _fields_ = [
        ("version", c_int32),
        ("find", ctypes.CFUNCTYPE(POINTER(Kernel), POINTER(Format), c_int32)),
        ("random_keys", ctypes.CFUNCTYPE(Keys, c_uint64)),
        ("describe", ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_int64)),
    ]


def table() -> Table:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    return Table.from_address(pointer(_core.kernels, b"pyactcomp._core.kernels"))


CODES, FLOAT32 = 0, 0
CPU, BASELINE, CUDA = range(3)


def test_a_library_packs_and_restores_through_the_table() -> None:
    assert table().version == VERSION
    x = cases.CASES["specials"](1001)
    expected = reference.quantize(x, bits=4, group_size=128, stochastic=True, seed=SEED)
    form = Format(CODES, FLOAT32, 4, 128, True, False)
    keys = table().random_keys(SEED)
    assert (keys.low, keys.high) == fmt.random_keys(SEED)
    for target in (CPU, BASELINE):
        kernel = table().find(byref(form), target).contents
        assert kernel.packed_nbytes(byref(form), 1001) == fmt.packed_nbytes(1001, 4, 128)
        packed, out = torch.empty_like(expected), torch.empty_like(x)
        place = Place(-1, None, 1)
        assert kernel.encode(byref(form), x.data_ptr(), packed.data_ptr(), 1001, keys, byref(place)) == 0
        cases.assert_same_bytes(packed, expected)
        assert kernel.decode(byref(form), packed.data_ptr(), out.data_ptr(), 1001, byref(place)) == 0
        cases.assert_same_bytes(out, reference.dequantize(expected, 1001, bits=4, group_size=128))


def test_what_no_kernel_serves_is_not_found() -> None:
    for form in (Format(CODES, FLOAT32, 3, 64), Format(CODES, FLOAT32, 8, 65), Format(99, FLOAT32, 8, 64)):
        assert not table().find(byref(form), CPU)
    assert bool(table().find(byref(Format(CODES, FLOAT32, 8, 64)), CUDA)) == _core.has_cuda_codec


def test_a_failure_is_a_status_and_a_text() -> None:
    text = ctypes.create_string_buffer(64)
    table().describe(-1, text, 64)
    assert text.value == b"the host has no memory or no thread left"


@pytest.mark.gpu
def test_an_error_of_cuda_is_returned_and_not_left_behind() -> None:
    form = Format(CODES, FLOAT32, 8, 64)
    kernel = table().find(byref(form), CUDA).contents
    status = kernel.encode(byref(form), 256, 256, 64, Keys(0, 0), byref(Place(torch.cuda.device_count(), None, 0)))
    text = ctypes.create_string_buffer(256)
    table().describe(status, text, 256)
    assert text.value.startswith(b"cudaErrorInvalidDevice: ")
    assert torch.ones(3, device="cuda").sum().item() == 3
