"""Count pronouns in comments, docstrings and pages, per 1,000 words: ``python tests/words.py [--files] [PATH ...]``.

"What", "which" and "it" send the reader back to a noun that the writer knew. The bars are a little above the rates of
RMM, quack, Liger-Kernel and mimalloc. Code does not count: neither blocks, nor inline code, nor tables, nor addresses.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

# Of each family of words, the most that 1,000 words may hold.
BARS = {
    ("what",): 3.0,
    ("which", "that", "those"): 15.0,
    ("it", "its", "itself"): 12.0,
}

_BLOCK = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?P<ticks>`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)(?P=ticks)(?!`)", re.DOTALL)
_ADDRESS = re.compile(r"\b\w+://\S+|\]\([^)\s]*\)|^\s*\[[^\]]+\]: .*$", re.MULTILINE)
_TAG = re.compile(r"<!--.*?-->|</?[a-zA-Z][^>]*>", re.DOTALL)
_TABLE = re.compile(r"^ *\|.*$", re.MULTILINE)
_DOCTEST = re.compile(r"^ *(>>>|\.\.\. ).*$", re.MULTILINE)
_PRAGMA = re.compile(r"^# ?(type: |noqa|fmt: |mypy: |pragma: |ruff: |!)")
_WORD = re.compile(r"[A-Za-z]\w*")
# A string, a character or a raw string of C++, which may hold the signs of a comment; else a comment.
_CPP = re.compile(
    r'R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'|(?P<comment>//[^\n]*|/\*.*?\*/)',
    re.DOTALL,
)


def prose_of_markdown(text: str) -> str:
    """Return a page's text without blocks of code, inline code, tables, tags and addresses."""
    for pattern in (_BLOCK, _TABLE, _TAG, _INLINE, _ADDRESS):
        text = pattern.sub(" ", text)
    return text


def _prose_of_docstring(text: str) -> str:
    return prose_of_markdown(_DOCTEST.sub("", text))


def prose_of_python(source: str) -> str:
    """Return a module's comments and docstrings, those of attributes included, without the code in them."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    strings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    said = "\n".join(comment.lstrip("#") for comment in comments if not _PRAGMA.match(comment))
    return "\n".join([_prose_of_docstring(said), *map(_prose_of_docstring, strings)])


def prose_of_cpp(source: str) -> str:
    """Return the comments of C++ or CUDA, without inline code."""
    comments = [match["comment"] for match in _CPP.finditer(source) if match["comment"]]
    lines = (re.sub(r"^\s*(//+<?|/?\*+/?)|\*/$", "", line) for comment in comments for line in comment.splitlines())
    return _ADDRESS.sub(" ", _INLINE.sub(" ", "\n".join(lines)))


class Group(NamedTuple):
    """Files whose words are counted together."""

    name: str
    patterns: tuple[str, ...]
    prose: Callable[[str], str]

    def files(self, root: Path = ROOT) -> list[Path]:
        """Return the group's files below a folder, by name."""
        return sorted({path for pattern in self.patterns for path in root.glob(pattern)})


GROUPS = (
    Group("Python", ("pyactcomp/**/*.py", "pyactcomp/_core.pyi"), prose_of_python),
    Group("C++", tuple(f"csrc/**/*.{suffix}" for suffix in ("cpp", "hpp", "h", "cu", "cuh")), prose_of_cpp),
    Group("pages", ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md"), prose_of_markdown),
)


class Counts(NamedTuple):
    """Words of a text, and how many of them belong to each family of :data:`BARS`."""

    words: int
    found: tuple[int, ...]

    def rates(self) -> tuple[float, ...]:
        """Return each family's words per 1,000 words."""
        return tuple(1000 * found / max(self.words, 1) for found in self.found)

    def exceeded(self) -> list[str]:
        """Return the families above their bar, each with its rate and the bar."""
        return [
            f"{', '.join(family)}: {rate:.1f} of 1,000 words, at most {bar:g}"
            for (family, bar), rate in zip(BARS.items(), self.rates(), strict=True)
            if rate > bar
        ]


def count(prose: str) -> Counts:
    """Count the words of a text."""
    words = Counter(word.lower() for word in _WORD.findall(prose))
    return Counts(words.total(), tuple(sum(words[word] for word in family) for family in BARS))


def count_files(group: Group, paths: Iterable[Path]) -> dict[Path, Counts]:
    """Count the words of each file, read as files of the group are."""
    return {path: count(group.prose(path.read_text(encoding="utf-8"))) for path in paths}


def total(counts: Iterable[Counts]) -> Counts:
    """Add counts up."""
    parts = list(counts)
    found = zip(*(part.found for part in parts), strict=True)
    return Counts(sum(part.words for part in parts), tuple(map(sum, found)))


def _row(name: str, counts: Counts) -> str:
    cells = (
        f"{rate:6.1f}{'!' if rate > bar else ' '}" for rate, bar in zip(counts.rates(), BARS.values(), strict=True)
    )
    return f"{name:<48}{counts.words:>8}  " + "".join(f"{cell:>18}" for cell in cells)


def main() -> None:
    """Print a row for each group; ``--files`` adds its files, the worst first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="only these files and folders")
    parser.add_argument("--files", action="store_true", help="a row for each file too, the worst first")
    options = parser.parse_args()
    wanted = [path.resolve() for path in options.paths]
    print(f"{'per 1,000 words; ! is above the bar':<48}{'words':>8}  " + "".join(f"{'/'.join(f):>18}" for f in BARS))
    print(f"{'at most':<56}  " + "".join(f"{bar:>16.1f}  " for bar in BARS.values()))
    for group in GROUPS:
        files = [path for path in group.files() if not wanted or any(path.is_relative_to(folder) for folder in wanted)]
        if not files:
            continue
        counts = count_files(group, files)
        print(_row(group.name, total(counts.values())))
        if options.files:
            for path in sorted(files, key=lambda path: -sum(counts[path].found)):
                print(_row(f"  {path.relative_to(ROOT)}", counts[path]))


if __name__ == "__main__":
    main()
