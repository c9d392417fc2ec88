"""A new thing touches few source files: for each kind of thing there is a patch, applied to a copy, tried and dropped.

``patches/*.patch`` are whole features but for their tests and pages, with no comments among the lines of context. Where
the tree has moved on from one, change the tree by hand and write it anew:
``git diff -U1 -- pyactcomp csrc > tests/patches/NAME.patch``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOURCES = ("pyactcomp", "csrc")

# Kind of thing -> the most source files that one may touch, and the packages that trying it takes.
BARS = {
    "activation": (4, ("triton", "transformers")),
    "setting": (4, ("pybind11",)),
    "verb": (2, ("typer", "rich", "humanize")),
    "width": (3, ("triton",)),
}


def touched(patch: str) -> set[str]:
    """Return the files that a patch changes, makes or takes away."""
    return set(re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)$", patch, re.MULTILINE))


def run(*command: str, tree: Path, **variables: str) -> None:
    done = subprocess.run(
        command, cwd=tree, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}{done.stderr}"


def test_every_patch_has_a_bar() -> None:
    assert {path.stem for path in (HERE / "patches").iterdir()} == set(BARS)


@pytest.mark.parametrize("kind", BARS)
def test_a_patch_touches_few_source_files(kind: str) -> None:
    files = touched((HERE / "patches" / f"{kind}.patch").read_text())
    assert {file.split("/")[0] for file in files} <= set(SOURCES)
    assert 0 < len(files) <= BARS[kind][0]


def test_a_file_that_a_patch_makes_or_takes_away_is_counted() -> None:
    patch = "--- /dev/null\n+++ b/a/new.py\n@@ -0,0 +1 @@\n+x\n--- a/b/old.py\n+++ /dev/null\n--- a/c.py\n+++ b/c.py\n"
    assert touched(patch) == {"a/new.py", "b/old.py", "c.py"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BARS)
def test_a_patched_tree_has_the_feature(kind: str, tmp_path: Path) -> None:
    missing = [name for name in BARS[kind][1] if find_spec(name) is None]
    if shutil.which("git") is None:
        missing.append("git")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    patch = str(HERE / "patches" / f"{kind}.patch")
    # A repository around the copy would make git look for the files at its root.
    run("git", "apply", "--unidiff-zero", patch, tree=tmp_path, GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    case = (sys.executable, str(HERE / "patch_cases.py"), kind)
    run(*case, tree=tmp_path, PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1")
