"""Compiles the subclass of torch's allocator for the running torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import PyactcompError
from ..torch_private import extensions

# From the packages nvidia-cuda-runtime, which torch brings, and nvidia-cuda-crt.
_CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")


def build_torch_allocator(directory: Path | None = None, *, source: Path | None = None) -> Path:
    """Compile ``pyactcomp._torch_allocator`` for the running torch; the module fits no other.

    Takes a C++ compiler (``CXX``, or ``c++``) and CUDA's headers, no nvcc, and about ten seconds. An existing module is
    replaced; a process that has loaded the old one keeps it.

    Parameters
    ----------
    directory : Path, optional
        Where the module goes, in a folder for this torch: by default ``torch_libraries`` in the installed package, or
        ``pyactcomp`` in the user's cache where the package is not writable.
    source : Path, optional
        The folder ``csrc`` of pyactcomp's sources. By default the folder in the installed package, or beside it in a
        checkout.

    Returns
    -------
    Path
        The module.

    Raises
    ------
    PyactcompError
        If torch is built without CUDA, something needed is missing, or the compiler fails; the error quotes the
        compiler.

    Examples
    --------
    >>> from pyactcomp.allocator.build import build_torch_allocator
    >>> build_torch_allocator()  # doctest: +SKIP
    PosixPath('/home/me/.cache/pyactcomp/2.13.0+cu130-0123456789ab/_torch_allocator.cpython-312-x86_64-linux-gnu.so')
    """
    if torch.version.cuda is None:
        raise PyactcompError(
            f"torch {torch.__version__} is built without CUDA, and has no allocator to subclass: install one with CUDA"
        )
    return extensions.build("_torch_allocator", directory, source=source, headers=cuda_headers())


def cuda_headers() -> tuple[Path, ...]:
    """Return the folders of CUDA's headers: NVIDIA's packages for torch's CUDA if complete, else the toolkit's.

    Raises
    ------
    PyactcompError
        If there are none.
    """
    for folders in _cuda_folders():
        if all(any((folder / name).exists() for folder in folders) for name in _CUDA_HEADERS):
            return folders
    raise PyactcompError(
        f"CUDA's headers ({', '.join(_CUDA_HEADERS)}) are nowhere: install the CUDA toolkit, or set CUDA_HOME, or, for "
        "CUDA 13, pip install nvidia-cuda-runtime nvidia-cuda-crt"
    )


def _cuda_folders() -> Iterator[tuple[Path, ...]]:
    # The system's packages and a virtual environment's have one of these each.
    major = (torch.version.cuda or "*").split(".")[0]
    packages = importlib.util.find_spec("nvidia")
    locations = (packages and packages.submodule_search_locations) or ()
    yield tuple(folder for location in locations for folder in sorted(Path(location).glob(f"cu{major}/include")))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield (Path(os.environ[variable]) / "include",)
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        yield (Path(nvcc).resolve().parents[1] / "include",)
    yield (Path("/usr/local/cuda/include"),)
