"""Loads and compiles the two libraries built for one torch release: the torch allocator and the observer."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ..errors import PyactcompError

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Library:
    """A library compiled against torch's headers.

    Attributes
    ----------
    purpose : str
        Description, for errors.
    sources, links : tuple of str
        Source files below ``csrc``; torch libraries to link.
    remedy : str
        The command to build the library.
    """

    purpose: str
    sources: tuple[str, ...]
    links: tuple[str, ...]
    remedy: str


LIBRARIES = {
    "_torch_allocator": Library(
        "torch subclass",
        ("bindings/torch_allocator.cpp", "allocator/config.cpp", "allocator/present_segments.cpp"),
        ("c10", "c10_cuda", "torch_cpu"),
        "pyactcomp build-allocator",
    ),
    "_observer": Library(
        "observer of operators",
        ("observer/observer.cpp",),
        ("c10", "torch_cpu", "torch_python"),
        "pyactcomp build-observer",
    ),
}


def load(name: str) -> tuple[ModuleType | None, str | None]:
    """Return a library and None, or None and the reason with the remedy."""
    library = LIBRARIES[name]
    if importlib.util.find_spec(f"pyactcomp.{name}") is None:
        return None, f"its {library.purpose} is not built: run {library.remedy}"
    try:
        extension = importlib.import_module(f"pyactcomp.{name}")
    except ImportError as error:
        remedy = f"run {library.remedy}"
        return None, f"its {library.purpose} does not load with torch {torch.__version__} ({error}): {remedy}"
    if extension.BUILT_FOR != torch.__version__:
        return None, (
            f"its {library.purpose} is built for torch {extension.BUILT_FOR}, and this is {torch.__version__}: run "
            f"{library.remedy}"
        )
    return extension, None


def build(
    name: str, directory: Path | None = None, *, source: Path | None = None, headers: Sequence[Path] = ()
) -> Path:
    """Compile a library for the installed torch. No other torch can load the result.

    A process keeps an already loaded library.

    Parameters
    ----------
    name : str
        One of :data:`LIBRARIES`.
    directory : Path, optional
        Target folder; the installed package by default.
    source : Path, optional
        The folder ``csrc`` of pyactcomp's sources; by default the ``csrc`` beside the package.
    headers : sequence of Path
        Include folders in addition to torch's and Python's.

    Returns
    -------
    Path
        The module.

    Raises
    ------
    PyactcompError
        If the sources or the compiler are missing, or the compiler fails; includes the compiler's messages.
    """
    library = LIBRARIES[name]
    module = (directory or _PACKAGE) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with tempfile.TemporaryDirectory(dir=module.parent) as scratch:
        built = Path(scratch) / module.name
        folder = Path(torch.__file__).parent / "lib"
        links = (f"-L{folder}", *(f"-l{each}" for each in library.links))
        command = [*compile_command(name, source, headers), "-shared", *links, *_standard_library(), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise PyactcompError(
                f"the {library.purpose} does not compile for torch {torch.__version__}; it supports torch 2.11 and "
                f"later. The command was\n{' '.join(command)}\nand printed\n{result.stderr[-4000:]}"
            )
        built.replace(module)
    return module


def _needs_cxx20(release: str) -> bool:
    """Return whether the headers of a torch use C++20, as those from 2.14 on do."""
    major, minor = release.split(".")[:2]
    return (int(major), int(minor)) >= (2, 14)


def _standard_library() -> list[str]:
    """Return the C++ library that torch has loaded, for a compiler that would link a copy into the module.

    The facets of the two copies' locales share their numbers: a stream then prints a number through another facet.
    """
    with Path("/proc/self/maps").open() as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "/libstdc++.so" in line}
    return sorted(loaded)[:1]


def compile_command(
    name: str,
    source: Path | None = None,
    headers: Sequence[Path] = (),
    *,
    release: str = torch.__version__,
    torch_headers: Path | None = None,
) -> list[str]:
    """Return the compiler command for a library's sources, without link options and output.

    Parameters
    ----------
    name, source, headers
        As of :func:`build`.
    release : str
        The release of torch; by default the installed one.
    torch_headers : Path, optional
        The folder ``include`` of that release; by default the installed torch's.

    Returns
    -------
    list of str
        The command.

    Raises
    ------
    PyactcompError
        If there is no compiler, or the sources are missing.
    """
    source = source or _PACKAGE.parent / "csrc"
    files = [source / file for file in LIBRARIES[name].sources]
    if not all(file.exists() for file in files):
        raise PyactcompError(
            f"pyactcomp's sources are not at {source}: install it from a checkout (pip install --editable . "
            "--no-build-isolation), or pass the checkout's csrc as source"
        )
    compiler_name = os.environ.get("CXX", "c++")
    compiler = shutil.which(compiler_name)
    if compiler is None:
        raise PyactcompError(f"no C++ compiler named '{compiler_name}' is on PATH; install g++, or set CXX")
    include = torch_headers or Path(torch.__file__).parent / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", *headers, sysconfig.get_path("include"))
    return [
        compiler,
        f"-std={'c++20' if _needs_cxx20(release) else 'c++17'}",
        # Without NDEBUG torch's classes have other members.
        *("-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"),
        *("-Wall", "-Wextra", "-Wconversion", "-Wshadow"),
        # Messages show file paths relative to the repository.
        f"-ffile-prefix-map={source.parent}/=",
        f'-DPAC_BUILT_FOR="{release}"',
        f"-I{source}",
        *(f"-isystem{folder}" for folder in folders),
        *map(str, files),
    ]
