"""The demo: what it trains on, what it measures, and what it shows."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import byte_transformer
import gpu_figures
import library_text
import pytest
import step_memory
import torch
import training as demo
from rich.console import Console

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def command() -> ModuleType:
    """Return the program, ``examples/demo/__main__.py``."""
    spec = importlib.util.spec_from_file_location("demo_command", Path(demo.__file__).with_name("__main__.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result() -> demo.Result:
    """Return a run with activations twice the smallest size that is compressed."""
    return demo.run(demo.Config(CPU, width=64, depth=2, heads=2, sequence=128, batch=8, steps=40, learning_rate=2e-3))


def test_demo_int8_loss_is_within_two_hundredths_of_plain(result: demo.Result) -> None:
    rows = {row.method: row for row in result.rows}
    plain = rows["plain"]
    for method in ("int8", "int8 + checkpoint"):
        assert abs(rows[method].val_loss - plain.val_loss) <= 0.02
    # It has learnt something: the guess of a uniform distribution costs log(256) = 5.55 nats a byte.
    assert plain.val_loss < 4.0


@pytest.mark.parametrize("method", ["checkpoint", "lossless"])
def test_demo_exact_methods_compute_the_same_as_plain(result: demo.Result, method: str) -> None:
    assert result.training[method] == result.training["plain"]


def test_demo_first_forward_is_the_same_for_all_methods(result: demo.Result) -> None:
    first = {losses[0] for losses in result.training.values()}
    assert len(first) == 1


def test_demo_int8_saves_a_third_and_less(result: demo.Result) -> None:
    rows = {row.method: row for row in result.rows}
    plain, int8, checkpoint = rows["plain"], rows["int8"], rows["checkpoint"]
    # Packed float32 takes 8.5 of 32 bits; what stays as it is, small tensors and integers, is under a twentieth.
    assert int8.saved_bytes <= (8.5 / 32 + 1 / 20) * plain.saved_bytes
    assert int8.saved_bytes >= 8.5 / 32 * checkpoint.saved_bytes
    assert checkpoint.saved_bytes < plain.saved_bytes
    assert int8.saved_bytes < rows["lossless"].saved_bytes < plain.saved_bytes
    assert rows["int8 + checkpoint"].saved_bytes < checkpoint.saved_bytes
    for row in result.rows:
        assert row.peak_bytes >= row.saved_bytes


def test_demo_repeats_with_the_same_seed_and_not_with_another() -> None:
    def losses(seed: int) -> dict[str, list[float]]:
        config = demo.Config(CPU, 32, 1, 2, 16, 4, demo.MINIMUM_STEPS, 1e-3, seed)
        return dict(demo.run(config).training)

    first = losses(1)
    assert losses(1) == first
    assert losses(2) != first


def test_program_writes_rows_and_picture(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = demo.default_config

    def small(*arguments: torch.device, **options: int | None) -> demo.Config:
        return replace(full(*arguments, **options), width=32, depth=1, heads=2, sequence=64, batch=8)

    monkeypatch.setattr(demo, "default_config", small)
    monkeypatch.setattr(command, "console", Console(markup=False, highlight=False))
    command.demo(tmp_path / "rows.json", tmp_path / "out", 8, 0, command.DeviceChoice.cpu)
    written = json.loads((tmp_path / "rows.json").read_text())
    assert list(written) == ["rows"]
    assert tuple(row["method"] for row in written["rows"]) == demo.METHODS
    for row in written["rows"]:
        assert list(row) == ["method", "saved_bytes", "peak_bytes", "step_ms", "val_loss"]
    picture = tmp_path / "out" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    output, errors = capsys.readouterr()
    assert errors == ""
    assert f"picture: {picture}" in output
    # Off a terminal, where no bar moves, a line tells each tenth of the way.
    assert "step 1/8: plain" in output
    assert "step 8/8: plain" in output


def test_demo_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    demo.run(demo.Config(CPU, 32, 1, 2, 16, 4, demo.MINIMUM_STEPS, 1e-3))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_summary_without_a_gpu_says_which_figures_are_of_one(result: demo.Result) -> None:
    figures = gpu_figures.load()
    assert set(figures) == set(demo.METHODS)
    text = demo.summary(result, figures)
    assert "On this CPU" in text
    assert f"{figures['int8'].step:.2f}x for GPT-2 medium on an {figures['int8'].device}" in text
    assert "not of this run" in text
    assert "GPU" not in demo.summary(result, {})


@pytest.mark.parametrize("width", [60, 80, 200])
def test_table_fits_the_terminal_and_cuts_nothing(command: ModuleType, result: demo.Result, width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(command._table(result.rows))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    plain = result.rows[0]
    for row in result.rows:
        assert row.method in text
        assert f"{row.saved_bytes / plain.saved_bytes:.2f}x" in text
        assert f"{row.step_ms / plain.step_ms:.2f}x" in text
        assert f"{row.val_loss - plain.val_loss:+.4f}" in text


def test_committed_figures_are_ratios_within_a_run(tmp_path: Path) -> None:
    def row(run: str, method: str, step: float, device: str = "H200") -> dict[str, object]:
        sizes = {"act_bytes": 10 * step, "peak_minus_base_bytes": 20 * step, "median_ms": step}
        about = {"workload": "gpt2_medium_amp", "scale": "full", "status": "ok"}
        return {"run": run, "method": method, **sizes, **about, "origin": {"device": device}}

    rows = [
        row("a", "vanilla", 4.0), row("a", "int8", 2.0), row("b", "int8", 1.0), row("c", "vanilla", 2.0),
        row("c", "ckpt", 3.0), row("d", "vanilla", 1.0, "cpu"), row("d", "lossless", 1.0, "cpu"),
    ]  # fmt: skip
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps({"rows": rows}))
    found = gpu_figures.load(path)
    # Run b has no vanilla row, run d no GPU.
    assert {method: one.step for method, one in found.items()} == {"plain": 1.0, "int8": 0.5, "checkpoint": 1.5}
    assert found["int8"].saved == found["int8"].peak == 0.5


def test_memory_counts_what_the_graph_holds() -> None:
    """The profiler's count equals the storages that autograd asks to save and that the forward made."""
    torch.manual_seed(0)
    model = byte_transformer.ByteTransformer(32, 2, 2, 64)
    text = torch.randint(256, (4, 65))
    storages: dict[int, int] = {}
    before = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    before.add(text.untyped_storage().data_ptr())
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(text[:, :-1], text[:, 1:])
    expected = sum(storages.values()) + loss.untyped_storage().nbytes()
    measured = step_memory.measure(CPU, lambda: model(text[:, :-1], text[:, 1:]), lambda loss: loss.backward())
    assert measured.saved_bytes == expected


def test_memory_peak_is_that_of_a_chain_worked_out_by_hand() -> None:
    n = 1 << 20
    x = torch.zeros(n, requires_grad=True)

    def forward() -> torch.Tensor:
        return x.exp().exp().sum()

    measured = step_memory.measure(CPU, forward, lambda loss: loss.backward())
    assert measured.saved_bytes == 2 * 4 * n + 4
    # Both outputs, and the gradients before and after one exp; the sum's gradient is one element expanded.
    assert 3 * 4 * n <= measured.peak_bytes <= 4 * 4 * n + 1024


def test_text_sides_share_no_module_and_are_not_empty(tmp_path: Path) -> None:
    training, held_out = library_text.load()
    assert training.numel() > held_out.numel() > 0

    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "statistics.py").write_bytes(b"train")
    (tmp_path / "statistics.py").write_bytes(b"held out")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_bytes(b"neither")
    training, held_out = library_text.load(tmp_path)
    assert bytes(training.tolist()) == b"train"
    assert bytes(held_out.tolist()) == b"held out"


def test_text_that_is_missing_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=tmp_path.name):
        library_text.load(tmp_path)


def test_windows_are_pieces_of_the_text_shifted_by_one() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    inputs, targets = library_text.windows(text, 5, 7, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (5, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)


@pytest.mark.gpu
def test_demo_on_the_gpu_compresses_and_learns() -> None:
    # 64 x 256 tokens of width 256 under autocast: every activation is far above the smallest compressed size.
    config = demo.Config(torch.device("cuda"), 256, 2, 4, 256, 64, 40, 1e-3)
    rows = {row.method: row for row in demo.run(config).rows}
    plain, int8, checkpoint = rows["plain"], rows["int8"], rows["checkpoint"]
    assert int8.saved_bytes < plain.saved_bytes
    assert checkpoint.saved_bytes < plain.saved_bytes
    assert abs(int8.val_loss - plain.val_loss) <= 0.02


@pytest.mark.gpu
@pytest.mark.alone
def test_demo_fills_the_share_of_the_gpu_it_is_meant_to() -> None:
    config = demo.default_config(torch.device("cuda"), steps=demo.MINIMUM_STEPS)
    free, _ = torch.cuda.mem_get_info()
    result = demo.run(config)
    # The batch is a whole number of sequences and the optimizer's state was not there when it was chosen.
    assert 0.4 * free <= result.rows[0].peak_bytes <= 0.6 * free
