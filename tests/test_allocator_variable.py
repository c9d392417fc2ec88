"""PYACTCOMP_ALLOCATOR=1: pyactcomp.pth waits for torch, and the allocator is attached as torch initialises CUDA."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import allocator_variable_checks as checks
import pytest
import torch

import _pyactcomp_startup
from pyactcomp import _core
from pyactcomp.allocator import variable
from pyactcomp.torch_private import tests as torch_private_tests

ROOT = Path(__file__).resolve().parents[1]
FILE = checks.FILE

needs_the_allocator = pytest.mark.skipif(
    not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h"
)
needs_torch_without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch has CUDA: test_allocator_variable_gpu.py has this case"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the interpreter and site-packages of an environment that sees this checkout and has its .pth file."""
    return checks.with_the_checkout(tmp_path_factory.mktemp("environment"))


# Processes of their own, which import torch anew.
SLOW = ("launched", "spawn")
FORKED = {case: variables for case, variables in checks.CASES.items() if case not in SLOW}


@pytest.fixture(scope="module")
def forks(environment: tuple[Path, Path]) -> tuple[dict[str, int], str]:
    """Return how each case exited, in a fork of one process, and what all of them said."""
    variables = {"PYACTCOMP_ALLOCATOR": "1", "PAC_STAND_IN": "1"}
    cases = checks.HERE / "allocator_variable_cases.py"
    done = checks.run(environment[0], cases, "in_forks", json.dumps(FORKED), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


@needs_torch_without_cuda
@needs_the_allocator
@pytest.mark.parametrize("case", FORKED)
def test_the_allocator_is_attached_as_torch_initialises_cuda(case: str, forks: tuple[dict[str, int], str]) -> None:
    exits, said = forks
    assert exits[case] == 0, said


@pytest.mark.slow
@needs_torch_without_cuda
@needs_the_allocator
@pytest.mark.parametrize("case", SLOW)
def test_the_allocator_is_attached_in_processes_that_a_process_starts(
    case: str, environment: tuple[Path, Path]
) -> None:
    checks.check(environment[0], case, stand_in=True)


@needs_torch_without_cuda
@needs_the_allocator
def test_children_under_run_have_the_allocator(environment: tuple[Path, Path]) -> None:
    pytest.importorskip("typer")
    checks.check_run(environment[0], stand_in=True)


def _waits(python: Path, *options: str, **variables: str) -> bool:
    done = checks.run(python, *options, "-c", "import sys; print('_pyactcomp_startup' in sys.modules)", **variables)
    assert done.stderr == ""
    return json.loads(done.stdout.strip().lower())


def test_python_waits_for_torch_if_the_variable_is_set(environment: tuple[Path, Path]) -> None:
    python, _ = environment
    assert _waits(python, PYACTCOMP_ALLOCATOR="1")
    assert not _waits(python)
    for option in ("-S", "-I", "-E"):
        assert not _waits(python, option, PYACTCOMP_ALLOCATOR="1")


MEASURE = """
import site, sys  # site, which reads the files, has imported its own modules before
line = open(sys.argv[1]).read()
before, calls = set(sys.modules), []
sys.setprofile(lambda frame, event, argument: calls.append(event))
exec(line)
sys.setprofile(None)
print(sum(event in ("call", "c_call") for event in calls), *set(sys.modules) - before)
"""


def test_without_the_variable_the_file_imports_nothing_and_calls_next_to_nothing(
    environment: tuple[Path, Path],
) -> None:
    done = checks.run(environment[0], "-S", "-c", MEASURE, FILE)
    calls, *imported = done.stdout.split()
    assert imported == []
    assert int(calls) < 40


def test_waiting_imports_nothing_that_python_has_not_at_its_start(environment: tuple[Path, Path]) -> None:
    code = "import sys; print(*sys.modules)"
    without, waiting = (
        set(checks.run(environment[0], "-c", code, PYACTCOMP_ALLOCATOR=value).stdout.split()) for value in ("", "1")
    )
    assert waiting - without == {"_pyactcomp_startup"}


@needs_torch_without_cuda
def test_a_torch_without_cuda_is_left_alone(environment: tuple[Path, Path]) -> None:
    code = "import sys, torch; print('pyactcomp' in sys.modules, [n for n in dir(torch._C) if n == '_cuda_init'])"
    done = checks.run(environment[0], "-W", "error", "-c", code, PYACTCOMP_ALLOCATOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("False ")


def _state(python: Path, *options: str, **variables: str) -> dict[str, object]:
    code = "import json; from pyactcomp.allocator import variable; print(json.dumps(variable.state()))"
    done = checks.run(python, *options, "-c", code, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_state_tells_whether_and_how_it_is_on(environment: tuple[Path, Path]) -> None:
    python, packages = environment
    quiet = {"value": None, "on": False, "attached": False, "file": str(packages / "pyactcomp.pth"), "problem": None}
    assert _state(python) == quiet
    assert _state(python, PYACTCOMP_ALLOCATOR="1") == quiet | {"value": "1", "on": True}
    unread = _state(python, "-E", PYACTCOMP_ALLOCATOR="1")
    assert str(unread["problem"]).startswith(f"this process has not read {packages / 'pyactcomp.pth'}: ")


def test_the_state_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variable.site, "getsitepackages", list)
    monkeypatch.setattr(variable.site, "ENABLE_USER_SITE", False)
    monkeypatch.setitem(sys.modules, "_pyactcomp_startup", _pyactcomp_startup)
    for value, on, problem in (("0", False, None), ("yes", True, "got 'yes'"), ("1", True, None)):
        monkeypatch.setenv("PYACTCOMP_ALLOCATOR", value)
        state = variable.state()
        assert (state["value"], state["on"], state["file"]) == (value, on, None)
        assert state["problem"] is None if problem is None else problem in str(state["problem"])
    monkeypatch.delitem(sys.modules, "_pyactcomp_startup")
    assert "no pyactcomp.pth is in site-packages" in str(variable.state()["problem"])
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    assert variable.state()["problem"] is None


def test_names_of_torch_are_those_that_the_doctor_tests() -> None:
    assert set(torch_private_tests.INITIALISING) == set(_pyactcomp_startup.INITIALISING)


MODULES = ("_pyactcomp_command.py", "_pyactcomp_startup.py")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_the_file_is_installed(kind: str, tmp_path: Path) -> None:
    """Wheels of the package in a tree of its own, without the native module: a compiler takes minutes."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "pyactcomp", tree / "pyactcomp", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", *MODULES, "pyactcomp.pth"):
        shutil.copy(ROOT / name, tree)
    code = (
        "import sys; from setuptools import build_meta; from setuptools.command.build_ext import build_ext\n"
        "build_ext.run = lambda self: None\n"
        f"print(build_meta.build_{kind}(sys.argv[1]))\n"
    )
    build = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(build, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        assert wheel.read("pyactcomp.pth") == FILE.read_bytes()
        record = next(name for name in wheel.namelist() if name.endswith("/RECORD"))
        assert "pyactcomp.pth," in wheel.read(record).decode()
        if kind == "wheel":
            assert wheel.read("_pyactcomp_startup.py") == (ROOT / "_pyactcomp_startup.py").read_bytes()
            return
        [finder] = [name for name in wheel.namelist() if name.endswith("_finder.py")]
        assert "'_pyactcomp_startup'" in wheel.read(finder).decode()
        # Python reads .pth files by name: the one that finds the module is before the one that imports it.
        [static] = [name for name in wheel.namelist() if name.startswith("__editable__") and name.endswith(".pth")]
        assert static < "pyactcomp.pth"
