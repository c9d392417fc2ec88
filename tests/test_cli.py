"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyactcomp._version import __version__


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pyactcomp", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def cli_installed() -> None:
    for name in ("typer", "rich", "humanize", "matplotlib"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("cli_installed")
def test_version_is_the_package_version() -> None:
    assert _run("--version").stdout == f"pyactcomp {__version__}\n"


# The command with a model of a second; `make demo` takes a minute for that of the size that users train.
SMALL_DEMO = """
from dataclasses import replace
from pyactcomp.cli import main
from pyactcomp.cli.demo import training
full = training.default_config
training.default_config = lambda *a, **k: replace(full(*a, **k), width=32, depth=1, heads=2, sequence=64, batch=8)
main()
"""


@pytest.mark.usefixtures("cli_installed")
def test_demo_writes_rows_and_picture(tmp_path: Path) -> None:
    rows_path = tmp_path / "rows.json"
    options = ["--steps", "8", "--device", "cpu", "--out", str(tmp_path / "out"), "--json", str(rows_path)]
    command = [sys.executable, "-c", SMALL_DEMO, "demo", *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    written = json.loads(rows_path.read_text())
    assert list(written) == ["rows"]
    methods = ["vanilla", "lossless", "int8", "checkpoint", "int8 + checkpoint"]
    assert [row["method"] for row in written["rows"]] == methods
    for row in written["rows"]:
        assert list(row) == ["method", "saved_bytes", "peak_bytes", "step_ms", "val_loss"]
    picture = tmp_path / "out" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {picture}" in ran.stdout


@pytest.mark.usefixtures("cli_installed")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("demo", "--steps", "2"), "at least 8"),
        pytest.param(
            ("demo", "--device", "cuda"),
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here"),
        ),
    ],
)
def test_demo_refuses_bad_options(arguments: tuple[str, ...], named: str) -> None:
    from typer.testing import CliRunner

    from pyactcomp.cli.commands import app

    ran = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert ran.exit_code == 2
    assert named in ran.output


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
