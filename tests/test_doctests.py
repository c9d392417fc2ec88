"""The examples in the docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "pyactcomp").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_doctest_examples_give_what_they_say(name: str) -> None:
    if name.startswith("pyactcomp.integrations."):
        pytest.importorskip(name.rpartition(".")[2], reason=f"{name} needs it")
    if name.startswith("pyactcomp.live."):  # what other tests left alive would count
        code = "import doctest, importlib, sys; sys.exit(doctest.testmod(importlib.import_module(sys.argv[1])).failed)"
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
