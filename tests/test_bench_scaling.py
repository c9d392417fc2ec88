"""The suite `scaling`: CPU time against size. The figures are the machine's, so nothing here looks at them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cases import options

from bench import scaling


def test_exponents_come_from_times_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict.fromkeys(("linear", "quadratic"), (4096, 65536))
    cost = {"linear": lambda size: 1e-6 * size, "quadratic": lambda size: 1e-9 * size**2}
    cases = {name: (cost[name], each) for name, each in sizes.items()}
    monkeypatch.setattr(scaling, "CASES", cases)
    monkeypatch.setattr(scaling, "seconds", lambda prepare, size: prepare(size))
    assert scaling.measure("linear", tiny=False)["exponent"] == pytest.approx(1)
    assert scaling.measure("quadratic", tiny=True)["exponent"] == pytest.approx(2)
    assert scaling.measure("quadratic", tiny=True)["sizes"] == [64, 1024]


def test_each_case_is_measured_once(tmp_path: Path) -> None:
    for _ in range(2):
        scaling.run(options(tmp_path))
        rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
        assert [row["workload"] for row in rows] == list(scaling.CASES)
        assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.parametrize("name", ["live_blocks", "colliding_frames", "segments_elsewhere"])
def test_files_hold_as_many_entries_as_the_size_says(name: str, tmp_path: Path) -> None:
    prepare, sizes = scaling.CASES[name]
    size = sizes[0] // scaling.TINY
    result = prepare(size, tmp_path)()
    if name == "segments_elsewhere":
        assert result.allocations == size
    elif name == "live_blocks":
        assert len(result.devices[0].events) == size
    else:
        assert len(result.frames) == size
