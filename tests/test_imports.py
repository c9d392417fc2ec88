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
    "cli": {"commands"},
    "commands": {"_version", "allocator", "demo", "demo_plot", "doctor", "errors"}
    | {"replay_commands", "explain_command", "extensions"},
    "replay_commands": {"allocator"},
    "explain_command": {"allocator", "replay_commands"},
    "doctor": {"_version", "allocator", "codec", "extensions", "reference", "torch_private_tests"},
    "demo_plot": {"demo"},
    "demo": {"compress", "demo_memory", "demo_model", "demo_text"},
    "demo_text": {"errors"},
    "demo_model": set(),
    "demo_memory": set(),
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
    "allocator": {"errors", "extensions", "torch_private", "_core"},
    "kernels": {"errors", "format", "kernels", "torch_private", "_core"},
    "reference": {"format"},
    "torch_private_tests": {"torch_private"},
    "torch_private": set(),
    "format": set(),
    "seeds": set(),
    "errors": set(),
    "_version": set(),
}


def _imports(path: Path) -> set[str]:
    """Return the top-level modules of the package that a file imports."""
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
            # "from . import x" names modules, "from .x import y" what is in one.
            names = [f"{origin}.{alias.name}" for alias in node.names] if origin == "pyactcomp" else [origin]
        found |= {name.split(".")[1] for name in names if name.startswith("pyactcomp.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_what_its_row_allows(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in ALLOWED, f"{own} has no row in ALLOWED: say what it may import"
    assert _imports(path) - {own} <= ALLOWED[own]


def test_allowed_arrows_have_no_cycle() -> None:
    remaining = {module: arrows - {module} for module, arrows in ALLOWED.items()}
    while remaining:
        leaves = {module for module, arrows in remaining.items() if not arrows & remaining.keys()}
        assert leaves, f"a cycle among {sorted(remaining)}"
        remaining = {module: arrows for module, arrows in remaining.items() if module not in leaves}


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
        "names = ['triton', 'matplotlib', 'typer', 'rich', 'humanize', 'hypothesis', 'transformers']\n"
        "print(json.dumps([[n for n in names if n in sys.modules], torch.cuda.is_initialized()]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[], False]
    assert ran.stderr == ""
