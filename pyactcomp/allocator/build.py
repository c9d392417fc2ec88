"""Compiles the subclass of torch's allocator for the torch that runs here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import PyactcompError

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = ("bindings/torch_allocator.cpp", "allocator/config.cpp")


def build_torch_allocator(directory: Path | None = None, *, source: Path | None = None) -> Path:
    """Compile ``pyactcomp._torch_allocator`` for the running torch, which alone can load it.

    Takes a C++ compiler (``CXX``, or ``c++``) and CUDA's headers, no nvcc, and about ten seconds. A module that is
    there already is replaced; a process that has loaded it keeps it.

    Parameters
    ----------
    directory : Path, optional
        Where the module goes: the installed package by default.
    source : Path, optional
        The folder ``csrc`` of pyactcomp's sources. By default the one beside the package, which is there where
        pyactcomp is installed with ``pip install --editable``.

    Returns
    -------
    Path
        The module.

    Raises
    ------
    PyactcompError
        If torch is built without CUDA, something needed is missing, or the compiler fails; with its messages.

    Examples
    --------
    >>> from pyactcomp.allocator.build import build_torch_allocator
    >>> build_torch_allocator()  # doctest: +SKIP
    PosixPath('/home/me/pyactcomp/pyactcomp/_torch_allocator.cpython-312-x86_64-linux-gnu.so')
    """
    if torch.version.cuda is None:
        raise PyactcompError(
            f"torch {torch.__version__} is built without CUDA, and has no allocator to subclass: install one with CUDA"
        )
    module = (directory or _PACKAGE) / f"_torch_allocator{sysconfig.get_config_var('EXT_SUFFIX')}"
    with tempfile.TemporaryDirectory(dir=module.parent) as scratch:
        built = Path(scratch) / module.name
        libraries = Path(torch.__file__).parent / "lib"
        command = [*compile_command(source), "-shared", f"-L{libraries}", "-lc10", "-lc10_cuda", "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise PyactcompError(
                f"the torch subclass does not compile for torch {torch.__version__}; it is written for 2.11 and "
                f"later. The command was\n{' '.join(command)}\nand said\n{result.stderr[-4000:]}"
            )
        built.replace(module)
    return module


def compile_command(source: Path | None = None) -> list[str]:
    """Return the compiler's command for the module's sources, up to what is to be made of them.

    Raises
    ------
    PyactcompError
        If there is no compiler, CUDA's headers are nowhere, or the sources are missing.
    """
    source = source or _PACKAGE.parent / "csrc"
    files = [source / name for name in _SOURCES]
    if not all(file.exists() for file in files):
        raise PyactcompError(
            f"pyactcomp's sources are not at {source}: install it from a checkout (pip install --editable . "
            "--no-build-isolation), or pass the checkout's csrc as source"
        )
    name = os.environ.get("CXX", "c++")
    compiler = shutil.which(name)
    if compiler is None:
        raise PyactcompError(f"no C++ compiler named '{name}' is on PATH; install g++, or set CXX")
    include = Path(torch.__file__).parent / "include"
    return [
        compiler,
        *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wconversion", "-Wshadow"),
        # Messages name files as the repository does, not this machine.
        f"-ffile-prefix-map={source.parent}/=",
        f'-DPAC_BUILT_FOR="{torch.__version__}"',
        f"-I{source}",
        *(f"-isystem{folder}" for folder in (include, cuda_headers(), sysconfig.get_path("include"))),
        *map(str, files),
    ]


def cuda_headers() -> Path:
    """Return the folder of CUDA's headers: those installed with torch if they are whole, else the toolkit's.

    Raises
    ------
    PyactcompError
        If there are none.
    """
    for folder in _cuda_folders():
        # CUDA 13 keeps these in two packages, and torch needs only the first.
        if all((folder / name).exists() for name in ("cuda_runtime_api.h", "crt/host_defines.h")):
            return folder
    raise PyactcompError("CUDA's headers (cuda_runtime_api.h) are nowhere: install the CUDA toolkit, or set CUDA_HOME")


def _cuda_folders() -> Iterator[Path]:
    wheels = importlib.util.find_spec("nvidia")
    for location in (wheels and wheels.submodule_search_locations) or ():
        yield from sorted(Path(location).glob("*/include"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable]) / "include"
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        yield Path(nvcc).resolve().parents[1] / "include"
    yield Path("/usr/local/cuda/include")
