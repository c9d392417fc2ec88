"""The README's Python snippets run as they stand, each on its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
MOST_LINES = 150


@pytest.mark.parametrize(
    "snippet",
    [pytest.param(s, marks=pytest.mark.gpu if "cuda" in s else (), id=s.splitlines()[0]) for s in SNIPPETS],
)
def test_readme_snippet_runs(snippet: str) -> None:
    exec(compile(snippet, str(README), "exec"), {"__name__": "snippet"})


def test_readme_has_a_snippet_for_machines_without_a_gpu() -> None:
    assert any("cuda" not in snippet and "pyactcomp.compress(" in snippet for snippet in SNIPPETS)


def test_readme_names_only_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README.read_text())
    assert named, "the table of what works names no test"
    for path, test in named:
        source = (README.parent / path).read_text()
        assert not test or f"def {test}(" in source, f"{path} has no test {test}"


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES
