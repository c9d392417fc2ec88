"""``pyactcomp doctor``: what it reports, and that it notices what is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from pyactcomp import codec
from pyactcomp.cli import examine
from pyactcomp.codec import reference
from pyactcomp.torch_private import extensions
from pyactcomp.torch_private import tests as torch_private_tests

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
    ("cuda", "missing", "problems"),
    [
        ("13.0", (), []),
        (
            "13.0",
            ("_torch_allocator", "_observer"),
            [
                "its observer of operators is not built; more tensors stay exact without it",
                "the allocator: its torch subclass is not built; some of torch's memory functions raise without it",
            ],
        ),
        (
            "13.0",
            ("_torch_allocator",),
            ["the allocator: its torch subclass is not built; some of torch's memory functions raise without it"],
        ),
        (None, ("_torch_allocator",), []),
        (None, ("_observer",), ["its observer of operators is not built; more tensors stay exact without it"]),
    ],
)
def test_doctor_fails_without_a_library_that_the_torch_takes(
    cuda: str | None, missing: tuple[str, ...], problems: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from pyactcomp.cli.commands import app

    def load(name: str) -> tuple[object | None, str | None]:
        purpose = extensions.LIBRARIES[name].purpose
        return (None, f"its {purpose} is not built") if name in missing else (object(), None)

    # torch's own functions, which the tests of private names call, do not work under another's version.
    monkeypatch.setattr(examine.torch_private_tests, "self_test", dict)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(extensions, "load", load)
    ran = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"])
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line.startswith("problem:")] == [f"problem: {each}" for each in problems]
    assert (ran.exit_code, ALL_WORKS in lines) == ((1, False) if problems else (0, True))
