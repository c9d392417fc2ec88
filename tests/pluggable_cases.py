"""Cases of test_allocator_pluggable.py, a process each; the first argument is the library's path. No torch here."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import warnings
from pathlib import Path
from types import ModuleType

import child_script
import pluggable_library

MIB = 1 << 20


def loading_starts_nothing(path: str) -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    pluggable_library.load(path)
    assert len(list(Path("/proc/self/task").iterdir())) == threads
    assert threading.active_count() == 1
    maps = Path("/proc/self/maps").read_text()
    assert Path(path).name in maps
    # Neither the driver nor a shared runtime came with it.
    assert "libcuda" not in maps


def pool_malloc_without_a_device(path: str) -> None:
    library = pluggable_library.load(path)
    for fault in (1, 2):
        assert library.pyactcomp_pool_malloc(MIB, 0, None) is None
        assert library.pyactcomp_fault_count() == fault
        assert b"CUDA" in library.pyactcomp_last_error()


def module_of(path: str) -> ModuleType:
    """Return the library as the Python module that it is, too."""
    spec = importlib.util.spec_from_file_location("pyactcomp._core", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_an_unusable_driver(path: str, said: str) -> None:
    library = pluggable_library.load(path)
    assert library.pyactcomp_pool_malloc(MIB, 0, None) is None
    assert said in library.pyactcomp_last_error().decode(), library.pyactcomp_last_error()


def with_a_fake_driver(path: str, pieces: str) -> None:
    """Blocks and a segment of the one device; ``pieces`` tells whether physical memory is mapped."""
    library, driver = pluggable_library.load(path), ctypes.CDLL("libcuda.so.1")
    driver.fake_left.restype = driver.fake_created.restype = ctypes.c_ulonglong
    blocks = [library.pyactcomp_malloc(size * MIB, 0, None) for size in (1, 30, 5)]
    segment = library.pyactcomp_pool_malloc(2 * MIB, 0, None)
    assert None not in blocks
    assert segment is not None
    assert len({*blocks, segment}) == 4
    assert driver.fake_left() >= 38 * MIB
    assert (driver.fake_created() > 0) == (pieces == "True")
    assert library.pyactcomp_pool_malloc(2048 * MIB, 0, None) is None  # out of memory is no fault
    library.pyactcomp_record_stream(blocks[0], 7)
    for block in blocks:
        library.pyactcomp_free(block, 0, 0, None)
    library.pyactcomp_pool_free(segment, 2 * MIB, 0, None)
    library.pyactcomp_reset()
    assert library.pyactcomp_last_error() == b""
    assert driver.fake_left() == 0


def a_refusal_is_told_once(path: str, *expected: str) -> None:
    """Two threads allocate first, then the main one; ``expected`` is in the one warning, or there is none."""
    module_of(path)
    library = pluggable_library.load(path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=library.pyactcomp_malloc, args=(MIB, 0, None)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert library.pyactcomp_malloc(MIB, 0, None) is not None
    texts = [str(warning.message) for warning in told]
    assert len(texts) == (1 if expected else 0), texts
    assert all(part in texts[0] for part in expected), texts
    assert all(warning.category is UserWarning for warning in told)


def free_of_an_unknown_address(path: str) -> None:
    library = pluggable_library.load(path)
    library.pyactcomp_free(0x7F0000001000, 512, 0, None)
    assert library.pyactcomp_fault_count() == 1
    assert b"0x7f0000001000" in library.pyactcomp_last_error()


def no_bytes(path: str) -> None:
    library = pluggable_library.load(path)
    assert library.pyactcomp_malloc(0, 0, None) is None
    assert library.pyactcomp_pool_malloc(0, 0, None) is None
    library.pyactcomp_free(None, 0, 0, None)
    library.pyactcomp_pool_free(None, 0, 0, None)
    assert library.pyactcomp_fault_count() == 0
    assert library.pyactcomp_last_error() == b""


def link_on_a_fake_driver(path: str) -> None:
    """Copies to the host and back; the fake driver says of each pair of events that 2 ms lie between them."""
    link, driver = module_of(path).CudaLink(0), ctypes.CDLL("libcuda.so.1")
    driver.fake_left.restype = driver.fake_pinned.restype = driver.fake_copied.restype = ctypes.c_ulonglong
    assert link.pci_address == "0000:1b:00.0"
    assert not link.is_integrated
    assert link.measure(MIB, 3) == (3 * MIB / 2e-3, 3 * MIB / 2e-3)
    assert driver.fake_copied() == 2 * 4 * MIB  # a first copy each way is not timed
    assert driver.fake_pinned() == driver.fake_left() == 0


def record_stream_of_foreign_memory(path: str) -> None:
    library = pluggable_library.load(path)
    library.pyactcomp_record_stream(0x7F0000001000, None)
    library.pyactcomp_record_stream(None, None)
    assert library.pyactcomp_fault_count() == 0


def throws(path: str, caller: str, name: str, kind: str, expected: str) -> None:
    """The function throws a std::exception whose text has ``expected`` in it, twice over."""
    library = pluggable_library.load(path)
    call = ctypes.CDLL(caller).throws
    call.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong]
    for _ in range(2):
        text = ctypes.create_string_buffer(1024)
        assert call(pluggable_library.address_of(library, name), int(kind), text, len(text)) == 1
        assert expected in text.value.decode(), text.value.decode()


if __name__ == "__main__":
    child_script.main(globals())
