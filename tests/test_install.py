"""README's installation, and the libraries for one torch that the installation or the first use compiles."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch_headers

import pyactcomp
from pyactcomp.errors import ImplementationUnavailableError
from pyactcomp.readers import observer
from pyactcomp.torch_private import extensions

ROOT = Path(__file__).parents[1]
FITTING = f"{torch.__version__}-{extensions._digest('_observer')}"


def block(page: Path) -> str:
    """Return the block of commands under the heading of a page that installs."""
    return re.findall(r"^```bash\n(.*?)^```", section(page), re.MULTILINE | re.DOTALL)[0]


def test_readme_alone_installs() -> None:
    """The site's home page includes README's first part."""
    assert "pip install" in block(ROOT / "README.md")
    others = [page.read_text() for page in (ROOT / "docs").rglob("*.md")] + [(ROOT / "README.md").read_text()]
    # No index has the package, so its name alone installs nothing.
    assert not [text for text in others if re.search(r"pip install ['\"]?pyactcomp", text)]


def test_torch_ends_at_the_newest_tested_release() -> None:
    major, minor = observer.NEWEST_TESTED
    assert f'"torch>=2.11,<{major}.{minor + 1}"' in (ROOT / "pyproject.toml").read_text()
    assert f"torch 2.11 to {major}.{minor}" in section(ROOT / "README.md")


def section(page: Path) -> str:
    return page.read_text().partition("## Install")[2].partition("\n## ")[0]


def test_the_changelog_has_this_version_first() -> None:
    released = re.findall(r"^## \[(\d[\w.]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == pyactcomp.__version__
    assert f"\nversion: {pyactcomp.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source distribution of what git would commit, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if files.returncode != 0:
        pytest.skip(f"needs a checkout: {files.stderr.strip()}")
    for name in filter(None, files.stdout.split("\0")):
        if (ROOT / name).exists() and not name.startswith(("tests/data", "docs/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    environment = {**os.environ, "PYACTCOMP_REPOSITORY": "https://example.org/pyactcomp/"}
    done = subprocess.run(
        [sys.executable, "-c", code, folder], cwd=tree, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_source_distribution_has_what_the_build_takes(sdist: Path) -> None:
    """It had neither csrc nor CMakeLists.txt nor pyactcomp.pth, and could not be installed."""
    sources = {path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    sources |= {path.relative_to(ROOT) for each in ("*.py", "*.pyi") for path in (ROOT / "pyactcomp").rglob(each)}
    of_the_build = ("setup.py", "pyproject.toml", "CMakeLists.txt", "pyactcomp.pth", "README.md", "LICENSE")
    sources |= {Path(name) for name in of_the_build}
    sources |= {path.relative_to(ROOT) for path in ROOT.glob("_pyactcomp_*.py")}
    assert len(sources) > 200
    assert {str(each) for each in sources if not (sdist / each).exists()} == set()


def test_the_metadata_name_the_repository_that_builds(sdist: Path) -> None:
    found = (sdist / "PKG-INFO").read_text()
    assert "\nProject-URL: Issues, https://example.org/pyactcomp/issues\n" in found
    assert "](https://example.org/pyactcomp/raw/main/docs/frontier.png)" in found
    assert "](https://example.org/pyactcomp/blob/main/docs/benchmarks.md)" in found
    assert not re.search(r"\]\((?!https?:|#)", found), "a link that leads nowhere on an index"
    for field in ("Author", "Keywords", "License-Expression", "Requires-Python", "Classifier: Operating System"):
        assert f"\n{field}" in found, field


TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_workflows_call_targets_of_the_makefile() -> None:
    called = {
        target
        for workflow in (ROOT / ".github" / "workflows").glob("*.yml")
        for target in re.findall(r"run: make (\w+)$", workflow.read_text(), re.MULTILINE)
    }
    assert {"lint", "test", "wheel", "docs"} <= called <= set(TARGETS)


# The model of README, one that needs the observer, and one with a registered function.
STORED = """
import json, sys, warnings
warnings.filterwarnings("error", module=".*pyactcomp.*")
warnings.filterwarnings("error", message=".*pyactcomp.*")
import torch, pyactcomp
from torch import nn
torch.manual_seed(0)

class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y
    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)
    def forward(self, x):
        return Times.apply(self.a(x), self.b(x))

pyactcomp.register_reader(Times, {0: "linear", 1: "linear"})
stored = []
for model in (
    nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)),
    nn.Sequential(nn.Linear(256, 256), Norm(), nn.Linear(256, 256), nn.Softmax(-1)),
    Gated(),
):
    pyactcomp.compress(model)(torch.randn(512, 256)).square().mean().backward()
    stored.append(pyactcomp.report(model).stored_bytes)
print(json.dumps(stored))
"""


def run(python: str | Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    unset = ("PYTHONPATH", "PYACTCOMP_DISABLE", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    # Not in the checkout, whose package would be imported in place of the installed one.
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=ROOT.anchor
    )


@pytest.mark.slow
def test_readme_installs_in_an_empty_environment(sdist: Path, tmp_path: Path) -> None:
    """The block as it stands, in the sources of the distribution: then every byte is stored as here.

    A constraint chooses this environment's torch, and no CUDA C++ is built: both would take many minutes more.
    """
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (tmp_path / "constraints").write_text(f"torch=={metadata.version('torch')}\n")
    variables = {
        "PATH": os.pathsep.join((str(tmp_path / "venv" / "bin"), os.environ["PATH"])),
        "PIP_CONSTRAINT": str(tmp_path / "constraints"),
        "PIP_NO_CACHE_DIR": "1",
        "PAC_CUDA": "OFF",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # that of the user may hold the library from another installation
    }
    done = run("bash", "-ec", f"cd {sdist}\n{block(ROOT / 'README.md')}", **variables)
    if any(words in done.stderr for words in torch_headers.UNREACHABLE):
        pytest.skip(f"pip does not reach what the installation takes: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything that should work here works" in done.stdout
    here = run(sys.executable, "-c", STORED)
    there = run(tmp_path / "venv" / "bin" / "python", "-c", STORED, XDG_CACHE_HOME=variables["XDG_CACHE_HOME"])
    assert here.returncode == there.returncode == 0, here.stderr + there.stderr
    assert json.loads(there.stdout) == json.loads(here.stdout)
    assert "compiles its observer of operators" in there.stderr


# Libraries for one torch.


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return empty places for libraries: beside the package, and the cache."""
    monkeypatch.setattr(extensions, "_BESIDE", tmp_path / "beside")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(extensions, "_failed", {})
    monkeypatch.delitem(sys.modules, "pyactcomp._observer", raising=False)
    return tmp_path / "beside", tmp_path / "pyactcomp"


def put(place: Path, folder: str = FITTING, built_for: str = torch.__version__) -> Path:
    """Write a module in place of a library."""
    (place / folder).mkdir(parents=True)
    (place / folder / "_observer.py").write_text(f"BUILT_FOR = {built_for!r}\n")
    return place / folder / "_observer.py"


@pytest.mark.parametrize("where", [0, 1])
def test_a_library_is_found_beside_the_package_and_in_the_cache(where: int, places: tuple[Path, Path]) -> None:
    assert extensions.load("_observer")[0] is None
    file = put(places[where])
    assert extensions.load("_observer")[0].__file__ == str(file)


def test_a_library_of_other_sources_is_not_loaded(places: tuple[Path, Path]) -> None:
    put(places[0], f"{torch.__version__}-{'0' * 12}")
    assert extensions.load("_observer")[0] is None


@pytest.mark.parametrize(
    ("built_for", "running", "fits"),
    [
        ("2.13.0+cpu", "2.13.0+cu130", True),
        ("2.13.0+cu130", "2.13.0", True),
        ("2.13.0+cpu", "2.13.1+cpu", False),
        ("2.13.0+cpu", "2.14.0+cpu", False),
        ("2.13.0a0+git1", "2.13.0a0+git2", False),  # two states of the sources
        ("2.13.0+mine", "2.13.0+cpu", False),
    ],
)
def test_the_observer_serves_all_builds_of_a_release(
    built_for: str, running: str, fits: bool, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", running)
    put(places[0], f"{built_for}-{extensions._digest('_observer')}", built_for)
    assert (extensions.load("_observer")[0] is not None) == fits
    assert not extensions._fits(built_for, extensions.LIBRARIES["_torch_allocator"])


def test_what_is_compiled_goes_where_it_can_be_written(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert extensions._place() == places[0]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert extensions._place() == places[1]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without a home
    with pytest.raises(pyactcomp.PyactcompError, match="set XDG_CACHE_HOME"):
        extensions._place()


# Each process tells that it compiles, and takes its time.
COMPILING = """
import pathlib, sys, time
from pyactcomp.torch_private import extensions
place, folder, version = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
extensions._BESIDE = place
def build():
    with (place / "compiled").open("a") as file:
        file.write("once\\n")
    time.sleep(1)
    (place / folder).mkdir()
    (place / folder / "_observer.py").write_text(f"BUILT_FOR = {version!r}\\n")
print(extensions.load_or_build("_observer", build)[0].__file__)
"""


def test_of_several_processes_one_compiles(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILING, tmp_path, FITTING, torch.__version__]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, **piped) for _ in "123"]
    said = [process.communicate() for process in processes]
    assert [out.strip() for out, _ in said] == [str(tmp_path / FITTING / "_observer.py")] * 3, said
    assert (tmp_path / "compiled").read_text() == "once\n"
    assert sum("compiles its observer of operators for torch" in error for _, error in said) == 1


def test_without_a_compiler_compress_says_how_to_build_the_library(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(observer, "observer", observer.observer.__wrapped__)
    monkeypatch.setattr(sys.modules["pyactcomp.compress"], "prepare", observer.prepare.__wrapped__)
    for act in (lambda: pyactcomp.compress(torch.nn.Linear(2, 2)), lambda: pyactcomp.compressed().__enter__()):
        with pytest.raises(ImplementationUnavailableError) as caught:
            act()
        for part in ("run pyactcomp build-observer", "'no-such-compiler' is on PATH; install g++", "about a minute"):
            assert part in str(caught.value)


def test_a_compiler_that_fails_is_told_in_one_line(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "false")
    tries = 0

    def build() -> Path:
        nonlocal tries
        tries += 1
        return extensions.build("_observer")

    for _ in range(2):
        library, reason = extensions.load_or_build("_observer", build)
        assert library is None
        assert "does not compile for torch" in str(reason)
        assert "pyactcomp build-observer shows why" in str(reason)
        assert len(str(reason).splitlines()) == 1
    assert tries == len(caplog.records) == 1
    assert not list(places[0].rglob("*.so"))


@pytest.mark.parametrize(("version", "warns"), [("2.14.1+cu130", False), ("2.15.0", True), ("3.0.0a0+git1", True)])
def test_a_torch_newer_than_the_tested_ones_warns(version: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(observer, "observer", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observer.prepare.__wrapped__()
    assert [f"torch {version} is newer" in str(each.message) for each in caught] == [True] * warns
    assert not warns or "pip install 'torch<2.15'" in str(caught[0].message)
