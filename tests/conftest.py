"""What tests share: the ``gpu`` marker, threads, hypothesis' settings, and an allocator that nobody has enabled."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# A shared machine's pauses are no failures; the same examples in each run make a failure one to look into.
settings.register_profile("pyactcomp", deadline=None, derandomize=True)
settings.load_profile("pyactcomp")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Every worker would otherwise use all cores, and all of them would wait for each other.
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def allocator_not_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyactcomp.allocator import attach

    monkeypatch.delenv("PYACTCOMP_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYACTCOMP_DISABLE", raising=False)
    monkeypatch.setattr(attach, "_active", None)
