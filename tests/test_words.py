"""The words of comments, docstrings and pages: the counter counts right, and the texts keep to the bars."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import words

# Groups whose texts keep to the bars.
HELD = ("pages", "Python", "C++")

PAGE = """\
# What it is

It packs `what it saves` and ``which `that` is``; [that page](https://example.org/which/that).

```python
it = "what which that"
```

| what | which |
|---|---|
| it | that |

<!-- which that those -->
See https://what.it/which. Those <b class="it">which</b> end here, itself.
"""

MODULE = '''\
"""What a module says of itself."""

import os  # it counts

# A comment: which `that` counts, and `it` is code.
which = "it, in a string, is no prose"  # noqa: that
that: int = 1
"""The documentation of an attribute: those."""


class Room:
    """Its docstring.

    >>> it = which
    """

    def method(self) -> str:
        return """it is returned"""
'''

SOURCE = """\
// What it does: `which` is code.
const char* kText = "// it is a string";  // that one
const char* kRaw = R"x(/* which */ " it)x"; int n = 1'000'000; char c = '"'; /* those
 * of a block, its */
/// Itself.
int which = it;
"""


@pytest.mark.parametrize(
    ("prose", "text", "found", "number"),
    [
        # What it is; It packs and that page; See Those which end here itself
        (words.prose_of_markdown, PAGE, (1, 3, 3), 14),
        # What a module says of itself; it counts; A comment which counts and is code;
        # The documentation of an attribute those; Its docstring
        (words.prose_of_python, MODULE, (1, 2, 3), 23),
        # What it does is code; that one; those of a block its; Itself
        (words.prose_of_cpp, SOURCE, (1, 2, 3), 13),
    ],
    ids=["markdown", "python", "c++"],
)
def test_words_are_counted_outside_of_code(prose, text: str, found: tuple[int, ...], number: int) -> None:
    assert words.count(prose(text)) == (number, found)


def test_words_are_whole_and_of_either_case() -> None:
    assert words.count("Whatever items: somewhat, thatch, IT'S; what-if, Which. 12 34").found == (1, 1, 1)


def test_inline_code_does_not_reach_over_a_paragraph() -> None:
    assert words.count(words.prose_of_markdown("a ` b\n\nit and ` that")).found == (0, 1, 1)


def test_rates_are_held_against_the_bars() -> None:
    assert words.Counts(1000, (3, 15, 12)).exceeded() == []
    assert words.Counts(1000, (4, 15, 13)).exceeded() == [
        "what: 4.0 of 1,000 words, at most 3",
        "it, its, itself: 13.0 of 1,000 words, at most 12",
    ]
    assert words.total([words.Counts(10, (1, 0, 2)), words.Counts(5, (0, 3, 1))]) == (15, (1, 3, 3))


def test_each_group_has_files() -> None:
    for group in words.GROUPS:
        assert group.files(), group.name
    pages = {str(path.relative_to(words.ROOT)) for path in words.GROUPS[-1].files()}
    assert {"README.md", "docs/how.md", "docs/api/functional.md"} <= pages


@pytest.mark.parametrize("group", [group for group in words.GROUPS if group.name in HELD], ids=lambda group: group.name)
def test_texts_keep_to_the_bars(group: words.Group) -> None:
    counts = words.count_files(group, group.files())
    worst = sorted(counts, key=lambda path: -sum(counts[path].found))[:5]
    names = [str(path.relative_to(words.ROOT)) for path in worst]
    assert words.total(counts.values()).exceeded() == [], f"name the noun; most pronouns are in {names}"


def test_the_command_prints_a_row_for_each_group_and_file() -> None:
    script = Path(words.__file__)
    done = subprocess.run(
        [sys.executable, script, "--files", words.ROOT / "docs"], capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()[2:]]
    assert names[0] == "pages"
    assert "docs/how.md" in names[1:]
    assert "README.md" not in names
