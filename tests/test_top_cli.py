"""The command ``top``."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from live_stand_in import Driver

for _name in ("typer", "rich"):
    pytest.importorskip(_name)

from click.testing import Result  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from pyactcomp.cli.commands import app  # noqa: E402
from pyactcomp.live import nvml  # noqa: E402


@pytest.fixture(autouse=True)
def _library_is_looked_for_anew() -> Any:
    nvml._library.cache_clear()
    yield
    nvml._library.cache_clear()


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["top", *arguments])


def give(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # None: not installed


def test_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, Driver({11: 3 << 30, 7: 5 << 30, 12: None}))
    ran = run("--once")
    assert ran.exit_code == 0, ran.output
    lines = [line.split() for line in ran.stdout.splitlines()]
    cards = [line for line in lines if "H100" in line]
    # 30 of 80 GiB: 7.5 of 20 parts, rounded to even.
    assert [line[0] for line in cards] == ["0", "1"]
    assert cards[0].count("30.00") == cards[0].count("80.00") == 1
    assert cards[0][2].count("█") == 8
    assert cards[0][-2:] == ["50", "%"]
    processes = [line for line in lines if line[:1] == ["1"] and "H100" not in line]
    assert processes == [
        ["1", "unknown", "7", "5.00", "GiB"],
        ["1", "python", "11", "3.00", "GiB"],
        ["1", "python", "12", "?"],
    ]


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, Driver({11: 3 << 30}))
    found = json.loads(run("--json").stdout)["gpus"]
    assert [(gpu["index"], gpu["used"], gpu["total"]) for gpu in found] == [
        (0, 30 << 30, 80 << 30),
        (1, 30 << 30, 80 << 30),
    ]
    assert found[1]["processes"] == [{"pid": 11, "name": "python", "bytes": 3 << 30}]


def test_refreshes_until_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, Driver({}))
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("pyactcomp.cli.top.time.sleep", sleep)
    ran = run("--interval", "0.5")
    assert ran.exit_code == 0, ran.output
    assert waited == [0.5] * 3
    assert "no process that this user or container sees" in ran.stdout


def test_without_nvml_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, None)
    ran = run("--once")
    assert ran.exit_code == 2
    assert ran.stderr.splitlines() == [f"Error: GPUs and their processes are read by nvidia-ml-py; run: {nvml.INSTALL}"]


def test_without_a_driver_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({})

    def fails() -> None:
        raise driver.NVMLError("Driver Not Loaded")

    driver.nvmlInit = fails
    give(monkeypatch, driver)
    ran = run()
    assert ran.exit_code == 2
    (line,) = ran.stderr.splitlines()
    assert "no NVIDIA driver to ask (Driver Not Loaded)" in line


@pytest.mark.parametrize("interval", ["0", "-1", "1e9", "x"])
def test_wrong_interval(interval: str) -> None:
    ran = run("--interval", interval)
    assert ran.exit_code == 2
    assert "--interval" in ran.output


@pytest.mark.gpu
def test_this_machines_gpus() -> None:
    pytest.importorskip("pynvml")
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    gpu = nvml.gpu_of(uuid)
    assert gpu is not None
    _, total = torch.cuda.mem_get_info(0)
    assert abs(gpu.total - total) <= 0.02 * total
    assert run("--once").exit_code == 0
