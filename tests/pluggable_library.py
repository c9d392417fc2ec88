"""The C functions of ``pyactcomp._core``, through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

SETTERS = {
    "set_init_fn": "pyactcomp_init",
    "set_reset_fn": "pyactcomp_reset",
    "set_memory_fraction_fn": "pyactcomp_memory_fraction",
    "set_base_alloc_fn": "pyactcomp_base_alloc",
    "set_record_stream_fn": "pyactcomp_record_stream",
    "set_begin_allocate_to_pool": "pyactcomp_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "pyactcomp_end_allocate_to_pool",
    "set_release_pool": "pyactcomp_release_pool",
}
FUNCTIONS = [
    "pyactcomp_malloc",
    "pyactcomp_free",
    "pyactcomp_pool_malloc",
    "pyactcomp_pool_free",
    "pyactcomp_fault_count",
    "pyactcomp_last_error",
    *SETTERS.values(),
]


def load(path: str | Path) -> ctypes.CDLL:
    """Load the library with the types of the functions that tests call. An exception from one ends the process."""
    library = ctypes.CDLL(str(path))
    for name in ("pyactcomp_malloc", "pyactcomp_pool_malloc"):
        getattr(library, name).restype = ctypes.c_void_p
        getattr(library, name).argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    for name in ("pyactcomp_free", "pyactcomp_pool_free"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    library.pyactcomp_record_stream.restype = None
    library.pyactcomp_record_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.pyactcomp_base_alloc.restype = ctypes.c_void_p
    library.pyactcomp_base_alloc.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    library.pyactcomp_fault_count.restype = ctypes.c_uint64
    library.pyactcomp_last_error.restype = ctypes.c_char_p
    return library


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Return a function's address, as PyTorch's setters take it."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
