"""The C functions of the library where no GPU is: they are there, and say so without taking the process with them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pluggable_library
import pytest
from child_script import run_case

from pyactcomp import _core

pytestmark = pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h")

CASES = "pluggable_cases.py"
# An exception cannot pass through ctypes: this stands where torch does.
CALLER = r"""
#include <cstdio>
#include <exception>
extern "C" int throws(void (*call)(), int kind, char* text, unsigned long size) {
  try {
    if (kind == 0) reinterpret_cast<void* (*)(unsigned long, int, void*)>(call)(1024, 0, nullptr);
    if (kind == 1) reinterpret_cast<void (*)(int)>(call)(1);
    if (kind == 2) reinterpret_cast<void* (*)(void*, unsigned long*)>(call)(&text, nullptr);
  } catch (const std::exception& error) {
    std::snprintf(text, size, "%s", error.what());
    return 1;
  }
  return 0;
}
"""


def _run(case: str, *arguments: str, **environment: str) -> None:
    # Also where there is a GPU: these are about its absence.
    run_case(CASES, case, str(_core.__file__), *arguments, CUDA_VISIBLE_DEVICES="", **environment)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to stand in for torch")
    source = tmp_path_factory.mktemp("caller") / "caller.cpp"
    source.write_text(CALLER)
    library = source.with_suffix(".so")
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize("name", pluggable_library.FUNCTIONS)
def test_function_is_exported(name: str) -> None:
    assert pluggable_library.address_of(pluggable_library.load(_core.__file__), name) != 0


def test_loading_starts_nothing() -> None:
    _run("loading_starts_nothing")


def test_pool_malloc_without_a_device_gives_null_and_keeps_why() -> None:
    _run("pool_malloc_without_a_device")


def test_free_of_an_unknown_address_is_kept_as_a_fault() -> None:
    _run("free_of_an_unknown_address")


def test_nothing_is_asked_of_the_device_for_no_bytes() -> None:
    _run("no_bytes")


def test_record_stream_leaves_foreign_memory_alone() -> None:
    _run("record_stream_of_foreign_memory")


def test_malloc_without_a_device_throws(caller: Path) -> None:
    _run("throws", str(caller), "pyactcomp_malloc", "0", "CUDA")


def test_malformed_settings_are_named_when_cuda_is_initialised(caller: Path) -> None:
    settings = "max_split_size_mb:tiny"
    _run("throws", str(caller), "pyactcomp_init", "1", "PYACTCOMP_ALLOC_CONF", PYACTCOMP_ALLOC_CONF=settings)


def test_base_of_an_unknown_address_throws(caller: Path) -> None:
    _run("throws", str(caller), "pyactcomp_base_alloc", "2", "pyactcomp_base_alloc")


@pytest.mark.parametrize(("growth", "pieces"), [("vmm", True), ("malloc", False)])
def test_memory_comes_from_the_driver_and_goes_back(growth: str, pieces: bool, fake_driver: Callable[..., str]) -> None:
    settings = {"LD_LIBRARY_PATH": fake_driver(), "PYACTCOMP_ALLOC_CONF": f"growth:{growth}"}
    _run("with_a_fake_driver", str(pieces), **settings)


def test_copies_to_the_host_and_back_are_measured(fake_driver: Callable[..., str]) -> None:
    _run("link_on_a_fake_driver", LD_LIBRARY_PATH=fake_driver())


def test_a_driver_without_virtual_memory_serves_by_malloc(fake_driver: Callable[..., str]) -> None:
    _run("with_a_fake_driver", "False", LD_LIBRARY_PATH=fake_driver("-DcuMemSetAccess=absent"))


@pytest.mark.parametrize(("refused", "pieces"), [(1, True), (2, False)])
def test_a_driver_that_refuses_access_serves_without_rdma_or_by_malloc(
    refused: int, pieces: bool, fake_driver: Callable[..., str]
) -> None:
    """WSL2 announces RDMA, creates and maps memory with it, and refuses access; another driver refuses any mapping."""
    _run("with_a_fake_driver", str(pieces), LD_LIBRARY_PATH=fake_driver(f"-DFAKE_REFUSES_ACCESS={refused}"))


@pytest.mark.parametrize(
    ("option", "growth", "said"),
    [
        ("-DFAKE_REFUSES_ACCESS=1", "vmm", ()),
        ("-DFAKE_REFUSES_ACCESS=2", "vmm", ("cuMemSetAccess failed", "grows by cudaMalloc", "growth:malloc")),
        ("-DFAKE_REFUSES_ACCESS=2", "malloc", ()),
        ("-DcuMemSetAccess=absent", "vmm", ("no virtual memory management", "grows by cudaMalloc")),
    ],
)
def test_growth_by_malloc_where_mapping_was_asked_for_is_told_once(
    option: str, growth: str, said: tuple[str, ...], fake_driver: Callable[..., str]
) -> None:
    settings = {"LD_LIBRARY_PATH": fake_driver(option), "PYACTCOMP_ALLOC_CONF": f"growth:{growth}"}
    _run("a_refusal_is_told_once", *said, **settings)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("-DcuMemAlloc_v2=absent", "the CUDA driver has no cuMemAlloc_v2; a newer driver is needed"),
        ("-DcuGetErrorString=absent", "the CUDA driver has no cuGetErrorString; a newer driver is needed"),
        ("-DFAKE_INIT_STATUS=3", "forked from one that had initialised CUDA"),
        ("-DFAKE_INIT_STATUS=100", "cuInit failed: a fault of the fake driver"),
    ],
)
def test_an_unusable_driver_is_told(option: str, said: str, fake_driver: Callable[..., str]) -> None:
    _run("with_an_unusable_driver", said, LD_LIBRARY_PATH=fake_driver(option))
