"""Data flows one way, and imports follow it: every arrow between modules stands here, or the test fails."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyactcomp.moved import _MOVED, _REMOVED

PACKAGE = Path(__file__).parents[1] / "pyactcomp"

# Room, or file that stands by itself -> the rooms that it may import; top first.
ALLOWED = {
    "__init__": {
        "_version",
        "allocator",
        "codec",
        "compress",
        "errors",
        "functional",
        "moved",
        "readers",
        "report",
        "snapshots",
    }
    | {"checkpoint", "climb", "estimate", "live", "offload", "plan", "verify"},
    "__main__": {"cli"},
    "cli": {"_core", "_version", "allocator", "codec", "errors", "estimate", "live", "offload", "snapshots"}
    | {"plan", "sizes", "torch_private"},
    "estimate": {"_core", "checkpoint", "codec", "compress", "config", "engine", "errors", "layout", "sizes"}
    | {"snapshots", "torch_private"},
    "integrations": {"checkpoint", "climb", "compress", "config", "errors", "live", "report"},
    "plan": {"config", "errors", "estimate", "layout", "sizes"},
    "layout": {"config", "errors"},
    "live": {"engine", "errors", "torch_private"},
    "offload": {"engine", "errors"},
    "verify": {"compress", "config", "engine", "errors", "model_hooks", "readers", "torch_private"},
    "climb": {"checkpoint", "compress", "errors", "sizes"},
    "report": {"compiled", "compress", "engine", "errors", "fusions", "model_hooks", "sizes"},
    "compress": {"checkpoint", "codec", "compiled", "config", "engine", "errors", "fusions", "layout", "readers"}
    | {"model_hooks"},
    "model_hooks": {"compiled", "engine", "errors", "fusions"},
    "checkpoint": {"config", "engine", "errors", "readers", "torch_private"},
    "compiled": {"codec", "config", "engine", "functional", "readers", "torch_private"},
    "fusions": {"codec", "config", "engine", "errors", "functional", "readers", "torch_private"},
    "functional": {"codec", "engine", "errors", "moved", "readers", "torch_private"},
    "engine": {"_core", "codec", "config", "errors", "readers", "sizes", "torch_private"},
    "config": {"codec", "errors", "sizes"},
    "readers": {"codec", "errors", "torch_private"},
    "codec": {"_core", "errors", "torch_private"},
    "allocator": {"_core", "errors", "moved", "snapshots", "torch_private"},
    "snapshots": {"_core", "errors", "sizes"},
    "torch_private": {"errors"},
    "errors": set(),
    "moved": set(),
    "sizes": set(),
    "_version": set(),
}
FILES = sorted(PACKAGE.rglob("*.py"))


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


def _files(module: str) -> str:
    """Return the name of the file that a module's name stands for, a package's by its __init__."""
    return f"{module}.__init__" if (PACKAGE.joinpath(*module.split(".")) / "__init__.py").exists() else module


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_file_imports_only_the_rooms_that_its_room_may(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in ALLOWED, f"{own} has no row in ALLOWED: say what it may import"
    assert _imports(path) - {own} <= ALLOWED[own]


def test_rooms_use_every_arrow_that_they_are_allowed() -> None:
    used: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        used[own] |= _imports(path) - {own}
    assert used == ALLOWED


def _assert_no_cycle(arrows: dict[str, set[str]]) -> None:
    remaining = {module: targets - {module} for module, targets in arrows.items()}
    while remaining:
        leaves = {module for module, targets in remaining.items() if not targets & remaining.keys()}
        assert leaves, f"a cycle among {sorted(remaining)}"
        remaining = {module: targets for module, targets in remaining.items() if module not in leaves}


def test_allowed_arrows_have_no_cycle() -> None:
    _assert_no_cycle(ALLOWED)


def test_files_have_no_cycle() -> None:
    arrows = {_files(_module(path)): {_files(module) for module in _imported(path)} for path in FILES}
    _assert_no_cycle(arrows)
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


MOVED = [
    (package, module, name) for package, rows in _MOVED.items() for module, names in rows.items() for name in names
]


@pytest.mark.parametrize(("package", "module", "name"), MOVED, ids=lambda part: part)
def test_moved_name_is_found_at_its_old_place_with_a_warning(package: str, module: str, name: str) -> None:
    new = getattr(importlib.import_module(f"pyactcomp.{module}"), name)
    old = importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=f"`from pyactcomp.{module} import {name}`") as caught:
        assert getattr(old, name) is new
    assert [warning.filename for warning in caught] == [__file__]
    assert name not in old.__all__
    with pytest.raises(AttributeError, match=f"{package!r} has no attribute 'never_here'"):
        old.never_here  # noqa: B018


def test_import_of_the_package_has_no_side_effects() -> None:
    code = (
        "import json, sys, torch, pyactcomp\n"
        "names = ['triton', 'matplotlib', 'typer', 'rich', 'hypothesis', 'transformers', 'trl']\n"
        "names += ['accelerate', 'lightning', 'pytorch_lightning', 'pyactcomp._core', 'pyactcomp.snapshots']\n"
        "print(json.dumps([[n for n in names if n in sys.modules], torch.cuda.is_initialized()]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[], False]
    assert ran.stderr == ""


@pytest.mark.parametrize("name", _REMOVED["pyactcomp.functional"])
def test_removed_function_says_what_to_write(name: str) -> None:
    with pytest.raises(AttributeError, match=f"write torch.nn.functional.{name}, and pyactcomp.compress"):
        getattr(importlib.import_module("pyactcomp.functional"), name)
