"""Headers of released torch with CUDA, taken from the wheel: a build without CUDA lacks some of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

# The headers are the same for every Python; torch's wheels for Linux have this tag.
_DOWNLOAD = (
    *("download", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--retries=1", "--timeout=30"),
    *("--no-deps", "--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64"),
)
# Half a gigabyte, over a slow network.
_LIMIT_S = 600
# The words of pip where no index answers, and where a download breaks off; of Python where there is no pip.
UNREACHABLE = ("(from versions: none)", "connection broken by", "timed out", "No module named pip")


def folder(release: str, cache: pytest.Cache) -> Path:
    """Return ``include`` of the release, kept in pytest's cache; skips the test where pip reaches no index."""
    kept = cache.mkdir("torch-headers") / release
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            with zipfile.ZipFile(_wheel(release, Path(scratch))) as wheel:
                wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith("torch/include/")])
            # An interrupted run leaves no half of a folder.
            (Path(scratch) / "torch" / "include").rename(kept)
    return kept


def _wheel(release: str, directory: Path) -> Path:
    # Not ==, which a build without CUDA (2.13.0+cpu) satisfies too.
    command = [sys.executable, "-m", "pip", *_DOWNLOAD, f"--dest={directory}", f"torch==={release}"]
    # The machine's constraints on releases of torch are for what it installs.
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not download the headers of torch {release} within {_LIMIT_S} s")
    if ran.returncode != 0 and any(words in ran.stderr for words in UNREACHABLE):
        pytest.skip(f"pip does not reach the headers of torch {release}: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    [wheel] = directory.glob("*.whl")
    return wheel
