"""The suite `breadth`: pairs through the whole path, what does not build, what does not end, and the tables."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import ORIGIN
from breadth_jobs import work
from torch import Tensor, nn

from bench import __main__ as command_line
from bench import breadth, breadth_measure, breadth_pool, breadth_report, report, rows
from bench.breadth_models import Pair, Step
from bench.breadth_shrink import tiny

ROOT = Path(__file__).parents[1]


def run(out: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "bench", "breadth", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The whole path


@pytest.mark.slow
def test_pairs_are_measured_written_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch_geometric", reason="torch_geometric is not installed")
    only = "transformers/llama,torch_geometric/SAGEConv(mean),transformers/timm_backbone"
    out = run(tmp_path, "--only", only)
    found = {row["architecture"]: row for row in rows.read(tmp_path / "breadth.json")}
    assert set(found) == {"llama", "SAGEConv(mean)", "timm_backbone"}
    llama = found["llama"]
    assert llama["status"] == "ok"
    assert (llama["lossless"], llama["lossless_dropout"]) == (0, 0)
    for figure in ("int8", "noise", "int8_head", "int8_ckpt"):
        assert 0 < llama[figure] < 0.1, figure
    assert 0 < llama["ratio"] < 1
    assert llama["kept"][0][1] > 0
    sage = found["SAGEConv(mean)"]
    assert (sage["int8_head"], sage["int8_ckpt"]) == (None, None)
    assert found["timm_backbone"]["status"] == breadth_measure.NOT_BUILT
    assert "timm" in found["timm_backbone"]["reason"]
    assert "3 pairs of 3 architectures; built: 2 of 2" in out
    # A second call has nothing left to do, and writes nothing.
    before = (tmp_path / "breadth.json").read_bytes()
    assert "breadth transformers" not in run(tmp_path, "--only", only)
    assert (tmp_path / "breadth.json").read_bytes() == before
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:breadth -->\n<!-- /bench:breadth -->\n")
    report.run(tmp_path, page, tmp_path)
    assert "| transformers | causal LM | 1 | 1 | 1 of 1 |" in page.read_text()


def test_a_newer_row_replaces_the_older_one_and_origins_are_written_once(tmp_path: Path) -> None:
    store = rows.Store(tmp_path / "breadth.json", ORIGIN, breadth.KEY)
    for architecture, value in (("a", 1), ("b", 2), ("a", 3)):
        store.append({"library": "l", "architecture": architecture, "head": "h", "value": value})
    assert [(row["architecture"], row["value"], row["origin"]) for row in store.rows()] == [
        ("b", 2, ORIGIN), ("a", 3, ORIGIN)
    ]  # fmt: skip
    assert json.loads(store.path.read_text())["origins"] == [ORIGIN]


def test_only_what_is_missing_is_measured(tmp_path: Path) -> None:
    store = rows.Store(tmp_path / "breadth.json", ORIGIN, breadth.KEY)
    for architecture, status in (("built", "ok"), ("unbuilt", "not built"), ("slow", "timeout")):
        store.append({"library": "l", "architecture": architecture, "head": "h", "status": status})
    assert breadth.measured(store) == {Pair("l", "built", "h"), Pair("l", "unbuilt", "h")}
    other = rows.Store(store.path, {**ORIGIN, "sources": "s2"}, breadth.KEY)
    assert breadth.measured(other) == set()


def test_only_selects_by_library_architecture_and_head() -> None:
    everything = [Pair("a", "x", "1"), Pair("a", "x", "2"), Pair("a", "y", "1"), Pair("b", "x", "1")]
    assert breadth.selected((), everything) == everything
    assert breadth.selected(("a/x",), everything) == everything[:2]
    assert breadth.selected(("a/x/2", "b"), everything) == [everything[1], everything[3]]
    with pytest.raises(breadth.UnknownPairError, match="a/z"):
        breadth.selected(("a/z",), everything)


def test_an_unknown_pair_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["breadth", "--out", str(tmp_path), "--only", "transformers/no_such_model"])
    assert "no pair is named transformers/no_such_model" in capsys.readouterr().err


# Processes


def test_a_failure_a_crash_and_an_endless_job_cost_one_result_each() -> None:
    jobs = ["works", "fails", "dies", "hangs", "works too"]
    # The limit leaves room for a process to start on a busy machine.
    found = dict(breadth_pool.results(jobs, work, limit_s=10.0, workers=2))
    assert (found["works"], found["works too"]) == (5, 9)
    assert found["fails"] == breadth_pool.Failed("error", "ValueError: (path) is no file")
    assert found["dies"] == breadth_pool.Failed("crash", "the process ended with SIGSEGV")
    assert found["hangs"] == breadth_pool.Failed("timeout", "not done after 10 s")


# What is measured


def _gradients(*values: float) -> dict[str, Tensor]:
    return {str(number): torch.tensor([value, 1.0]) for number, value in enumerate(values)}


def test_error_is_over_all_gradients_together() -> None:
    exact = _gradients(3.0, 4.0)
    assert breadth_measure.error(exact, exact) == 0
    # |(1, 2)| over |(3, 1, 4, 1)|
    assert breadth_measure.error(exact, _gradients(4.0, 6.0)) == pytest.approx(math.sqrt(5 / 27))
    assert breadth_measure.error(exact, _gradients(3.0, math.nan)) == math.inf
    assert breadth_measure.error(exact, _gradients(3.0, math.inf)) == math.inf
    assert breadth_measure.error(exact, _gradients(3.0)) == math.inf
    assert breadth_measure.rounded(math.inf) == "inf"
    assert breadth_measure.rounded(0.0123456) == 0.01235


def test_differing_looks_at_bits() -> None:
    exact = _gradients(0.0, 4.0)
    assert breadth_measure.differing(exact, _gradients(0.0, 4.0)) == 0
    assert breadth_measure.differing(exact, _gradients(-0.0, 4.0)) == 1
    assert breadth_measure.differing(exact, _gradients(0.0)) == 1
    nan = _gradients(math.nan)
    assert breadth_measure.differing(nan, nan) == 0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def step() -> Step:
    return Step(Layers(), {"x": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}).train()


def test_a_step_that_compression_spoils_shows_as_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = breadth_measure.measure_steps(step(), step)
    assert sound["lossless"] == sound["lossless_dropout"] == 0
    assert 0 < sound["int8"] < 0.02
    assert "problems" not in sound

    compressed = breadth_measure._compressed

    def spoilt(step: Step, **options: Any) -> Any:
        if options.get("mode") == "lossless":
            raise RuntimeError("backward failed")
        found, saved = compressed(step, **options)
        return {name: gradient * math.nan for name, gradient in found.items()}, saved

    monkeypatch.setattr(breadth_measure, "_compressed", spoilt)
    row = breadth_measure.measure_steps(step(), step)
    assert row["int8"] == "inf"
    assert row["lossless"] == row["tensors"] == 4
    assert row["problems"]["lossless"] == "RuntimeError: backward failed"


def test_what_does_not_repeat_itself_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = breadth_measure.gradients
    calls = iter(range(1, 100))

    def noisy(step: Step, **options: Any) -> Any:
        factor = 1 + next(calls) * 2.0**-20
        return {name: gradient * factor for name, gradient in exact(step, **options).items()}

    monkeypatch.setattr(breadth_measure, "gradients", noisy)
    row = breadth_measure.measure_steps(step(), step)
    assert row["lossless"] is None
    assert row["problems"]["lossless"] == "plain torch does not repeat itself bit by bit"


def test_a_model_without_gradients_is_no_result() -> None:
    still = step()
    still.inputs = {"x": torch.full((64, 64), math.nan)}
    with pytest.raises(ValueError, match="norm of torch's own gradients"):
        breadth_measure.measure_steps(still, step)


def test_configurations_are_small_inside_and_out() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = tiny(transformers.LlavaConfig, 0.1, {"vision_config": {"num_hidden_layers": 3}})
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    assert config.text_config.attention_dropout == config.vision_config.attention_dropout == 0.1
    assert (config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers) == (2, 3)
    assert config.image_token_index < config.text_config.vocab_size == 384


# Tables


def row(architecture: str, **fields: Any) -> rows.Row:
    found = {
        "library": "transformers", "architecture": architecture, "head": "CAUSAL_LM", "status": "ok", "tensors": 20,
        "lossless": 0, "lossless_dropout": 0, "int8": 0.01, "noise": 0.005, "int8_ckpt": 0.01, "int8_head": None,
        "ratio": 0.25, "kept": [["smaller than min_bytes", 2048]], "time": "2026-01-02", "origin": ORIGIN,
    }  # fmt: skip
    return {**found, **fields}


ROWS = [
    row("good"),
    row("noisy", int8=0.05, noise=0.06),
    row("wrong", int8=0.05, noise=0.03, ratio=0.35),
    row("checkpointed", int8_ckpt=0.07, noise=0.03),
    row("infinite", int8="inf", problems={"int8": "RuntimeError: it | failed"}),
    row("bits", lossless=3, lossless_dropout=None),
    {**row("absent"), "status": "not built", "reason": "ImportError: timm is not installed"},
]


def test_exceptions_are_those_above_their_limits() -> None:
    assert [found["architecture"] for found in ROWS[:-1] if breadth_report.exceptional(found)] == [
        "wrong", "checkpointed", "infinite", "bits"
    ]  # fmt: skip
    table = breadth_report.exceptions_table(ROWS)
    lines = [line.split("`")[1].split("/")[1] for line in table.splitlines() if "`" in line]
    assert lines == ["infinite", "checkpointed", "wrong", "bits"]
    assert "**not finite**" in table
    assert "3 of 20 differ |  |" in table
    assert "it \\| failed" in table


def test_families_are_counted() -> None:
    table = breadth_report.families_table(ROWS)
    line = next(line for line in table.splitlines() if "| causal LM |" in line)
    assert "| 7 | 6 | 5 of 6 | 1.00 % | **not finite** | 1.75 % | 2 | 1 of 6 | 0.25 |" in line
    assert breadth_report.failures_list(ROWS) == (
        "- `` not built: ImportError: timm is not installed ``: `transformers/absent/CAUSAL_LM`"
    )
    text = breadth_report.summary(ROWS)
    assert "7 pairs of 7 architectures; built: 6 of 6; median stored ratio 0.250" in text
    assert "lossless differs: 1\n  transformers/bits/CAUSAL_LM" in text
    assert breadth_report.families_table([]) == breadth_report.exceptions_table([]) == ""


def test_rows_of_earlier_sources_are_not_shown() -> None:
    old = row("old", int8=0.9, origin={**ORIGIN, "sources": "s0"})
    assert "old" not in breadth_report.exceptions_table([old, *ROWS])


def test_comparison_names_what_holds_more_than_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [row("wrong", ratio=0.29), row("good", ratio=0.22), row("gone", ratio=0.1)]
    text = breadth_report.against(ROWS, before)
    assert text.startswith("1 of 2 pairs hold over 0.05 more")
    assert "| `transformers/wrong/CAUSAL_LM` | 0.29 | 0.35 | smaller than min_bytes (2 KiB) |" in text
    for name, found in (("now", ROWS), ("earlier", before)):
        (tmp_path / name).mkdir()
        content = json.dumps({"schema": rows.SCHEMA, "rows": found})
        (tmp_path / name / "breadth.json").write_text(content)
    earlier = tmp_path / "earlier" / "breadth.json"
    arguments = ["report", "--out", str(tmp_path / "now"), "--readme", str(tmp_path / "none.md")]
    assert command_line.main([*arguments, "--docs", str(tmp_path), "--against", str(earlier)]) == 0
    assert "1 of 2 pairs hold over 0.05 more" in capsys.readouterr().out
