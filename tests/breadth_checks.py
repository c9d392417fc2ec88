"""How the tests of architectures run models of other packages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from bench.breadth_measure import quiet


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no library look for files elsewhere, nor fail a test by what it warns of; use one thread."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        quiet()
        yield
    torch.set_num_threads(threads)
