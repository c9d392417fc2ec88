"""Loads and compiles the libraries built for one torch release: the torch allocator, the observer, phantom tensors.

Each lies in a folder named by the torch it is built for and by the sources it is built from: beside the package, where
the installation or a first use compiled it, or in the user's cache, where the package's folder is not writable.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ..errors import PyactcompError

_PACKAGE = Path(__file__).resolve().parents[1]
_BESIDE = _PACKAGE / "torch_libraries"
_log = logging.getLogger("pyactcomp")


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
    duration : str
        How long that takes.
    price : str
        What is lost without the library.
    fits_variants : bool
        Whether the library fits all of PyTorch's own builds of one release: for a CPU, for a CUDA, ...
    """

    purpose: str
    sources: tuple[str, ...]
    links: tuple[str, ...]
    remedy: str
    duration: str
    price: str
    fits_variants: bool


LIBRARIES = {
    "_torch_allocator": Library(
        "torch subclass",
        ("bindings/torch_allocator.cpp", "allocator/config.cpp", "allocator/segments.cpp"),
        ("c10", "c10_cuda", "torch_cpu"),
        "pyactcomp build-allocator",
        "ten seconds",
        "some of torch's memory functions raise without it",
        fits_variants=False,
    ),
    "_observer": Library(
        "observer of operators",
        ("observer/observer.cpp",),
        ("c10", "torch_cpu", "torch_python"),
        "pyactcomp build-observer",
        "a minute",
        "nothing is compressed without it",
        fits_variants=True,
    ),
    "_phantom": Library(
        "library of phantom tensors",
        ("phantom/phantom.cpp",),
        ("c10", "torch_cpu", "torch_python"),
        "pyactcomp build-phantom",
        "half a minute",
        "nothing is estimated without it",
        fits_variants=True,
    ),
}

# What PyTorch appends to the version of a release, built from one source for different devices.
_VARIANT = re.compile(r"(\d+(?:\.\d+)+)(?:\+(?:cpu|cu\d+|rocm[\d.]+|xpu))?")
_compiling = threading.Lock()
_failed: dict[str, str] = {}


def load(name: str) -> tuple[ModuleType | None, str | None]:
    """Return a library and None, or None and the reason with the remedy. Compiles nothing."""
    library = LIBRARIES[name]
    qualified = f"pyactcomp.{name}"
    extension = sys.modules.get(qualified)
    if extension is None:
        spec = importlib.machinery.PathFinder.find_spec(qualified, [str(folder) for folder in _folders(name)])
        if spec is None or spec.loader is None:
            return None, f"its {library.purpose} is not built for torch {torch.__version__}: run {library.remedy}"
        extension = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(extension)
        except ImportError as error:
            remedy = f"run {library.remedy}"
            return None, f"its {library.purpose} does not load with torch {torch.__version__} ({error}): {remedy}"
    if not _fits(extension.BUILT_FOR, library):
        return None, (
            f"its {library.purpose} is built for torch {extension.BUILT_FOR}, and this is {torch.__version__}: run "
            f"{library.remedy}"
        )
    sys.modules[qualified] = extension
    return extension, None


def load_or_build(name: str, build: Callable[[], Path]) -> tuple[ModuleType | None, str | None]:
    """Return a library as :func:`load`, compiled first if need be, with one line in the log.

    Of several processes one compiles, and the others wait. A process tries once.

    Parameters
    ----------
    name : str
        One of :data:`LIBRARIES`.
    build : callable
        Compiles the library, as :func:`build`.

    Returns
    -------
    tuple
        The library and None, or None and why it is missing: the reason, the remedy, and why compiling failed.
    """
    library = LIBRARIES[name]
    with _compiling:
        extension, reason = load(name)
        if extension is not None:
            return extension, None
        if name not in _failed:
            try:
                compile_command(name)  # what is missing needs no wait
                with _one_process(_place()):
                    extension, reason = load(name)
                    if extension is not None:
                        return extension, None
                    # A warning, which a program without logging shows too: a minute needs an explanation.
                    _log.warning(
                        "pyactcomp compiles its %s for torch %s, once: about %s",
                        *(library.purpose, torch.__version__, library.duration),
                    )
                    build()
                extension, reason = load(name)
                if extension is not None:
                    return extension, None
                _failed[name] = "what was compiled does not load"
            except (PyactcompError, OSError) as error:
                _failed[name] = str(error).partition("\n")[0]
        return None, f"{reason}. It could not be compiled here: {_failed[name]}"


def _fits(built_for: str, library: Library) -> bool:
    if built_for == torch.__version__:
        return True
    built, running = _VARIANT.fullmatch(built_for), _VARIANT.fullmatch(torch.__version__)
    return library.fits_variants and built is not None and running is not None and built[1] == running[1]


def _folders(name: str) -> Iterator[Path]:
    """Yield the folders with a library that fits, those for exactly this torch first."""
    digest = _digest(name)
    for exactly in (True, False):
        for parent in (_BESIDE, _cache()):
            for folder in sorted(parent.glob(f"*-{digest}")):
                built_for = folder.name.removesuffix(f"-{digest}")
                if (built_for == torch.__version__) == exactly and _fits(built_for, LIBRARIES[name]):
                    yield folder


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given) / "pyactcomp"


def _place() -> Path:
    """Return where a library goes that is compiled now."""
    if os.access(_PACKAGE, os.W_OK):
        return _BESIDE
    if not _cache().is_absolute():  # there is no home
        raise PyactcompError(f"neither {_PACKAGE} nor a cache is writable: set XDG_CACHE_HOME")
    return _cache()


def _sources() -> Path:
    """Return ``csrc``: inside an installed package, beside the package in a checkout."""
    inside = _PACKAGE / "csrc"
    return inside if inside.exists() else _PACKAGE.parent / "csrc"


def _digest(name: str, source: Path | None = None) -> str:
    """Return a digest of the sources of a library, with the headers of ours that they include."""
    root = source or _sources()
    digest, seen = hashlib.sha256(), set[str]()
    wanted = list(LIBRARIES[name].sources)
    while wanted:
        file = wanted.pop()
        if file not in seen and (root / file).exists():
            seen.add(file)
            text = (root / file).read_text()
            digest.update(text.encode())
            wanted += re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
    return digest.hexdigest()[:12]


def folder_of(name: str, source: Path | None = None) -> str:
    """Return the name of the folder of a library for the running torch."""
    return f"{torch.__version__}-{_digest(name, source)}"


@contextlib.contextmanager
def _one_process(place: Path) -> Iterator[None]:
    """Let one process at a time into the block, where the file system has locks."""
    import fcntl

    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(
    name: str, directory: Path | None = None, *, source: Path | None = None, headers: Sequence[Path] = ()
) -> Path:
    """Compile a library for the installed torch.

    A process keeps an already loaded library.

    Parameters
    ----------
    name : str
        One of :data:`LIBRARIES`.
    directory : Path, optional
        The folder with a folder for each torch; by default ``torch_libraries`` in the installed package if that is
        writable, otherwise ``pyactcomp`` in the user's cache.
    source : Path, optional
        The folder ``csrc`` of pyactcomp's sources; by default the ``csrc`` in or beside the package.
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
    command = compile_command(name, source, headers)
    target = (directory or _place()) / folder_of(name, source)
    target.mkdir(parents=True, exist_ok=True)
    module = target / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        built = Path(scratch) / module.name
        folder = Path(torch.__file__).parent / "lib"
        links = (f"-L{folder}", *(f"-l{each}" for each in library.links))
        command += ["-shared", *links, *_standard_library(), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise PyactcompError(
                f"the {library.purpose} does not compile for torch {torch.__version__} ({library.remedy} shows why); "
                f"it supports torch 2.11 and later. The command was\n{' '.join(command)}\nand printed\n"
                f"{result.stderr[-4000:]}"
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

    It has the options of ``CXXFLAGS``.

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
        If the compiler, Python's headers or the sources are missing.
    """
    source = source or _sources()
    files = [source / file for file in LIBRARIES[name].sources]
    if not all(file.exists() for file in files):
        raise PyactcompError(
            f"pyactcomp's sources are not at {source}: install it from a checkout (pip install .), or pass the "
            "checkout's csrc as source"
        )
    compiler_name = os.environ.get("CXX", "c++")
    compiler = shutil.which(compiler_name)
    if compiler is None:
        raise PyactcompError(f"no C++ compiler named '{compiler_name}' is on PATH; install g++, or set CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise PyactcompError(
            f"Python's headers are not at {sysconfig.get_path('include')}; install them (apt-get install python3-dev)"
        )
    include = torch_headers or Path(torch.__file__).parent / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", *headers, sysconfig.get_path("include"))
    return [
        compiler,
        f"-std={'c++20' if _needs_cxx20(release) else 'c++17'}",
        # Without NDEBUG torch's classes have other members.
        *("-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"),
        *("-Wall", "-Wextra", "-Wconversion", "-Wshadow"),
        *shlex.split(os.environ.get("CXXFLAGS", "")),
        # Messages show file paths relative to the repository.
        f"-ffile-prefix-map={source.parent}/=",
        f'-DPAC_BUILT_FOR="{release}"',
        f"-I{source}",
        *(f"-isystem{folder}" for folder in folders),
        *map(str, files),
    ]
