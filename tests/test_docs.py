"""The pages: every public name is in the reference, every page in the navigation, and drawings are current."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import pyactcomp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "pyactcomp"
REFERENCE = [
    path for page in (DOCS / "api").glob("*.md") for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
]


def found(path: str) -> object:
    """Return the object of a dotted path whose last part is a name of the module before it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    "room", [pyactcomp, pyactcomp.functional, pyactcomp.allocator, pyactcomp.snapshots], ids=lambda room: room.__name__
)
def test_every_public_name_is_documented(room: ModuleType) -> None:
    # No room has names of the trainers' modules, which import trainers that may be absent.
    documented = {id(found(path)) for path in REFERENCE if not path.startswith("pyactcomp.integrations.")}
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for name in room.__all__:
        public = getattr(room, name)
        if isinstance(public, (ModuleType, str)):
            assert f"`{room.__name__}.{name}`" in pages, f"{room.__name__}.{name} is in no page of docs/api"
        else:
            assert id(public) in documented, f"{room.__name__}.{name} is in no page of docs/api"
            assert public.__doc__, f"{room.__name__}.{name} has no docstring"


def test_the_reference_has_nothing_twice() -> None:
    assert len(REFERENCE) == len(set(REFERENCE))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert {page for page in pages if f": {page}\n" not in navigation} == set()


def site_of(name: str) -> str:
    """Return a page's Markdown as the site gets it."""
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
    return hooks.on_page_markdown((DOCS / name).read_text(), page)


def test_the_home_page_is_the_readmes_beginning() -> None:
    home = site_of("index.md")
    assert "pyactcomp.compress(model)" in home
    assert 'pip install ".[bench]"' in home
    assert "## Use" not in home
    assert [link for link in re.findall(r"\]\(([^)#:]+)", home) if not (DOCS / link).exists()] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_the_site_folds_what_few_readers_look_for(page: Path) -> None:
    """Guides had commands of four thousand characters as one paragraph, and test names broken in the middle."""
    seen = re.sub(r"<details.*?</details>", "", site_of(page.name), flags=re.DOTALL)
    assert not re.search(r"^Measured on .{400,}$", seen, re.MULTILINE)
    assert not re.search(r"^\|.*`tests/.*\|$", seen, re.MULTILINE)
    assert not re.search(r"(^- .*not built.*\n){12,}", seen, re.MULTILINE)


def test_the_page_of_examples_has_each_program() -> None:
    page = site_of("examples.md")
    for example in (ROOT / "examples").glob("*.py"):
        assert f"## {example.name}\n\n```python\n{example.read_text().rstrip()}\n```" in page


def test_links_of_the_roots_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert links
        assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_layout_of_the_design_is_that_of_the_package() -> None:
    layout = (ROOT / "DESIGN.md").read_text().partition("\npyactcomp/\n")[2].partition("\ntests/ ")[0]
    named, room = set(), ""
    for indent, names in re.findall(r"^( +)([\w./]+(?:, [\w./]+)*)", layout, re.MULTILINE):
        if len(indent) > 4:  # a line that goes on
            continue
        room = "" if len(indent) == 2 else room
        named |= {f"{room}{name.rstrip('/')}" for name in names.split(", ")}
        room = room or names
    files = {
        str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*") if path.suffix in ("", ".py")
    }
    assert len(named) > 25
    assert {name.removesuffix(".py") for name in named} - files == set()
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms - named == set()


def test_the_design_is_short() -> None:
    lines = (ROOT / "DESIGN.md").read_text().splitlines()
    assert len(lines) <= 280, "reasons and measurements are in docs/design"
    assert [line for line in lines if len(line) > 120] == []


def test_drawings_are_those_of_their_program(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    subprocess.run([sys.executable, str(DOCS / "site" / "drawings.py")], cwd=tmp_path, check=True)
    drawn = {path.name: path.read_text() for path in (tmp_path / "docs").glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in DOCS.glob("drawing_*.svg")}
