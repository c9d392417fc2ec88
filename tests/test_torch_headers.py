"""The libraries for torch compile against its headers, of the oldest and the newest release, where there is no GPU."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_headers

from pyactcomp.allocator import build
from pyactcomp.errors import PyactcompError
from pyactcomp.torch_private import extensions

# The oldest supported release, and the first whose headers are C++20.
RELEASES = ("2.11.0", "2.14.1")

# Torch's build generates this header, which a build without CUDA lacks.
GENERATED = "c10/cuda/impl/cuda_cmake_macros.h"


@pytest.fixture
def cuda_headers() -> tuple[Path, ...]:
    try:
        return build.cuda_headers()
    except PyactcompError as missing:
        pytest.skip(str(missing))


def errors(release: str, torch_folder: Path, headers: tuple[Path, ...]) -> str:
    """Return the compiler's messages for the libraries that do not compile."""
    messages = ""
    for name in extensions.LIBRARIES:
        command = extensions.compile_command(name, headers=headers, release=release, torch_headers=torch_folder)
        ran = subprocess.run([*command, "-Werror", "-fsyntax-only"], capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            messages += f"{name} does not compile:\n{ran.stderr}"
    return messages


@pytest.mark.slow
@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the headers are those of Linux on x86-64"
)
@pytest.mark.parametrize("release", RELEASES)
def test_libraries_compile_against_a_released_torch(
    release: str, cuda_headers: tuple[Path, ...], pytestconfig: pytest.Config
) -> None:
    folder = torch_headers.folder(release, pytestconfig.cache)
    assert (folder / GENERATED).exists()
    messages = errors(release, folder, cuda_headers)
    assert not messages, messages


@pytest.mark.slow
def test_libraries_compile_against_the_installed_torch(cuda_headers: tuple[Path, ...], tmp_path: Path) -> None:
    folder = Path(torch.__file__).parent / "include"
    if not (folder / GENERATED).exists():
        (tmp_path / GENERATED).parent.mkdir(parents=True)
        (tmp_path / GENERATED).write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    messages = errors(torch.__version__, folder, (*cuda_headers, tmp_path))
    assert not messages, messages


@pytest.mark.slow
def test_libraries_share_torchs_copy_of_the_c_plus_plus_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy, linked statically, shares the numbers of locale facets with the first, and prints no numbers."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    built = extensions.build("_observer", tmp_path)
    symbols = subprocess.run(["nm", "-D", "--defined-only", built], capture_output=True, text=True, check=True).stdout
    assert "PyInit__observer" in symbols
    assert not [line for line in symbols.splitlines() if " _ZNSt6locale" in line]


@pytest.mark.parametrize(
    ("offered", "outcome", "said"),
    [
        pytest.param((), pytest.skip.Exception, r"does not reach .* torch 2\.11\.0: ERROR", id="nothing"),
        pytest.param(("2.10.0", "2.11.0+cpu"), AssertionError, r"from versions: 2\.10\.0, 2\.11\.0\+cpu", id="others"),
    ],
)
def test_missing_headers_skip_with_the_reason_and_a_missing_release_fails(
    offered: tuple[str, ...],
    outcome: type[BaseException],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for release in offered:
        (tmp_path / f"torch-{release}-cp312-cp312-manylinux_2_28_x86_64.whl").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(outcome, match=said):
        torch_headers._wheel("2.11.0", tmp_path)
