"""The suite `context`: its models, peers and methods, the order of its rows, what ends a row, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import options
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyactcomp
from bench import __main__ as command
from bench import context, context_methods, context_models, context_report, context_worker, rows
from bench.context_methods import METHODS
from bench.context_peers import HostInputs
from bench.context_worker import Job
from pyactcomp.errors import ImplementationUnavailableError

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

JOB = Job("llama8b", "full", 64, "plain", "cpu", tiny=True, memory_gib=1000.0)


# --- models -----------------------------------------------------------------------------------------------------------


def test_the_loss_in_chunks_is_that_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_models, "CHUNK", 24)  # 100 tokens end in a part of a chunk
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(100, 32, generator=generator, dtype=torch.double).requires_grad_()
    weight = torch.randn(50, 32, generator=generator, dtype=torch.double).requires_grad_()
    labels = torch.randint(50, (100,), generator=generator)
    exact = F.cross_entropy(hidden @ weight.t(), labels)
    wanted = torch.autograd.grad(3 * exact, (hidden, weight))
    loss = context_models.ChunkedLoss.apply(hidden, weight, labels)
    found = torch.autograd.grad(3 * loss, (hidden, weight))
    # Softmax and loss are in float32, each element of a gradient is a sum over at most 100 of its products.
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < 100 * 2**-24


def test_a_frozen_head_has_no_gradient() -> None:
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(5, 4)
    loss = context_models.ChunkedLoss.apply(hidden, weight, torch.arange(8) % 5)
    loss.backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("name", context_models.SHAPES)
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    shape = context_models.TINY[name]
    model = context_models.build(shape, 64, "cpu")
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert matrices == shape.block_weights
    full = context_models.SHAPES[name]
    # meta-llama/Llama-3.1-8B has 8,030,261,248 weights, Qwen/Qwen3-8B 8,190,735,360.
    norms = full.width * (2 * full.layers + 1) + (2 * full.layers * full.head_width if name == "qwen8b" else 0)
    published = {"llama8b": 8_030_261_248, "qwen8b": 8_190_735_360}[name]
    assert full.block_weights + 2 * full.width * full.vocabulary + norms == published


def test_the_estimate_of_a_step_counts_its_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    shape, tokens = context_models.TINY["llama8b"], 64
    module = context_models.NextToken(context_models.build(shape, tokens, "cpu"), own_head=True)
    with FlopCounterMode(display=False) as counter:
        module(torch.randint(shape.vocabulary, (1, tokens))).backward()
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    attention = 3.5 * 2 * tokens**2 * shape.heads * shape.head_width * shape.layers
    estimate = shape.seconds(tokens, full=True, reruns=0) * context_models.RATE - attention
    assert counted == pytest.approx(estimate, rel=1e-9)


def test_lora_trains_adapters_of_every_matrix_of_the_blocks() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    model = context_models.build(context_models.TINY["llama8b"], 64, "cpu")
    matrices = sum(isinstance(module, nn.Linear) for module in model.model.layers.modules())
    context_models.freeze_beside_lora(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * matrices
    assert all("lora" in name for name in trained)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_the_first_package_that_works_gives_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(parameters: Any, lr: float) -> torch.optim.Optimizer:
        raise ImportError("no such package")

    def idle(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    def works(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr)

    parameter = nn.Parameter(torch.ones(4))
    monkeypatch.setattr(context_models, "EIGHT_BIT", {"a": missing, "b": idle, "c": works})
    optimizer, package = context_models.adamw_8bit([parameter], 1e-3, "cpu", tiny=False)
    assert (package, optimizer.param_groups[0]["params"]) == ("c", [parameter])
    monkeypatch.setattr(context_models, "EIGHT_BIT", {"a": missing, "b": idle})
    with pytest.raises(ImportError, match=r"a: ImportError: no such package; b: its step left a parameter unchanged"):
        context_models.adamw_8bit([parameter], 1e-3, "cpu", tiny=False)
    assert context_models.adamw_8bit([parameter], 1e-3, "cpu", tiny=True)[1] == "torch"


# --- peers and methods ------------------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_on_the_host_give_the_gradients_of_checkpointing(device: str) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)).to(device)
    inputs = HostInputs(len(blocks), torch.device(device))

    def gradients(length: int, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        blocks.zero_grad()
        x = torch.randn(length, 64, generator=torch.Generator().manual_seed(length)).to(device).requires_grad_()
        out = x
        for block in blocks:
            out = run(block, out)
        out.square().sum().backward()
        return [each.grad.clone() for each in (x, *blocks.parameters()) if each.grad is not None]

    for length in (128, 128, 32, 256, 128):  # host memory is used again, in part, and grows
        exact = gradients(length, lambda block, x: checkpoint(block, x, use_reentrant=False))
        found = gradients(length, inputs)
        assert len(found) == 1 + 2 * len(blocks)
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    assert [buffer.numel() for buffer in inputs.host] == [256 * 64] * 3  # the last block's input stays


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "train"), [("llama8b", "lora"), ("qwen8b", "full")])
@pytest.mark.parametrize("name", ["plain", "ckpt", "unsloth", "int8", "int8+ckpt"])
def test_a_row_has_the_gradients_and_the_loss_of_plain_training(name: str, shape: str, train: str, device: str) -> None:
    if train == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
    job = replace(JOB, shape=shape, train=train, method=name, compare=True, device=device)
    found = context_worker.measure(job)
    plain = context_worker.measure(replace(job, method="plain", compare=False))
    if METHODS[name].ours:
        assert 0.0 < found["grad_error"] <= 0.02
    else:
        assert found["grad_error"] <= found["grad_error_plain"]
    assert abs(found["first_loss"] - plain["first_loss"]) <= context.LOSS_TOLERANCE * plain["first_loss"]
    assert found["tokens_per_s"] == pytest.approx(64e3 / found["median_ms"])
    assert (found["trained"] == found["parameters"]) is (train == "full")


def test_a_row_begins_no_step_after_its_time() -> None:
    clock = iter([0.0, 1.0, *(float(second) for second in range(10, 1000, 10))])
    row = context_worker.measure(replace(JOB, row_s=45.0), lambda: next(clock))
    # Warm-up steps begin at 10 and 20; the first timed one takes from 30 to 40, and one more would end at 50.
    assert len(row["samples_ms"]) == 1


@pytest.mark.gpu
def test_peaks_and_pinned_memory_of_each_timed_step_are_noted() -> None:
    row = context_worker.measure(replace(JOB, device="cuda", method="unsloth", tokens=128))
    assert len(row["samples_peak_bytes"]) == len(row["samples_ms"])
    assert row["peak_bytes"] == max(row["samples_peak_bytes"]) > row["base_bytes"]
    assert row["reserved_bytes"] >= row["peak_bytes"]
    assert row["host_bytes"] >= 2 * 128 * 64 * 2  # two of three blocks' inputs


@pytest.mark.parametrize("name", ["int8+offload", "int8+ckpt+offload", "inputs+offload"])
def test_a_version_without_offload_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compress(model: nn.Module, *, fuse_head: bool = False, min_bytes: int = 0) -> None:
        raise AssertionError("called without the option")

    def use_checkpoint(model: nn.Module, store: str = "int8") -> None:
        raise AssertionError("called without the option")

    monkeypatch.setattr(pyactcomp, "compress", compress)
    monkeypatch.setattr(pyactcomp, "use_checkpoint", use_checkpoint)
    with pytest.raises(ImplementationUnavailableError, match="has no option 'offload'"):
        METHODS[name].apply(nn.Linear(2, 2))


def test_offload_is_passed_to_a_version_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def compress(model: Any, *, fuse_head: bool, offload: str, min_bytes: int = 0) -> None:
        given.append({"fuse_head": fuse_head, "offload": offload})

    monkeypatch.setattr(pyactcomp, "compress", compress)
    METHODS["int8+offload"].apply(SimpleNamespace(device=torch.device("cuda")))
    assert given == [{"fuse_head": True, "offload": "auto"}]


# --- rows -------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that measuring a row moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def measuring(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, outcome: Callable[[Job], dict[str, Any] | None]
) -> list[str]:
    """Take these rows for measured, a hundred seconds each; return the names of those that were."""
    measured: list[str] = []

    def measure(job: Job, limit_s: float | None) -> dict[str, Any] | None:
        measured.append(f"{job.workload} {job.method}")
        clock.now += 100.0
        return outcome(job)

    monkeypatch.setattr(context, "_measure", measure)
    return measured


def fine(job: Job) -> dict[str, Any]:
    return {
        "status": "ok",
        "first_loss": 6.0,
        "tokens_per_s": 1.0,
        "median_ms": 1.0,
        **({"grad_error": 0.0} if job.compare else {}),
    }


def test_what_tells_most_is_measured_first_and_nothing_twice() -> None:
    jobs = context.plan(options(Path(), tiny=False), (), 80.0)
    named = [(job.workload, job.method) for job in jobs]
    assert named[:2] == [("llama8b-full-16384", "int8+offload"), ("llama8b-full-16384", "int8")]
    assert len(set(named)) == len(named) == 2 * 2 * 6 * len(METHODS)


def test_rows_are_measured_once_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    measured = measuring(monkeypatch, clock, fine)
    chosen = options(tmp_path, only=("llama8b-full-64",), budget=rows.Budget(150.0, clock))
    context.run(chosen, ("plain", "ckpt", "int8"))
    assert measured == ["llama8b-full-64 plain", "llama8b-full-64 ckpt"]  # 200 s are over then
    context.run(replace(chosen, budget=rows.Budget(None)), ("plain", "ckpt", "int8"))
    assert measured[2:] == ["llama8b-full-64 int8"]
    found = rows.read(tmp_path / "context.json")
    assert [(row["method"], row["status"], row["row_s"]) for row in found[:2]] == [
        ("plain", "ok", 100.0),
        ("ckpt", "ok", 100.0),
    ]
    assert all(row["origin"]["device"] == "cpu" for row in found)


def test_longer_sequences_of_what_ran_out_of_memory_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(job: Job) -> dict[str, Any]:
        return {"status": "oom", "reason": "CUDA out of memory"} if job.shape == "llama8b" else fine(job)

    measured = measuring(monkeypatch, Clock(), outcome)
    context.run(options(tmp_path), ("plain",))
    assert [name.split()[0] for name in measured] == [
        "llama8b-full-64", "llama8b-lora-64", "qwen8b-full-64", "qwen8b-lora-64", "qwen8b-full-128", "qwen8b-lora-128"
    ]  # fmt: skip


def test_what_needs_a_gpu_says_so_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch, Clock(), fine)
    context.run(options(tmp_path), ("trl",))
    found = rows.read(tmp_path / "context.json")
    assert measured == []
    # Once for each training.
    assert [(row["train"], row["status"], row["reason"]) for row in found] == [
        (train, "unavailable", "needs a GPU, and this is a cpu") for train in ("full", "lora")
    ]


def test_a_missing_package_is_named_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_methods.importlib.util, "find_spec", lambda name: None)
    for name, package in (("trl", "trl"), ("liger+ckpt", "liger_kernel"), ("deepspeed", "deepspeed")):
        row = context._not_started(replace(JOB, device="cuda", method=name))
        assert row == {"status": "unavailable", "reason": f"{package} is not installed"}


def test_another_loss_than_the_other_methods_have_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, Clock(), lambda job: {**fine(job), "first_loss": 6.0 if job.method == "plain" else 6.1})
    context.run(options(tmp_path, only=("llama8b-full-64",)), ("plain", "ckpt"))
    found = rows.read(tmp_path / "context.json")
    assert [row["status"] for row in found] == ["ok", "error"]
    assert "the first loss is 6.1, and 6.0 with plain" in found[1]["reason"]


def test_what_would_fill_the_host_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_host_available", lambda: 100 * rows.GIB)
    monkeypatch.setattr(context, "reason_unavailable", lambda method, device: None)
    job = replace(JOB, device="cuda", tiny=False, method="trl", tokens=8192)
    assert context._not_started(job) is None  # 60 GiB of 80
    row = context._not_started(replace(job, tokens=16384))
    assert row is not None
    assert row["status"] == "oom"
    assert "about 120 GiB would go to the host, which has 80 GiB to pin" in row["reason"]


def test_the_budget_ends_a_row_and_a_process_that_dies_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert context._measure(JOB, 0.01) is None
    monkeypatch.setattr(context.sys, "executable", "/bin/false")
    assert context._measure(JOB, None) == {"status": "error", "reason": "the process ended with exit code 1"}


def test_a_row_is_measured_by_the_command_line(tmp_path: Path) -> None:
    arguments = ["context", "--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", "llama8b-full-64"]
    command.main([*arguments, "--methods", "int8,int8+offload"])
    found = json.loads((tmp_path / "context.json").read_text())["rows"]
    assert [(row["method"], row["status"]) for row in found] == [("int8", "ok"), ("int8+offload", "unavailable")]
    assert 0.0 < found[0]["grad_error"] <= 0.02
    assert found[0]["optimizer"] in ("torch", *context_models.EIGHT_BIT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "llama8b-full-65"], "unknown workload"),
        (["--methods", "int9"], "unknown method"),
        (["--only", "llama8b-full-16384"], "needs a GPU"),
    ],
)
def test_wrong_arguments_name_what_is_known(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        command.main(["context", "--device", "cpu", "--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- report -----------------------------------------------------------------------------------------------------------

ORIGIN = {
    "commit": "c0ffee",
    "dirty": False,
    "sources": "s1",
    "device": "NVIDIA H100",
    "command": "python -m bench context",
}


def measured_row(method: str, tokens: int, rate: float | None, **more: Any) -> dict[str, Any]:
    found = (
        {"status": "ok", "tokens_per_s": rate, "peak_bytes": 50 * rows.GIB, "host_bytes": 0}
        if rate
        else {"status": "oom"}
    )
    return {
        "suite": "context", "shape": "llama8b", "train": "full", "workload": f"llama8b-full-{tokens}", "tokens": tokens,
        "method": method, "scale": "full", "memory_gib": 80.0, "memory_bytes": 79 * rows.GIB, "optimizer": "torchao",
        "time": "2026-01-01T00:00:00+00:00", "origin": ORIGIN, **found, **more,
    }  # fmt: skip


def test_the_table_has_a_column_for_each_length_and_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found = [
        measured_row("plain", 4096, 8000.0),
        measured_row("plain", 8192, None, reason="CUDA out of memory"),
        measured_row("int8+offload", 4096, 9000.0, host_bytes=12 * rows.GIB, grad_error=0.015),
        measured_row("int8+offload", 8192, 9500.0, peak_bytes=60 * rows.GIB),
        measured_row("trl", 4096, None, status="unavailable", reason="ModuleNotFoundError: No module named 'trl'"),
        {**measured_row("ckpt", 4096, 7000.0), "scale": "tiny"},
    ]
    text = context_report.context_table(found)
    assert "| Llama-3.1-8B, all weights, 8-bit AdamW | plain PyTorch | 8,000; 50.0 | no memory |" in text
    assert "|  | pyactcomp int8, offload | 9,000; 50.0 + 12 | 9,500; 60.0 |" in text
    assert "capped to 79 GiB" in text
    assert "8-bit AdamW: torchao" in text
    assert "pyactcomp int8, offload 1.50%" in text
    assert "trl: unavailable (ModuleNotFoundError: No module named 'trl')" in text
    assert "7,000" not in text
    context_report.draw(context_report.panels(found), tmp_path)
    assert (tmp_path / "long_contexts.png").stat().st_size > 10_000
    assert context_report.context_table([]) == ""
    assert set(context_report.COLOURS) <= set(METHODS)
    assert {*context.SHAPES, *context.TRAINS} == set(context_report.TITLES)


def test_every_method_names_what_goes_to_the_host() -> None:
    for name, method in context_methods.METHODS.items():
        assert ("offload" in name or name in ("trl", "unsloth", "deepspeed")) is (method.leaves > 0), name
