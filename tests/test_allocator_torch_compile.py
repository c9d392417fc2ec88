"""The build of the torch subclass finds its headers, and names a missing part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyactcomp import _core
from pyactcomp.allocator import build
from pyactcomp.errors import PyactcompError
from pyactcomp.torch_private import extensions


def test_headers_are_those_of_the_cuda_that_torch_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # nvidia-cuda-runtime beside torch, nvidia-cuda-crt in a virtual environment over it, and other CUDAs.
    for header in (
        *("system/cu12/include/cuda_runtime_api.h", "system/cu12/include/crt/host_defines.h"),
        *("system/cu13/include/cuda_runtime_api.h", "environment/cu13/include/crt/host_defines.h"),
        *("toolkit/include/cuda_runtime_api.h", "toolkit/include/crt/host_defines.h"),
    ):
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).touch()
    packages = SimpleNamespace(submodule_search_locations=[str(tmp_path / "environment"), str(tmp_path / "system")])
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: packages)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert build.cuda_headers() == (tmp_path / "environment/cu13/include", tmp_path / "system/cu13/include")
    (tmp_path / "environment/cu13/include/crt/host_defines.h").unlink()
    assert build.cuda_headers() == (tmp_path / "toolkit/include",)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA, and the build would succeed")
def test_building_under_a_torch_without_cuda_names_the_torch(tmp_path: Path) -> None:
    with pytest.raises(PyactcompError, match=r"torch \S+ is built without CUDA"):
        build.build_torch_allocator(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(PyactcompError, match=f"sources are not at {tmp_path}"):
        extensions.compile_command("_observer", tmp_path)


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PyactcompError, match="no C\\+\\+ compiler named 'no-such-compiler'"):
        extensions.compile_command("_observer")


@pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h")
def test_capsule_names_its_version() -> None:
    assert '"pyactcomp._core.runtime.v' in repr(_core.runtime_capsule())
