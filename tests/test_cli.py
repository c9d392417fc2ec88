"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from pyactcomp._version import __version__


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pyactcomp", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def cli_installed() -> None:
    for name in ("typer", "rich", "matplotlib"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("cli_installed")
def test_version_is_the_package_version() -> None:
    assert _run("--version").stdout == f"pyactcomp {__version__}\n"


@pytest.mark.usefixtures("cli_installed")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--steps", "2"), "at least 8"),
        (("--help",), "Folder for the picture"),
        pytest.param(
            ("--device", "cuda"),
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here"),
        ),
    ],
)
def test_demo_passes_its_options_to_the_program(arguments: tuple[str, ...], named: str) -> None:
    ran = _run("demo", *arguments)
    assert ran.returncode == (0 if arguments == ("--help",) else 2)
    assert named in " ".join((ran.stdout + ran.stderr).replace("│", "").split())


@pytest.mark.usefixtures("cli_installed")
def test_demo_of_an_installed_package_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyactcomp.cli import commands

    monkeypatch.setattr(commands, "__file__", str(tmp_path / "site" / "pyactcomp" / "cli" / "commands.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as ended:
        commands.demo()
    assert ended.value.exit_code == 2
    assert "examples/demo" in capsys.readouterr().err
    (tmp_path / "examples" / "demo").mkdir(parents=True)
    with pytest.raises(commands.Program) as program:
        commands.demo(["--steps", "8"])
    assert (program.value.target, program.value.arguments) == ("examples/demo", ["--steps", "8"])


@pytest.mark.usefixtures("cli_installed")
def test_doctor_prints_what_examine_finds() -> None:
    ran = _run("doctor", "--json")
    findings = json.loads(ran.stdout)
    assert ran.returncode == (1 if findings["problems"] else 0)
    assert findings["versions"]["pyactcomp"] == __version__


def test_missing_package_is_named_with_its_remedy() -> None:
    code = "import sys; sys.modules['typer'] = None; from pyactcomp.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "typer" in ran.stderr
    assert "pip install typer" in ran.stderr
