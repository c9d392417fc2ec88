"""What tests share: the ``gpu`` marker, threads, seeds, hypothesis' settings, and an allocator that nobody enabled."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

# Another seed finds tests that pass by the luck of a draw: PYACTCOMP_TEST_SEED=1 make test.
SEED = int(os.environ.get("PYACTCOMP_TEST_SEED", "0"))

# readline, which pytest loads, exports the terminal's size to the processes that xdist starts. A console that finds it
# while it is made keeps that width, whatever a test asks for later.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

DRIVER = Path(__file__).parent / "cpp" / "fake_driver.cpp"

# A shared machine's pauses are no failures; the same examples in each run make a failure one to look into.
settings.register_profile("pyactcomp", deadline=None, derandomize=True)
settings.load_profile("pyactcomp")

# torch queues a seed for each kind of device that is not here, with the text of its stack: a millisecond of every seed.
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():
        _kind.manual_seed_all = lambda seed: None


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("triton_interpreter")
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Every worker would otherwise use all cores, and all of them would wait for each other.
        torch.set_num_threads(1)


def seed() -> None:
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    """A module draws the same tensors wherever it is imported, whichever modules were before it."""
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same tensors alone, after others and on any worker."""
    seed()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def settle() -> None:
    """Leave what is alive to the end of the process out of every later collection.

    Collected modules are a million objects, and the packages that tests import as many again. Each full collection, and
    there are hundreds, would walk them for a second.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    settle()
    # Dynamo empties the processor's caches to measure the guards of each graph: 20 ms, and the other worker's caches.
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        settle()


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that compiles a fake libcuda with some options, once, and returns the library's folder."""

    @functools.cache
    def compiled(*options: str) -> str:
        compiler = shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("needs a C++ compiler to stand in for the driver")
        folder = tmp_path_factory.mktemp("driver")
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *options]
        subprocess.run([*command, str(DRIVER), "-o", str(folder / "libcuda.so.1")], check=True)
        return str(folder)

    return compiled


@pytest.fixture
def allocator_not_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyactcomp.allocator import attach

    monkeypatch.delenv("PYACTCOMP_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYACTCOMP_DISABLE", raising=False)
    monkeypatch.setattr(attach, "_active", None)
