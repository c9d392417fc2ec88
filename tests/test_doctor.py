"""``pyactcomp doctor``: what it reports, and that it notices what is broken."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pyactcomp import codec
from pyactcomp.cli import examine
from pyactcomp.codec import reference
from pyactcomp.torch_private import tests as torch_private_tests


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


def test_examine_reports_a_device_that_only_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine.codec, "resolve", lambda impl, device: "reference")
    problems = examine.examine()["problems"]
    assert sum("only the slow reference" in problem for problem in problems) == 1 + torch.cuda.device_count()
