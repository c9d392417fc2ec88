"""The suite `overhead`: host time of saved tensors, and of steps that are the host's work alone."""

from __future__ import annotations

import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import options
from torch.nn import functional as F

import pyactcomp
from bench import overhead, overhead_models


def test_overhead_reports_the_difference_per_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, warm_up = (1.0, 2.0, 0.0), [(0.0, 0.0, 0.0)] * 2
    compressed = [(8.0, 6.0, 0.5), (9.0, 7.0, 0.5), (10.0, 8.0, 0.5)]
    calls = iter(warm_up + [figures for ours in compressed for figures in (plain, ours)])
    real_chain = overhead.chain

    def chain(operator: Any, x: torch.Tensor, length: int, context: Any, device: str) -> overhead.Times:
        if length == 4:
            return real_chain(operator, x, length, context, device)
        return next(calls)

    monkeypatch.setattr(overhead, "chain", chain)
    monkeypatch.setattr(overhead, "launches", lambda x, calls, device: {"encode_us": 1.0})
    row = overhead.measure(options(tmp_path))
    assert (row["pack_us"], row["unpack_us"], row["sum_us"], row["drain_us"]) == (8.0, 5.0, 13.0, 0.5)
    assert row["encode_us"] == 1.0


def test_overhead_measures_each_row_once(tmp_path: Path) -> None:
    overhead.run(options(tmp_path))
    found = json.loads((tmp_path / "overhead.json").read_text())["rows"]
    assert [(row["workload"], row["method"], row["status"]) for row in found] == [
        ("silu-chain", "int8", "ok"), ("silu-chain", "python hook", "ok"),
        ("transformer-12x32", "int8", "ok"), ("tiny-5000", "int8", "ok"),
    ]  # fmt: skip
    for row in found[2:]:
        ratios = [b / a for a, b in zip(row["samples_plain_ms"], row["samples_int8_ms"], strict=True)]
        assert row["time_x"] == pytest.approx(statistics.median(ratios), rel=1e-2)  # samples have four decimals
        saved = (row["int8_ms"] - row["plain_ms"]) * 1e3 / row["tensors"]
        assert row["sum_us"] == pytest.approx(saved, rel=1e-9)
    overhead.run(options(tmp_path))
    assert len(json.loads((tmp_path / "overhead.json").read_text())["rows"]) == 4


def test_overhead_of_tiny_tensors_packs_one_for_each_layer() -> None:
    model, batch = overhead_models.tiny_tensors(6)
    pyactcomp.compress(model, min_bytes=1)
    model(batch.requires_grad_()).sum().backward()
    report = pyactcomp.report(model)
    packed = [tensor for tensor in report.tensors if tensor.kept is None]
    assert len(packed) == 2 * 6 - 1  # the first layer's input is the batch itself
    assert {tensor.saved_bytes for tensor in packed} == {16 * 32 * 4}


def test_overhead_refuses_to_time_what_is_not_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyactcomp, "compressed", nullcontext)
    overhead.run(options(tmp_path, only=(overhead.CHAIN, "int8")))
    found = json.loads((tmp_path / "overhead.json").read_text())["rows"]
    assert [row["status"] for row in found] == ["error"]
    assert "nothing was compressed" in found[0]["reason"]


def test_overhead_refuses_to_time_what_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead.Chains, "_link", lambda chains, y: F.silu(y))
    with pytest.raises(RuntimeError, match="not each packs one tensor"):
        overhead.Chains("cpu", 4)
