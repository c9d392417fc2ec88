"""The observer, with the engine in it, under the address and undefined-behaviour sanitizers: ``make sanitize``.

The engine's objects are Python's, its memory is torch's, and autograd calls it: so tests in Python run it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyactcomp.torch_private import extensions

TESTS = Path(__file__).parent
# Each stored form, the owner of each, how readers share it, threads, exceptions, edits, and how operators are observed.
MODULES = (
    *("engine_native", "engine_backward", "engine_ownership", "engine_sharing", "edited_after_saving"),
    *("forms", "recompute", "observer", "observer_tensors", "steps", "offload", "offload_compiled"),
)
# Torch hides the types that `vptr` would compare.
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all"
# Torch and Python never free some memory. The system gets large blocks back at once: a test waits for their address.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16", "UBSAN_OPTIONS": "print_stacktrace=1"}
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")


def libraries(compiler: str) -> list[str]:
    """Return the sanitizers' libraries, and the C++ library whose exceptions they watch."""
    command = [[compiler, f"-print-file-name={name}"] for name in LIBRARIES]
    found = [subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in command]
    missing = [each for each in found if not Path(each).is_absolute()]
    if missing:
        pytest.skip(f"needs g++ with its sanitizers' libraries: {compiler} does not find {', '.join(missing)}")
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_the_engine_is_right_under_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    preloaded = libraries(compiler)
    wrapper = tmp_path / "c++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {FLAGS}\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.delenv("CXXFLAGS", raising=False)  # with sanitizers g++ warns of torch's headers
    observer = extensions.build("_observer", tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "sanitized_observer"),
            *("-m", "not slow"),
            *(str(TESTS / f"test_{module}.py") for module in MODULES),
        ],
        # Python itself knows no sanitizers: their libraries have to be loaded first.
        env={**os.environ, **OPTIONS, "OBSERVER": str(observer), "PYTHONPATH": str(TESTS)}
        | {"LD_PRELOAD": " ".join(preloaded)},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert " passed" in done.stdout
