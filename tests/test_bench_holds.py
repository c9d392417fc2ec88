"""The suite `holds`, on the CPU and at sizes that say nothing about training."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import __main__ as command_line
from bench import holds, holds_data, holds_models, holds_plot, holds_report, holds_training, report, rows

ORIGIN = {"commit": "c0ffee", "dirty": False, "sources": "s1", "device": "NVIDIA H200", "command": "python -m bench"}


@pytest.fixture(scope="module", params=sorted(holds_training.TASKS))
def task(request: pytest.FixtureRequest) -> holds_training.Task:
    pytest.importorskip("numpy")
    return holds_training.TASKS[request.param]("cpu", True)


# Data


def package(folder: Path, name: str, size: int) -> bytes:
    text = (f"# {name}\n".encode() * size)[:size]
    (folder / name / "inner").mkdir(parents=True)
    (folder / name / "inner" / "b.py").write_bytes(text)
    (folder / name / "a.py").write_bytes(text[:10])
    (folder / name / "data.txt").write_bytes(b"no source")
    return text[:10] + text


def test_held_out_packages_are_not_trained_on(tmp_path: Path) -> None:
    held_out = b"".join(package(tmp_path, name, 50) for name in holds_data.HELD_OUT)
    first, second = package(tmp_path, "zebra", 100), package(tmp_path, "ant", 80)
    text = holds_data.installed_sources(tmp_path)
    assert bytes(text.training.tolist()) == second + first
    assert bytes(text.validation.tolist()) == held_out
    limited = holds_data.installed_sources(tmp_path, limit=100, package_limit=60)
    assert bytes(limited.training.tolist()) == second[:60] + first[:40]


def test_text_without_a_held_out_package_is_refused(tmp_path: Path) -> None:
    for name in holds_data.HELD_OUT[1:]:
        package(tmp_path, name, 50)
    with pytest.raises(ModuleNotFoundError, match=holds_data.HELD_OUT[0]):
        holds_data.installed_sources(tmp_path)


def test_digits_are_split_without_overlap() -> None:
    pytest.importorskip("numpy")
    images = holds_data.digits()
    assert images.training.shape == (897, 1, 8, 8)
    assert images.validation.shape == (900, 1, 8, 8)
    # The counts of the ten digits among all 1,797, as the data set's description gives them.
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.cat([images.training_labels, images.validation_labels]).bincount().tolist() == counts
    assert (images.training.min(), images.training.max()) == (-1, 1)


def test_render_scales_up_bilinearly_and_shifts() -> None:
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    views = holds_data.shifted_views(images, 64).view(5, 3, 1, 64, 64)
    exact = nn.functional.interpolate(images, size=64, mode="bilinear", align_corners=False)
    # The positions, up to 8, are rounded to float32 in a few operations; values change by at most 2 max|x| a pixel.
    tolerance = 16 * 8 * 2.0**-24 * 2 * float(images.abs().max())
    torch.testing.assert_close(views[0], exact, rtol=0, atol=tolerance)
    # Half a source pixel is 4 of 64: what is read lies further right, or left.
    torch.testing.assert_close(views[1][..., :60], exact[..., 4:], rtol=0, atol=tolerance)
    torch.testing.assert_close(views[2][..., 4:], exact[..., :60], rtol=0, atol=tolerance)


# Training


def test_byte_model_has_25_million_parameters() -> None:
    with torch.device("meta"):
        model = holds_models.ByteModel(holds_models.Shape(8, 512, 8, 256))
    assert 25e6 <= holds_models.parameters_of(model) <= 26e6


def test_byte_model_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    model = holds_models.ByteModel(holds_models.Shape(2, 32, 2, 16))
    logits: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda _, __, output: logits.append(output))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    model(tokens, tokens), model(changed, tokens)
    assert torch.equal(logits[0][:, :9], logits[1][:, :9])
    assert not torch.equal(logits[0][:, 9:], logits[1][:, 9:])


def test_arms_start_from_the_same_weights_and_see_the_same_batches(
    task: holds_training.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[str]] = {}
    arms = dict(holds_training.ARMS)

    def watched(arm: str) -> Callable[[nn.Module], Any]:
        def apply(module: nn.Module) -> Any:
            own = seen.setdefault(arm, [holds_training.fingerprint(module.state_dict().values())])
            module.register_forward_pre_hook(
                lambda module, batch: own.append(holds_training.fingerprint(batch)) if module.training else None
            )
            return arms[arm](module)

        return apply

    for arm in arms:
        monkeypatch.setitem(holds_training.ARMS, arm, watched(arm))
    found = {arm: holds_training.train(task, arm, 3) for arm in ("vanilla", "lossless", "nearest2")}
    assert len(seen["vanilla"]) == 1 + task.steps
    assert len(set(seen["vanilla"])) == 1 + task.steps
    assert seen["vanilla"] == seen["lossless"] == seen["nearest2"]
    assert len({row["pair"] for row in found.values()}) == 1
    other = holds_training.train(task, "vanilla", 4)
    assert other["pair"] != found["vanilla"]["pair"]
    # What must differ does: without it the arm would be vanilla, and nothing could fail.
    assert found["nearest2"]["loss"] != found["vanilla"]["loss"]


def test_training_learns_and_keeps_its_curves(task: holds_training.Task) -> None:
    row = holds_training.train(task, "vanilla", 0)
    assert [step for step, _ in row["training_curve"]] == [10, 12]
    assert row["training_curve"][-1][1] < row["training_curve"][0][1]
    assert row["validation_curve"][-1] == [task.steps, row["loss"], row["value"]]
    json.dumps(row, allow_nan=False)


def test_memorised_sequences_can_be_known_to_the_last_byte() -> None:
    sequences = holds_data.random_sequences(32, 65)
    assert sequences.shape == (32, 65)
    assert (int(sequences.min()), int(sequences.max())) == (0, 255)
    # No two share what comes before a byte that differs.
    assert len(set(sequences[:, 0].tolist())) == 32
    assert torch.equal(sequences, holds_data.random_sequences(32, 65))


def test_recall_is_the_share_of_bytes_above_the_bar() -> None:
    task = holds_training.Memorise("cpu", True)
    module = task.build()
    right = nn.functional.one_hot(task.sequences[:, 1:], 256).float()
    # The right byte's logit is a and all others are 0: it has e^a / (e^a + 255), in the first sequence 1 / 256.
    for probability, recalled in ((0.9899, 0.0), (0.9901, 15 / 16)):
        right[0] = 0.0
        logits = right * math.log(255 * probability / (1 - probability))
        module.logits = lambda _, logits=logits: logits  # type: ignore[method-assign]
        loss, recall = task.evaluate(module)
        assert recall == recalled
        assert loss == pytest.approx((math.log(256) - 15 * math.log(probability)) / 16, rel=1e-4)


def test_memorising_tells_a_gradient_that_is_wrong_at_low_loss() -> None:
    task = holds_training.Memorise("cpu", True)
    task.steps = 100
    exact, wrong = (holds_training.train(task, arm, 0) for arm in ("vanilla", "nearest2"))
    assert exact["value"] == 1.0
    # The limit of the report, as a share of 1. By the loss, both learned: it is 5.5 at the start.
    assert wrong["value"] < 1.0 - holds_report.LIMIT
    assert exact["loss"] < wrong["loss"] < 0.1


def test_weights_are_never_packed_in_two_bits() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    x = torch.randn(512, 512, requires_grad=True) * 1.0
    with holds_training.ARMS["nearest2"](module)(), torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    # The first gradient with respect to the last layer's input reads its weight alone.
    exact = torch.ones(512, 512, dtype=torch.bfloat16) @ module[2].weight.bfloat16()
    hidden: list[torch.Tensor] = []
    y.grad_fn.next_functions[1][0].register_hook(lambda _, out: hidden.append(out[0]))
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(hidden[0], exact, rtol=0, atol=0)


def test_diverged_training_is_a_row_without_a_value() -> None:
    assert holds_training.curve(torch.tensor([1.0] * 10 + [math.nan] * 5)) == [[10, 1.0], [15, None]]
    assert holds_training.number(math.inf) is None


# Rows


def options(out: Path, **fields: Any) -> rows.Options:
    return replace(rows.Options(out, "cpu", rows.Budget(None), tiny=True), **fields)


def stored(out: Path) -> list[rows.Row]:
    found: list[rows.Row] = json.loads((out / "holds.json").read_text())["rows"]
    return found


def fake(spec: holds.Spec, _: rows.Budget) -> Any:
    for arm in spec.arms:
        yield {**spec.identity(arm), "status": "error" if (spec.seed, arm) == (1, "int8") else "ok", "reason": ""}


def test_run_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "supervise", fake)
    holds.run(options(tmp_path), ("vanilla", "int8"), 2, 2)
    found = {(row["workload"], row["seed"], row["method"]) for row in stored(tmp_path)}
    assert found == {(task, s, arm) for task in holds_training.TASKS for s in (0, 1) for arm in ("vanilla", "int8")}
    asked: list[holds.Spec] = []

    def again(spec: holds.Spec, budget: rows.Budget) -> Any:
        asked.append(spec)
        return fake(spec, budget)

    monkeypatch.setattr(holds, "supervise", again)
    holds.run(options(tmp_path), ("vanilla", "int8"), 3, 1)
    assert [(spec.task, spec.seed, spec.arms) for spec in asked] == [
        (task, seed, arms) for seed, arms in ((1, ("int8",)), (2, ("vanilla", "int8"))) for task in holds_training.TASKS
    ]


def test_run_starts_nothing_without_budget(tmp_path: Path) -> None:
    holds.run(options(tmp_path, budget=rows.Budget(0.0)), ("vanilla",), 1, 1)
    assert not (tmp_path / "holds.json").exists()


def test_process_that_dies_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = holds.Spec("byte_lm", 0, ("vanilla", "int8", "lossless"), "cpu", True, None)
    rows_of = [[spec.identity("vanilla")], [], [spec.identity("lossless")]]
    codes = iter((holds.RESTART, 11, 0))
    lines = iter("\n".join(json.dumps(row) for row in own) for own in rows_of)

    def command(*_: Any, **__: Any) -> subprocess.Popen[str]:
        script = f"print({next(lines)!r}); raise SystemExit({next(codes)})"
        return popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)

    popen = subprocess.Popen
    monkeypatch.setattr(holds.subprocess, "Popen", command)
    found = list(holds.supervise(spec, rows.Budget(None)))
    assert [row["method"] for row in found] == ["vanilla", "int8", "lossless"]
    assert "exit code 11" in found[1]["reason"]


def test_process_prints_its_rows() -> None:
    pytest.importorskip("numpy")
    spec = holds.Spec("resnet50_digits", 1, ("vanilla", "nearest2"), "cpu", True, None)
    found = list(holds.supervise(spec, rows.Budget(None)))
    assert [(row["method"], row["status"], row["seed"]) for row in found] == [
        ("vanilla", "ok", 1),
        ("nearest2", "ok", 1),
    ]
    assert found[0]["pair"] == found[1]["pair"]


def test_missing_package_is_the_reason_of_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> nn.Module:
        raise ModuleNotFoundError("No module named 'timm'")

    pytest.importorskip("numpy")
    monkeypatch.setattr(holds_models, "small_convolutional", missing)
    spec = holds.Spec("resnet50_digits", 0, ("vanilla", "int8"), "cpu", True, None)
    assert holds.work(spec) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["method"], row["status"]) for row in found] == [("vanilla", "unavailable"), ("int8", "unavailable")]
    assert "timm" in found[0]["reason"]


@pytest.mark.parametrize("wrong", [["--methods", "int4"], ["--only", "bert"]])
def test_command_line_names_arms_and_tasks(
    wrong: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["holds", "--device", "cpu", "--out", str(tmp_path), *wrong])
    assert ended.value.code == 2
    assert "nearest2" in (text := capsys.readouterr().err) or "byte_lm" in text


def test_spec_survives_the_command_line() -> None:
    spec = holds.Spec("byte_lm", 4, ("vanilla",), "cpu", True, 1.5)
    fields = json.loads(json.dumps(asdict(spec)))
    assert holds.Spec(**{**fields, "arms": tuple(fields["arms"])}) == spec


# Report


def result(arm: str, seed: int, value: float | None, task: str = "byte_lm", **fields: Any) -> rows.Row:
    lower = task == "byte_lm"
    row = {
        "suite": "holds", "workload": task, "method": arm, "seed": seed, "scale": "full", "status": "ok",
        "metric": "validation bits per byte" if lower else "validation accuracy", "lower_is_better": lower,
        "value": value, "loss": value, "pair": f"p{seed}", "act_bytes": 100 if arm == "vanilla" else 25,
        "training_curve": [[10, 2.0], [20, value]], "validation_curve": [[20, value, value]],
        "time": "2026-01-02T03:04:05+00:00", "origin": ORIGIN,
    }  # fmt: skip
    return {**row, **fields}


def pairs(arm: str, worse: list[float], task: str = "byte_lm") -> list[rows.Row]:
    """Return five runs of vanilla around 2 (0.98 for accuracy) and of an arm that is worse by these amounts."""
    level, sign = (2.0, 1) if task == "byte_lm" else (0.98, -1)
    base = [level + 0.1 * sign * offset for offset in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    return [result("vanilla", seed, value, task) for seed, value in enumerate(base)] + [
        result(arm, seed, value + sign * more, task) for seed, (value, more) in enumerate(zip(base, worse, strict=True))
    ]


def one(found: list[rows.Row], arm: str) -> holds_report.Outcome:
    return next(outcome for outcome in holds_report.outcomes(found) if outcome.arm == arm)


def test_bound_is_the_one_sided_t_interval_of_five_pairs() -> None:
    # Mean 3, sample variance (4 + 1 + 0 + 1 + 4) / 4 = 2.5, standard error sqrt(2.5 / 5) = 0.70711; times 2.132.
    assert holds_report.upper_bound([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3 + 2.132 * math.sqrt(0.5), rel=1e-12)
    # With 4 degrees of freedom Student's t has the distribution 1/2 + s (3 - s^2) / 4 with s = t / sqrt(t^2 + 4).
    s = holds_report.T95 / math.sqrt(holds_report.T95**2 + 4)
    # The quantile is rounded to 3 decimals, and the density there is below 0.06.
    assert 0.5 + s * (3 - s * s) / 4 == pytest.approx(0.95, abs=0.06 * 0.0005)
    assert holds_report.upper_bound([0.0, 0.0, 0.0, 0.0, math.inf]) == math.inf
    with pytest.raises(ValueError, match="5 pairs"):
        holds_report.upper_bound([1.0, 2.0])


@pytest.mark.parametrize("task", sorted(holds_training.TASKS))
def test_degradations_are_paired_and_relative_to_vanilla(task: str) -> None:
    worse = [0.001, 0.002, 0.003, 0.002, 0.002]
    outcome = one(pairs("int8", worse, task), "int8")
    level = 2.0 if task == "byte_lm" else 0.98
    assert outcome.degradations == pytest.approx([value / level for value in worse], rel=1e-9)
    expected = [value / level for value in worse]
    half = 2.132 * statistics.stdev(expected) / math.sqrt(5)
    assert outcome.bound == pytest.approx(statistics.mean(expected) + half, rel=1e-9)
    assert outcome.act_x == 0.25
    assert outcome.verdict == "holds"


@pytest.mark.parametrize(
    ("arm", "worse", "verdict"),
    [
        ("int8", [0.009] * 5, "holds"),
        ("int8", [0.011] * 5, "not shown to hold"),
        ("int8", [-0.1, 0.1, 0.0, 0.05, -0.05], "not shown to hold"),  # no worse on average, but nobody can tell
        ("nearest2", [0.2] * 5, "fails, as it must"),
        ("nearest2", [0.0] * 5, "not told apart: the test shows nothing"),
        ("nearest2", [-0.1, 0.1, 0.0, 0.05, -0.05], "not told apart: the test shows nothing"),
    ],
)
def test_verdict_follows_the_bound(arm: str, worse: list[float], verdict: str) -> None:
    assert one(pairs(arm, worse), arm).verdict == verdict


def test_diverged_arm_fails() -> None:
    found = [{**row, "value": None} if (row["method"], row["seed"]) == ("nearest2", 2) else row
             for row in pairs("nearest2", [0.0] * 5)]  # fmt: skip
    assert one(found, "nearest2").verdict == "fails, as it must"
    assert "diverged" in holds_report.holds_table(found)
    fewer = [row for row in found if (row["method"], row["seed"]) != ("nearest2", 4)]
    assert one(fewer, "nearest2").verdict == "fails, as it must (4 of 5 seeds)"


def test_only_pairs_of_the_same_sources_count() -> None:
    found = pairs("int8", [0.0] * 5)
    unpaired = [{**row, "pair": "other"} if (row["method"], row["seed"]) == ("int8", 0) else row for row in found]
    assert one(unpaired, "int8").verdict == "4 of 5 seeds"
    older = [{**row, "origin": {**ORIGIN, "sources": "s0"}} for row in pairs("int8", [1.0] * 5)]
    assert one(older + found, "int8").mean == 0.0
    assert holds_report.outcomes([{**row, "scale": "tiny"} for row in found]) == []


def test_task_explains_itself_where_it_is_shown() -> None:
    found = pairs("int8", [0.001] * 5, "byte_lm")
    note = holds_training.Memorise.note
    assert note
    assert note not in holds_report.holds_table(found)
    assert note in holds_report.holds_table(found + pairs("int8", [0.001] * 5, "memorise"))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1.0, 4.0, [1, 1.5, 2, 2.5, 3, 4]), (0.1, 5.0, [0.1, 0.2, 0.5, 1, 2, 5]), (0.001, 6.0, [0.001, 0.01, 0.1, 1])],
)
def test_ticks_are_few_and_round(low: float, high: float, ticks: list[float]) -> None:
    assert holds_plot._ticks(low, high) == pytest.approx(ticks, rel=1e-12)


def test_report_fills_the_block_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = []
    for task in holds_training.TASKS:
        found += pairs("int8", [0.001] * 5, task)
        found += [row for row in pairs("nearest2", [0.1] * 5, task) if row["method"] == "nearest2"]
    found[-1] = {**found[-1], "value": None, "training_curve": [[10, None], [20, None]],
                 "validation_curve": [[20, None, None]]}  # fmt: skip
    (tmp_path / "holds.json").write_text(json.dumps({"schema": 1, "rows": found}))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:holds -->\n<!-- /bench:holds -->\n")
    report.run(tmp_path, readme, tmp_path / "docs")
    text = readme.read_text()
    assert "|  | int8 | 2.0010 | 2.0010 | 0.25 | +0.05 % | +0.05 % | +0.50 % | holds |" in text
    assert "|  | nearest2 | 2.1000 | 2.1000 | 0.25 | +5.00 % | +5.00 % | +0.50 % | fails, as it must |" in text
    assert "NVIDIA H200; commit c0ffee" in text
    assert (tmp_path / "docs" / "training_holds.png").read_bytes().startswith(b"\x89PNG")
