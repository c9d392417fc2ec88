"""Importing the allocator, ``pyactcomp run`` and what ``pyactcomp doctor`` says of the allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyactcomp.allocator import attach, variable
from pyactcomp.cli import examine


def _python(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )


def test_import_has_no_side_effects_and_works_as_an_attribute() -> None:
    code = (
        "import sys, torch, pyactcomp\n"
        "assert 'pyactcomp.allocator' not in sys.modules\n"
        "before = dict(vars(torch._C))\n"
        "from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice\n"
        "assert pyactcomp.allocator is sys.modules['pyactcomp.allocator']\n"
        "address = CachingAllocator(SimulatedDevice('64MiB'), AllocatorConfig(growth='malloc')).allocate(1)\n"
        "assert vars(torch._C) == before and not torch.cuda.is_initialized()\n"
        "assert not hasattr(pyactcomp, 'no_such_name')\n"
    )
    # An environment that could not be parsed is read by enable only.
    ran = _python("-c", code, PYACTCOMP_ALLOC_CONF="?")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write a program that says how it was started and ends as its first argument says."""
    pytest.importorskip("typer")
    path = tmp_path / "package" / "program.py"
    path.parent.mkdir()
    path.write_text(
        "import json, sys\n"
        "import beside\n"
        "found = sys.modules['__main__']\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[0], found.__dict__ is globals()]))\n"
        "ends = {'exit': lambda: sys.exit(7), 'raise': lambda: {}['missing'], 'eof': lambda: open('/dev/null') and\n"
        "        input(), 'interrupt': lambda: (_ for _ in ()).throw(KeyboardInterrupt)}\n"
        "ends.get(sys.argv[1], print)()\n"
    )
    (path.parent / "beside.py").write_text("")
    return path


@pytest.mark.parametrize("arguments", [("end", "--growth", "x", "-m", "--", "--help"), ("exit",)])
def test_run_starts_a_script_as_python_does(program: Path, arguments: tuple[str, ...]) -> None:
    directly = _python(str(program), *arguments)
    ran = _python("-m", "pyactcomp", "run", "--growth", "malloc", str(program), *arguments, PYACTCOMP_DISABLE="1")
    assert ran.returncode == directly.returncode == (7 if arguments == ("exit",) else 0)
    assert (ran.stdout, ran.stderr) == (directly.stdout, directly.stderr)
    assert json.loads(ran.stdout.splitlines()[0])[0] == "__main__"


def test_run_starts_a_module_as_python_does(program: Path) -> None:
    directly = _python("-m", "program", "end", "-m", cwd=program.parent)
    ran = _python("-m", "pyactcomp", "run", "-m", "program", "end", "-m", cwd=program.parent, PYACTCOMP_DISABLE="1")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, directly.stdout, directly.stderr)


@pytest.mark.parametrize("end", ["raise", "eof", "interrupt"])
def test_run_lets_a_scripts_exception_end_it_as_python_does(program: Path, end: str) -> None:
    directly = _python(str(program), end)
    ran = _python("-m", "pyactcomp", "run", str(program), end, PYACTCOMP_DISABLE="1")
    assert ran.returncode == directly.returncode != 0
    assert ran.stderr.startswith("Traceback (most recent call last):\n")
    # The frames of the program, and nothing of ours after them.
    assert ran.stderr.splitlines()[-3:] == directly.stderr.splitlines()[-3:]
    assert "During handling" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (("run", "missing.py"), {}, "there is no missing.py"),
        (("run", "--conf", "growth:?", __file__), {}, "growth is 'vmm' or 'malloc'"),
        (("run", __file__), {"PYACTCOMP_ALLOC_CONF": "growth:?"}, "PYACTCOMP_ALLOC_CONF"),
        pytest.param(
            ("run", __file__),
            {},
            "Error: the allocator cannot be enabled: torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the allocator can be enabled here"),
        ),
    ],
)
def test_run_says_what_is_wrong_before_it_starts_anything(
    arguments: tuple[str, ...], environment: dict[str, str], named: str
) -> None:
    pytest.importorskip("typer")
    ran = _python("-m", "pyactcomp", *arguments, COLUMNS="200", **environment)
    assert ran.returncode == 2
    assert named in ran.stderr
    assert "Traceback" not in ran.stderr


def test_doctor_tells_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine._allocator() == {
        "unavailable_reason": attach.unavailable_reason(),
        "torch_subclass": examine._library("_torch_allocator"),
        "settings": None,
        "variable": variable.state(),
    }
    monkeypatch.setenv("PYACTCOMP_ALLOC_CONF", "growth:?")
    assert "growth is 'vmm' or 'malloc', got '?'" in str(examine._allocator()["settings"])


def test_doctor_calls_malformed_settings_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYACTCOMP_ALLOC_CONF", "growth:?")
    problems = examine.examine()["problems"]
    assert any("PYACTCOMP_ALLOC_CONF" in problem for problem in problems)


def test_doctor_says_whether_and_how_the_variable_enables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from pyactcomp.cli import doctor

    monkeypatch.delenv("PYACTCOMP_DISABLE", raising=False)
    monkeypatch.setenv("PYACTCOMP_ALLOCATOR", "on")
    findings = examine.examine()
    [problem] = [each for each in findings["problems"] if "PYACTCOMP_ALLOCATOR" in each]
    assert problem == f"PYACTCOMP_ALLOCATOR has no effect: {variable.state()['problem']}"
    entry = findings["allocator"]
    state = {"value": "1", "on": True, "attached": False, "file": "/site/pyactcomp.pth", "problem": None}
    lines = {
        "PYACTCOMP_ALLOCATOR: not set, off; no pyactcomp.pth in site-packages reads it": {
            "value": None,
            "on": False,
            "file": None,
        },
        "PYACTCOMP_ALLOCATOR: 1, the allocator is attached as torch initialises CUDA; read by /site/pyactcomp.pth": {},
        "PYACTCOMP_ALLOCATOR: 1, the allocator is attached; read by /site/pyactcomp.pth": {"attached": True},
        "PYACTCOMP_ALLOCATOR: on, no effect; read by /site/pyactcomp.pth": {"value": "on", "problem": "wrong"},
    }
    for line, differing in lines.items():
        assert doctor._allocator_lines(entry | {"variable": state | differing}).splitlines()[1] == line


def test_doctor_works_without_the_native_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyactcomp.allocator", None)
    assert "reinstall pyactcomp" in str(examine._allocator()["unavailable_reason"])
