"""The Python snippets of the README and the pages beside it run as they stand, each in a process of its own, and print
what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest

from bench import report, tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
WORKS_WITH = ROOT / "docs" / "works_with.md"
MOST_LINES = 150


def _snippets(page: Path) -> list[tuple[str, str]]:
    """Return the snippets of a page, each with what it prints, or "" if the page does not say."""
    fences = r"^```python\n(.*?)^```(?:\n\nIt prints:\n\n```text\n(.*?)^```)?"
    return re.findall(fences, page.read_text(), flags=re.MULTILINE | re.DOTALL)


SNIPPETS = [snippet for snippet, _ in _snippets(README)]


def _marks(snippet: str) -> list[pytest.MarkDecorator]:
    """Return ``slow`` where Inductor calls the C++ compiler."""
    slow = re.search(r"\.compile\(|compile_blocks=True", snippet)
    return [*([pytest.mark.gpu] if "cuda" in snippet else []), *([pytest.mark.slow] if slow else [])]


@pytest.mark.parametrize(
    ("snippet", "printed"),
    [
        pytest.param(snippet, printed, marks=_marks(snippet), id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (snippet, printed) in enumerate(_snippets(page))
    ],
)
def test_snippet_runs(snippet: str, printed: str, tmp_path: Path) -> None:
    # As in a checkout, but what a snippet writes goes elsewhere.
    folder, file = tmp_path / "checkout", tmp_path / "snippet.py"
    folder.mkdir()
    (folder / "tests").symlink_to(ROOT / "tests")
    file.write_text(snippet)
    if "lightning" in snippet:
        pytest.importorskip("lightning", reason="lightning is not installed")
    # Torch's allocator can be replaced once in a process.
    done = forked.run(file, folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert printed in ("", done.stdout)


def test_readme_has_a_snippet_for_machines_without_a_gpu() -> None:
    assert any("cuda" not in snippet and "pyactcomp.compress(" in snippet for snippet in SNIPPETS)


@pytest.mark.parametrize("page", [WORKS_WITH, ROOT / "docs" / "allocator_behaviour.md"], ids=lambda page: page.stem)
def test_tables_of_what_works_name_only_tests_that_exist(page: Path) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    assert named, "the table of what works names no test"
    for path, test in named:
        source = (ROOT / path).read_text()
        assert not test or f"def {test}(" in source, f"{path} has no test {test}"


DRAWN = [page for page in [README, *(ROOT / "docs").rglob("*.md")] if "<!-- bench:" in page.read_text()]


@pytest.mark.parametrize("page", DRAWN, ids=lambda page: page.stem)
def test_measured_figures_are_those_of_the_committed_rows(page: Path) -> None:
    text = drawn = page.read_text()
    blocks = re.findall(r"<!-- bench:([\w-]+) -->", text)
    for block in blocks:
        suite, draw = report.TABLES[block]
        if content := draw(tables.load(ROOT / "bench" / "results", suite)):
            drawn = report.fill(drawn, block, content)
    assert drawn == text, "run python -m bench report --readme, with this page"


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES
