"""``pyactcomp doctor``: what it reports, and that it notices what is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch

from pyactcomp import codec
from pyactcomp.allocator import build
from pyactcomp.cli import examine
from pyactcomp.codec import reference
from pyactcomp.errors import PyactcompError
from pyactcomp.torch_private import extensions
from pyactcomp.torch_private import tests as torch_private_tests

NO_COMPILER = ". It cannot be compiled here: there is no compiler; "
NO_OBSERVER = f"its observer of operators is not built{NO_COMPILER}nothing is compressed without it"
NO_SUBCLASS = (
    f"the allocator: its torch subclass is not built{NO_COMPILER}some of torch's memory functions raise without it"
)
ALL_WORKS = "everything that should work here works"


def test_examine_is_plain_data_with_a_reason_for_each_missing_implementation() -> None:
    findings = examine.examine()
    assert json.loads(json.dumps(findings)) == findings
    assert set(findings["implementations"]) == {"reference", "cpu", "cuda", "triton"}
    for name, entry in findings["implementations"].items():
        expected = codec.unavailable_reason(name, torch.device(entry["device"]))
        assert entry["unavailable_reason"] == expected
    assert findings["versions"]["torch"] == torch.__version__
    assert len(findings["devices"]) == 1 + torch.cuda.device_count()


def test_examine_finds_no_problem_here() -> None:
    assert examine.examine()["problems"] == []


def test_examine_reports_an_implementation_with_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.quantize

    def one_bit_off(x: torch.Tensor, **options: Any) -> torch.Tensor:
        packed = original(x, **options)
        packed[17] ^= 1
        return packed

    monkeypatch.setattr(examine.reference, "quantize", one_bit_off)
    findings = examine.examine()
    for name, entry in findings["implementations"].items():
        # The reference behind the codec is the same patched function: it agrees with itself.
        wrong = name != "reference" and entry["unavailable_reason"] is None
        assert (entry["self_test"] is not None) == wrong
        assert any(problem.startswith(f"{name}: packs") for problem in findings["problems"]) == wrong


def test_examine_reports_a_private_torch_name_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    problems = examine.examine()["problems"]
    assert any("_top_saved_tensors_default_hooks" in problem for problem in problems)


def test_every_private_name_is_tested_and_sound() -> None:
    results = torch_private_tests.self_test()
    assert len(results) > 0
    assert {name: wrong for name, wrong in results.items() if wrong} == {}


def test_the_doctor_prints_the_answers_alone() -> None:
    """The limit of graphs that a test provokes made torch log a page above the doctor's answers."""
    command = [sys.executable, "-m", "pyactcomp", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout
    assert "torch._dynamo" not in done.stderr


def test_examine_reports_a_device_that_only_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine.codec, "resolve", lambda impl, device: "reference")
    problems = examine.examine()["problems"]
    assert sum("only the slow reference" in problem for problem in problems) == 1 + torch.cuda.device_count()


@pytest.mark.parametrize(
    ("cuda", "missing", "compiler", "problems"),
    [
        ("13.0", (), False, []),
        ("13.0", ("_torch_allocator", "_observer"), False, [NO_OBSERVER, NO_SUBCLASS]),
        ("13.0", ("_torch_allocator",), False, [NO_SUBCLASS]),
        (None, ("_torch_allocator",), False, []),
        (None, ("_observer",), False, [NO_OBSERVER]),
        (None, ("_observer",), True, []),
    ],
)
def test_doctor_fails_without_a_library_that_the_torch_takes_and_no_first_use_compiles(
    cuda: str | None,
    missing: tuple[str, ...],
    compiler: bool,
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from typer.testing import CliRunner

    from pyactcomp.cli.commands import app

    def load(name: str) -> tuple[object | None, str | None]:
        purpose = extensions.LIBRARIES[name].purpose
        return (None, f"its {purpose} is not built") if name in missing else (object(), None)

    def compile_command(name: str) -> list[str]:
        if not compiler:
            raise PyactcompError("there is no compiler")
        return []

    # torch's own functions, which the tests of private names call, do not work under another's version.
    monkeypatch.setattr(examine.torch_private_tests, "self_test", dict)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(extensions, "load", load)
    monkeypatch.setattr(extensions, "compile_command", compile_command)
    monkeypatch.setattr(build, "cuda_headers", lambda: ())
    ran = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["doctor"])
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line.startswith("problem:")] == [f"problem: {each}" for each in problems]
    assert (ran.exit_code, ALL_WORKS in lines) == ((1, False) if problems else (0, True))
    assert ("the first use compiles it, in about a minute" in ran.stdout) == compiler


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        ("sys.modules['torch'] = None", "ModuleNotFoundError: "),
        ("import torch; del torch.nn.Module", "ImportError: cannot import name 'Module'"),
        (
            "import torch; torch.autograd.Function.apply = 3; torch.nn.functional.gelu = None; del torch.Tensor",
            "Error: ",
        ),
    ],
)
def test_doctor_explains_an_import_that_fails(sabotage: str, said: str) -> None:
    """The tool that tells what is wrong imported the engine before it said anything."""
    code = f"import sys; sys.argv = ['pyactcomp', 'doctor']; {sabotage}; import _pyactcomp_command as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    versions, problem, remedy = done.stderr.splitlines()[-3:]
    assert f"torch {metadata.version('torch')}" in versions
    assert problem.startswith("problem: pyactcomp does not import: ")
    assert said in problem
    assert "pip install 'torch" in remedy
    assert "Traceback" not in done.stderr
