"""Contract under test: the native code builds for every architecture named, spills nothing and knows no torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyactcomp.torch_private.extensions import LIBRARIES

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
CUDA_SOURCES = sorted(CSRC.rglob("*.cu"))
TARGETS = {"sm_80": "arch=compute_80,code=sm_80", "sm_90": "arch=compute_90,code=sm_90"}
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-Werror=all-warnings", f"-I{CSRC}"]


def nvcc() -> str:
    found = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if found is None:
        pytest.skip("needs nvcc; install the CUDA toolkit and put nvcc on PATH")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_cuda_source_compiles_without_spilling(source: Path, target: str, tmp_path: Path) -> None:
    command = [nvcc(), *FLAGS, "-gencode", TARGETS[target], "-Xptxas=-v", "-c", str(source), "-o", str(tmp_path / "o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert spills, "ptxas reported no kernel"
    assert set(spills) == {("0", "0")}, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_cuda_source_contracts_nothing_in_ptx(source: Path, tmp_path: Path) -> None:
    ptx = tmp_path / "kernels.ptx"
    subprocess.run([nvcc(), *FLAGS, "-arch=compute_90", "-ptx", str(source), "-o", str(ptx)], check=True)
    text = ptx.read_text()
    assert ".visible .entry" in text or ".entry" in text
    # Divisions are IEEE, and nothing flushes subnormal numbers but the reciprocal's approximation, and what CUDA's own
    # functions of float64 are made of: their results are right to a few units in the last place.
    assert re.findall(r"\bdiv\.(?:full|approx)\S*", text) == []
    of_libraries = {"ex2.approx.ftz.f32", "rcp.approx.ftz.f64"} if source.stem == "cuda_halves" else set()
    assert set(re.findall(r"\b\w+\.(?:\w+\.)*ftz\.\w+", text)) <= {"rcp.approx.ftz.f32"} | of_libraries


def test_torch_is_included_in_libraries_alone_that_tell_their_release_of_torch() -> None:
    text = {
        str(path.relative_to(CSRC)): path.read_text()
        for path in CSRC.rglob("*")
        if path.suffix in {".cpp", ".hpp", ".cu", ".cuh", ".h"}
    }
    assert len(text) > 5
    included = {name: set(re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", each, re.M)) for name, each in text.items()}
    torchs = {name for name, headers in included.items() if any(re.match("(torch|ATen|c10)/", h) for h in headers)}
    # The allocator's header, and the folders of the library that packs and of phantom tensors.
    folders = ("observer/", "engine/", "functions/", "phantom/")
    assert {name for name in torchs if not name.startswith(folders)} == {"bindings/torch_headers.hpp"}
    while more := {name for name, headers in included.items() if headers & torchs} - torchs:
        torchs |= more
    compiled = {name for name in torchs if name.endswith((".cpp", ".cu"))}
    of_libraries = {source: name for name, library in LIBRARIES.items() for source in library.sources}
    assert compiled <= set(of_libraries)
    # What `load` compares with the torch that runs, and the module without torch has none of them.
    assert {name for source, name in of_libraries.items() if "PAC_BUILT_FOR" in text[source]} == set(LIBRARIES)
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert [source for source in compiled if f"csrc/{source}" in cmake] == []


def test_module_needs_neither_torch_nor_a_driver() -> None:
    from pyactcomp import _core

    if shutil.which("ldd") is None:
        pytest.skip("needs ldd")
    needed = subprocess.run(["ldd", _core.__file__], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed
    for library in ("libcuda.so", "libcudart.so", "libtorch", "libc10"):
        assert library not in needed


def test_module_loads_alone() -> None:
    # Without torch, by its path: neither torch nor a driver is there to lend it a symbol.
    from pyactcomp import _core

    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_core', {_core.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print('torch' in sys.modules, module.has_cuda_codec, module.has_cuda_allocator)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", str(_core.has_cuda_codec), str(_core.has_cuda_allocator)]


def test_the_allocator_over_cuda_includes_the_drivers_header_alone() -> None:
    # cuda.h is one file without includes of CUDA's: it is in NVIDIA's packages, and needs no nvcc.
    sources = [*(CSRC / "device").iterdir(), *(CSRC / "allocator").iterdir(), *(CSRC / "common").iterdir()]
    included = {
        header
        for path in sources
        for header in re.findall(r"^\s*#\s*include\s*<([^>]+)>", path.read_text(), re.M)
        if header.startswith("cu")
    }
    assert included == {"cuda.h"}


@pytest.mark.slow
@pytest.mark.parametrize("headers", ["OFF", "given"])
def test_configuring_says_whether_the_allocator_is_built(headers: str, tmp_path: Path) -> None:
    pybind11 = pytest.importorskip("pybind11")
    cmake = Path(sys.executable).with_name("cmake")
    if not cmake.exists():
        pytest.skip(f"needs cmake at {cmake}")
    folder = "OFF" if headers == "OFF" else str(tmp_path)
    settings = ["-DPAC_CUDA=OFF", f"-DPAC_CUDA_HEADERS={folder}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    command = [cmake, f"-S{ROOT}", f"-B{tmp_path / 'build'}", f"-DPython_EXECUTABLE={sys.executable}", *settings]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "CUDA kernels: none" in said
    if headers == "OFF":
        assert "CUDA allocator: none (no cuda.h: set CUDA_HOME, or pip install nvidia-cuda-runtime)" in said
    else:
        assert f"CUDA allocator: with the headers in {tmp_path}" in said


def test_every_launch_names_its_stream() -> None:
    for source in (*CUDA_SOURCES, *CSRC.rglob("*.cuh")):
        text = source.read_text()
        assert "<<<" not in text, f"{source.name}: launch through cudaLaunchKernel, whose status is checked"
        for call in re.findall(r"cudaLaunchKernel\(([^;]*)\);", text):
            assert "stream" in call
