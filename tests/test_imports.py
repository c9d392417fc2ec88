"""Data flows one way, and imports follow it: every arrow between modules stands here, or the test fails."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pyactcomp"

BOTTOM = {"errors", "format", "reference", "torch_private", "_version"}
KERNELS = {"kernels", "_core"}
CODEC = BOTTOM | KERNELS | {"codec", "layouts"}
READERS = {"extensions", "forms", "observer", "reader_table", "readers", "seeds"}
MODEL = (
    CODEC
    | READERS
    | {"config", "policy", "saved", "record", "redo", "narrow", "halves"}
    | {*("factors", "packing", "engine", "session")}
)
FUNCTIONS = CODEC | {"forms", "functional", "halves", "observer", "redo", "seeds"}
CALLS = MODEL | {"compress", "report", "verify", "checked", "state"}

# Module, or the package it is in -> what it may import; top first. Nothing may import what is not in its row.
ALLOWED = {
    "__init__": CALLS | {"ops", "functional", "allocator"},
    "__main__": {"cli"},
    "cli": {"_core", "_version", "allocator", "codec", "compress", "errors", "extensions", "reference", "snapshots"}
    | {"torch_private_tests"},
    "integrations": {"compress", "report"},
    "verify": MODEL | {"checked", "compress", "state"},
    "checked": MODEL | {"compress"},
    "state": {"torch_private"},
    "report": MODEL | {"compress", "fusions"},
    "compress": MODEL | {"fusions", "scriptable"},
    "scriptable": {"errors", "fusions"},
    "session": MODEL - {"session"},
    "engine": MODEL - {"engine", "session"},
    "packing": CODEC | {"config", "forms", "halves", "policy", "saved", "seeds"},
    "factors": {"forms", "reader_table", "saved", "torch_private"},
    "fusions": FUNCTIONS | {"config", "fusions", "saved"},
    "functional": FUNCTIONS | {"policy", "saved"},
    "record": BOTTOM | {"policy", "saved"},
    "redo": BOTTOM | {"forms", "layouts", "observer", "policy", "saved"},
    "narrow": KERNELS,
    "halves": KERNELS | {"forms", "narrow"},
    "saved": BOTTOM | KERNELS | {"forms", "layouts", "observer"},
    "observer": {"extensions", "forms", "reader_table", "readers", "torch_private"},
    "readers": {"errors", "forms", "reader_table"},
    "reader_table": {"forms"},
    "forms": set(),
    "extensions": {"errors"},
    "policy": BOTTOM,
    "config": CODEC,
    "ops": CODEC,
    "codec": BOTTOM | KERNELS | {"layouts"},
    "layouts": set(),
    "allocator": {"errors", "extensions", "snapshots", "torch_private", "_core"},
    "snapshots": {"errors", "_core"},
    "kernels": {"errors", "format", "kernels", "torch_private", "_core"},
    "reference": {"format"},
    "torch_private_tests": {"torch_private"},
    "torch_private": set(),
    "format": set(),
    "seeds": set(),
    "errors": set(),
    "_version": set(),
}

# File by file in these rooms: which files of its own room each one imports.
FILES = {
    "allocator": {"attach", "observe"},
    "allocator.attach": {"plain", "settings", "subclass"},
    "allocator.build": set(),
    "allocator.observe": {"attach", "settings"},
    "allocator.plain": set(),
    "allocator.run": {"attach", "settings"},
    "allocator.settings": set(),
    "allocator.snapshot": set(),
    "allocator.subclass": set(),
    "snapshots": {"explain", "reader", "replay", "tune"},
    "snapshots.beginning": {"mapped_segments", "model"},
    "snapshots.call_stacks": {"model"},
    "snapshots.candidates": {"model", "replay"},
    "snapshots.explain": {"call_stacks", "candidates", "explanation", "failed_request", "lifetimes", "model", "reader"}
    | {"replay", "segments", "steps"},
    "snapshots.explanation": {"steps"},
    "snapshots.failed_request": {"model"},
    "snapshots.lifetimes": {"model"},
    "snapshots.mapped_segments": {"model"},
    "snapshots.model": set(),
    "snapshots.reader": {"beginning", "model", "releases"},
    "snapshots.releases": {"model"},
    "snapshots.replay": {"model"},
    "snapshots.segments": {"lifetimes", "mapped_segments", "model"},
    "snapshots.steps": {"lifetimes", "model"},
    "snapshots.timeline": {"call_stacks", "explain", "lifetimes", "model", "segments"},
    "snapshots.trials": {"replay"},
    "snapshots.tune": {"candidates", "failed_request", "model", "reader", "replay", "trials"},
    "cli": {"commands"},
    "cli.commands": {"demo.command", "doctor", "explain", "replay", "shared", "tune"},
    "cli.demo": set(),
    "cli.demo.command": {"demo.measured", "demo.plot", "demo.training", "shared"},
    "cli.demo.measured": set(),
    "cli.demo.memory": set(),
    "cli.demo.model": set(),
    "cli.demo.plot": {"demo.training"},
    "cli.demo.text": set(),
    "cli.demo.training": {"demo.measured", "demo.memory", "demo.model", "demo.text"},
    "cli.doctor": {"examine", "shared"},
    "cli.examine": set(),
    "cli.explain": {"shared"},
    "cli.replay": {"shared"},
    "cli.shared": set(),
    "cli.tune": {"shared"},
}
ROOMS = {name.split(".")[0] for name in FILES}


def _imports(path: Path) -> set[str]:
    """Return the top-level modules of the package that a file imports."""
    return {name.split(".")[0] for name in _imported(path)}


def _imported(path: Path) -> set[str]:
    """Return the modules of the package that a file imports, without the package's name."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                base = ("pyactcomp", *parts)[: len(parts) + 2 - node.level]
                origin = ".".join((*base, *filter(None, [origin])))
            # "from . import x" names modules, "from .x import y" something in one; a folder has both.
            folder = PACKAGE.joinpath(*origin.split(".")[1:])
            names = [
                f"{origin}.{alias.name}" if origin == "pyactcomp" or _is_module(folder / alias.name) else origin
                for alias in node.names
            ]
        found |= {name.partition(".")[2] for name in names if name.startswith("pyactcomp.")}
    return found


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _module(path: Path) -> str:
    """Return a file's name among modules, without the package's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_what_its_row_allows(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in ALLOWED, f"{own} has no row in ALLOWED: say what it may import"
    assert _imports(path) - {own} <= ALLOWED[own]


@pytest.mark.parametrize(
    "path", sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")), ids=lambda path: _module(path)
)
def test_file_imports_the_files_of_its_row_from_its_room(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    # What a package re-exports is imported from the file that has it.
    assert {name for name in _imported(path) if name.split(".")[0] == room} == {
        f"{room}.{name}" for name in FILES[_module(path)]
    }


def test_rows_of_files_are_of_files() -> None:
    assert sorted(FILES) == sorted(_module(path) for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))


def _assert_no_cycle(arrows: dict[str, set[str]]) -> None:
    remaining = {module: targets - {module} for module, targets in arrows.items()}
    while remaining:
        leaves = {module for module, targets in remaining.items() if not targets & remaining.keys()}
        assert leaves, f"a cycle among {sorted(remaining)}"
        remaining = {module: targets for module, targets in remaining.items() if module not in leaves}


def test_allowed_arrows_have_no_cycle() -> None:
    _assert_no_cycle(ALLOWED)


def test_files_have_no_cycle() -> None:
    _assert_no_cycle({name: {f"{name.split('.')[0]}.{other}" for other in row} for name, row in FILES.items()})
    with pytest.raises(AssertionError, match="a cycle among"):
        _assert_no_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_import_reader_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    inner = tmp_path / "kernels" / "new.py"
    inner.parent.mkdir()
    inner.write_text(
        "import pyactcomp.a\nfrom .. import b\nfrom ..c import x\nfrom . import d\nfrom pyactcomp import e\n"
        "def f():\n    from ..g.h import y\nimport torch\nfrom torch import i\n"
    )
    assert _imports(inner) == {"a", "b", "c", "kernels", "e", "g"}


def test_import_of_the_package_has_no_side_effects() -> None:
    code = (
        "import json, sys, torch, pyactcomp\n"
        "names = ['triton', 'matplotlib', 'typer', 'rich', 'humanize', 'hypothesis', 'transformers', 'trl']\n"
        "names += ['accelerate', 'lightning', 'pytorch_lightning']\n"
        "print(json.dumps([[n for n in names if n in sys.modules], torch.cuda.is_initialized()]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[], False]
    assert ran.stderr == ""
