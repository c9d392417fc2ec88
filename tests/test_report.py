"""The report's totals against byte counts made by hand."""

from __future__ import annotations

import dataclasses
import html
import json
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyactcomp
from pyactcomp import PyactcompError
from pyactcomp.engine import reasons
from pyactcomp.report import Line, Report

ROWS = 1024
MIB = 2**20


def packed(numel: int) -> int:
    """Return the bytes of ``numel`` 8-bit codes, here a multiple of 64, and of their groups' parameters."""
    assert numel % 64 == 0
    return numel + numel // 64 * 4


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128))


def step(model: nn.Module, rows: int = ROWS) -> None:
    model(torch.randn(rows, 256)).sum().backward()


def by_name(lines: tuple[Line, ...]) -> dict[str, tuple[int, int, int, int]]:
    return {line.name: (line.tensors, line.saved_bytes, line.unique_bytes, line.stored_bytes) for line in lines}


def test_totals_and_modules_of_a_perceptron() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False)
    step(model)
    report = pyactcomp.report(model)

    x, hidden, narrow = ROWS * 256 * 4, ROWS * 512 * 4, ROWS * 256 * 4
    weight_2, weight_4 = 512 * 256 * 4, 256 * 128 * 4
    # Linear saves its input and, where the input needs a gradient, its weight; GELU its input, ReLU its result, which
    # is also the last layer's input.
    assert by_name(report.modules) == {
        # The model's input does not require grad, and is kept as it is.
        "0": (1, x, x, x),
        "1": (1, hidden, hidden, packed(hidden // 4)),
        # GELU's result is computed again from its input.
        "2": (1, hidden, hidden, 0),
        "3": (1, narrow, narrow, packed(narrow // 4)),
        "4": (1, narrow, 0, 0),
    }
    assert report.saved_bytes == x + 2 * hidden + 2 * narrow
    assert report.unique_bytes == x + 2 * hidden + narrow
    assert report.stored_bytes == x + packed((hidden + narrow) // 4)
    assert by_name(report.kept) == {
        reasons.NO_GRAD: (1, x, x, x),
        reasons.RECOMPUTED: (1, hidden, hidden, 0),
        reasons.PARAMETER: (2, weight_2 + weight_4, 0, 0),
    }
    assert report.note == ""


def test_records_name_module_shape_and_dtype_in_the_order_of_the_forward() -> None:
    model = pyactcomp.compress(perceptron().bfloat16(), fuse=False)
    model(torch.randn(ROWS, 256).bfloat16()).sum().backward()
    tensors = [t for t in pyactcomp.report(model).tensors if t.kept != reasons.PARAMETER]
    assert [(t.module, t.shape, t.dtype, t.kept) for t in tensors] == [
        ("0", (ROWS, 256), "bfloat16", reasons.NO_GRAD),
        ("1", (ROWS, 512), "bfloat16", None),
        ("2", (ROWS, 512), "bfloat16", reasons.RECOMPUTED),
        ("3", (ROWS, 256), "bfloat16", None),
        ("4", (ROWS, 256), "bfloat16", None),
    ]
    assert [t.saved_bytes for t in tensors] == [ROWS * n * 2 for n in (256, 512, 512, 256, 256)]


def test_an_in_place_relu_shares_its_result_with_the_next_layer() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(inplace=True), nn.Linear(256, 256))
    pyactcomp.compress(model)
    step(model)
    size = ROWS * 256 * 4
    assert by_name(pyactcomp.report(model).modules) == {
        # The model's input, kept as it is.
        "0": (1, size, size, size),
        "1": (1, size, size, packed(size // 4)),
        "2": (1, size, 0, 0),
    }


def test_what_does_not_require_grad_is_kept_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512))
    pyactcomp.compress(model, fuse=False, min_bytes=0)
    step(model)
    report = pyactcomp.report(model)
    x, hidden, statistic = ROWS * 256 * 4, ROWS * 512 * 4, ROWS * 4
    # The model's input, and the mean and the reciprocal deviation of each row in the norm.
    size = x + 2 * statistic
    assert by_name(report.kept)[reasons.NO_GRAD] == (3, size, size, size)
    assert [t.module for t in report.tensors if t.kept == reasons.NO_GRAD] == ["0", "2", "2"]
    # The inputs of GELU and of the norm depend on parameters.
    assert report.unique_bytes == size + 2 * hidden
    assert report.stored_bytes == size + packed(hidden // 4)
    row = next(line for line in str(report).splitlines() if line.startswith(reasons.NO_GRAD))
    mib = f"{size / MIB:.2f}"
    assert row.removeprefix(reasons.NO_GRAD).split() == ["3", mib, mib, mib, "1.00", "0.00"]


def test_an_input_is_packed_only_if_it_requires_grad_and_is_no_leaf() -> None:
    x = ROWS * 256 * 4
    leaf = torch.randn(ROWS, 256, requires_grad=True)
    for given, kept, unique, stored in (
        (leaf.detach(), reasons.NO_GRAD, x, x),
        (leaf, reasons.LEAF, 0, 0),
        (leaf * 1, None, x, packed(x // 4)),
    ):
        model = pyactcomp.compress(nn.Linear(256, 8))
        model(given).sum().backward()
        (saved,) = (t for t in pyactcomp.report(model).tensors if t.shape == (ROWS, 256))
        assert (saved.kept, saved.saved_bytes, saved.unique_bytes, saved.stored_bytes) == (kept, x, unique, stored)


class Masked(nn.Module):
    """Saves a boolean, integers, a tensor that is small, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 256)
        self.scale = nn.Parameter(torch.ones(1, 256))
        self.register_buffer("shift", torch.ones(ROWS, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        x = x.masked_fill(x > 0, 0.0)
        x = x * self.shift
        small = x[:4] * x[:4]
        return (x * x).sum() + small.sum()


def test_reasons_and_bytes_of_what_was_not_compressed() -> None:
    model = pyactcomp.compress(Masked())
    tokens = torch.randint(0, 100, (ROWS,))
    model(tokens).backward()
    report = pyactcomp.report(model)
    size = ROWS * 256 * 4
    kept = by_name(report.kept)
    # The embedding saves its 64-bit indices, which are never changed.
    assert kept["dtype torch.int64"] == (1, ROWS * 8, ROWS * 8, ROWS * 8)
    # The buffer is alive anyway: it is listed, and counts nothing.
    assert kept[reasons.PARAMETER] == (1, size, 0, 0)
    # x[:4] twice: 4 KiB each, of a storage that is alive whole for as long as it is kept.
    assert kept[reasons.SMALL][:2] == (2, 2 * 4 * 256 * 4)
    assert set(kept) == {"dtype torch.int64", reasons.PARAMETER, reasons.SMALL}
    boolean = [t for t in report.tensors if t.dtype == "bool"]
    assert [(t.saved_bytes, t.unique_bytes, t.stored_bytes, t.kept) for t in boolean] == [
        (size // 4, size // 4, size // 4 // 8, None)
    ]


def test_small_tensors_are_kept_raw_and_counted_whole() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False, min_bytes=2 * MIB)
    step(model)
    report = pyactcomp.report(model)
    x, hidden, narrow = ROWS * 256 * 4, ROWS * 512 * 4, ROWS * 256 * 4
    # Exactly min_bytes is compressed, less is not; the last layer's input is the ReLU's result.
    assert by_name(report.kept)[reasons.SMALL] == (3, x + 2 * narrow, x + narrow, x + narrow)
    assert report.stored_bytes == x + narrow + packed(hidden // 4)
    assert report.unique_bytes == x + 2 * hidden + narrow


def test_skipped_modules_are_kept_and_say_so() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False, skip=["1", nn.ReLU])
    step(model)
    report = pyactcomp.report(model)
    hidden, narrow = ROWS * 512 * 4, ROWS * 256 * 4
    assert by_name(report.kept)[reasons.SKIPPED] == (2, hidden + narrow, hidden + narrow, hidden + narrow)
    assert [t.module for t in report.tensors if t.kept == reasons.SKIPPED] == ["1", "3"]


@pytest.mark.parametrize(
    "options", [{}, {"skip": [nn.Linear, nn.LayerNorm]}, {"min_bytes": 2**40}], ids=["small", "skipped", "all-small"]
)
def test_parameters_and_buffers_are_left_out_whatever_else_keeps_them(options: dict[str, Any]) -> None:
    # They are alive whether saved or not: no total may count them, however small they are and wherever they are saved.
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 8))
    pyactcomp.compress(model, fuse=False, **options)
    step(model)
    report = pyactcomp.report(model)
    owned = [t for t in report.tensors if t.shape in {(256,), (256, 256), (256, 8), (8, 256)}]
    # The norm's weight and bias, and the weights of the two layers behind it.
    assert len(owned) == 4
    assert [(t.kept, t.unique_bytes, t.stored_bytes) for t in owned] == [(reasons.PARAMETER, 0, 0)] * 4
    # Three layer inputs and the norm's, its mean and its reciprocal deviation.
    assert report.unique_bytes == 4 * ROWS * 256 * 4 + 2 * ROWS * 4


@pytest.mark.parametrize("group_size", [64, 128, 256])
def test_stored_bytes_follow_the_group_size(group_size: int) -> None:
    model = pyactcomp.compress(perceptron(), fuse=False, group_size=group_size)
    # It requires grad and is no leaf: packed, like all that follows.
    x = torch.randn(ROWS, 256, requires_grad=True) * 1
    model(x).sum().backward()
    report = pyactcomp.report(model)
    # The input, GELU's input and ReLU's result; GELU's own is computed again.
    numel = ROWS * (256 + 512 + 256)
    assert report.unique_bytes == 4 * (numel + ROWS * 512)
    assert report.stored_bytes == numel + 4 * numel // group_size


def test_lines_add_up_to_the_totals() -> None:
    model = pyactcomp.compress(nn.Sequential(perceptron(), nn.Linear(128, 8), nn.LayerNorm(8)), min_bytes=2**16)
    step(model)
    report = pyactcomp.report(model)
    for name in ("saved_bytes", "unique_bytes", "stored_bytes"):
        assert sum(getattr(line, name) for line in report.modules) == getattr(report, name) > 0
    counted = [t for t in report.tensors if t.kept not in reasons.ALIVE_ANYWAY]
    assert sum(line.tensors for line in report.modules) == len(counted)
    assert sum(line.tensors for line in report.kept) == sum(t.kept is not None for t in report.tensors)


# Before, and in which mode.


def test_before_the_first_step_the_report_says_so() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False)
    report = pyactcomp.report(model)
    assert report == Report((), report.note)
    assert str(report) == report.note == "nothing was recorded yet: run a training step first"
    assert (report.saved_bytes, report.unique_bytes, report.stored_bytes) == (0, 0, 0)
    assert report.modules == report.kept == ()


def test_in_evaluation_mode_the_note_says_what_to_do() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False).eval()
    step(model)
    note = pyactcomp.report(model).note
    assert note.startswith("nothing was recorded yet")
    assert "model.train()" in note
    model.train()
    step(model)
    assert pyactcomp.report(model).note == ""


def test_a_forward_without_gradients_is_not_recorded() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False)
    with torch.no_grad():
        model(torch.randn(ROWS, 256))
    assert "nothing was recorded yet" in pyactcomp.report(model).note
    step(model)
    assert pyactcomp.report(model).saved_bytes > 0


def test_the_first_step_is_what_is_reported() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False)
    step(model)
    first = pyactcomp.report(model)
    step(model, rows=2 * ROWS)
    assert pyactcomp.report(model) == first


def test_recording_leaves_no_hooks_on_the_modules() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False)
    before = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    step(model)
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()] == before
    assert before[1:] == [(0, 0)] * 5


def test_a_context_reports_what_was_saved_inside_it() -> None:
    model = perceptron()
    with pyactcomp.compressed(model) as context:
        loss = model(torch.randn(ROWS, 256)).sum()
    loss.backward()
    plain = pyactcomp.compress(perceptron(), fuse=False)
    step(plain)
    assert by_name(pyactcomp.report(context).modules) == by_name(pyactcomp.report(plain).modules)


def test_the_peak_is_the_worst_moment_of_backward() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 128)))
    step(model)
    x, hidden = ROWS * 256 * 4, ROWS * 512 * 4
    first, last = (256 * 512 + 512) * 4, (512 * 128 + 128) * 4
    # Tanh's result is stored once, in 16 bits, and restored for itself and for the last layer. In either all is still
    # stored, that result restored, a gradient as large in flight, and the last layer's parameters have gradients.
    worst = x + hidden // 2 + hidden + hidden + last
    report = pyactcomp.report(model)
    assert report.gradient_bytes == {"": 0, "0": first, "1": 0, "2": last}
    assert [line.restored_bytes for line in report.modules] == [0, hidden, hidden]
    assert report.peak_bytes == worst + 2 * hidden  # two tensors that modules share may be restored beside
    assert Report(()).peak_bytes == 0


# How it reads.


def test_the_table_contains_the_totals_every_module_and_every_reason() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False)
    step(model)
    report = pyactcomp.report(model)
    rows = [line.split() for line in str(report).splitlines()]
    ratio = report.stored_bytes / report.unique_bytes
    sizes = [f"{n / MIB:.2f}" for n in (report.saved_bytes, report.unique_bytes, report.stored_bytes)]
    # GELU's input and result, ReLU's result, which is also the last layer's input.
    restored = ROWS * (512 + 512 + 256 + 256) * 4
    assert ["total", "5", *sizes, f"{ratio:.2f}", f"{restored / MIB:.2f}"] in rows
    assert sizes[:2] == ["7.00", "6.00"]
    for line in report.modules:
        assert any(row[:2] == [line.name, str(line.tensors)] for row in rows if row)
    assert reasons.PARAMETER in str(report)
    assert "module" in rows[0]


def test_a_notebook_gets_the_same_cells_escaped() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<b>&", nn.Linear(256, 256))
            self.after = nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.after(getattr(self, "<b>&")(x))

    model = pyactcomp.compress(Odd(), fuse=False)
    step(model)
    report = pyactcomp.report(model)
    page = report._repr_html_()
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    shown = [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]
    assert ["<b>&", "1", "1.00", "1.00", "1.00", "1.00", "0.00"] in shown
    assert "<b>&" not in page
    for cells in shown:
        assert any(line.split() == " ".join(cells).split() for line in str(report).splitlines())
    assert "A step holds at most about" in page


def test_the_picture_has_a_bar_for_each_module_and_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = pyactcomp.compress(perceptron(), fuse=False)
    with pytest.raises(PyactcompError, match="nothing to draw: run a training step"):
        pyactcomp.report(model).plot()
    step(model)
    [axes] = pyactcomp.report(model).plot(tmp_path / "bars.png").axes
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    names = [label.get_text() for label in axes.get_yticklabels()]
    drawn = {
        (names[round(bar.get_y() + bar.get_height() / 2)], bars.get_label()): round(bar.get_width() * MIB)
        for bars in axes.containers
        for bar in bars
        if bar.get_width()
    }
    x, hidden, narrow = ROWS * 256 * 4, ROWS * 512 * 4, ROWS * 256 * 4
    assert axes.get_xlabel() == "MiB"
    assert drawn == {
        ("0", "kept"): x,
        ("1", "coded"): packed(hidden // 4),
        ("2", "recomputed, not held"): hidden,
        ("3", "coded"): packed(narrow // 4),
    }
    [plain] = axes.collections
    by_module = dict(zip(names, plain.get_offsets()[:, 0] * MIB, strict=True))
    assert by_module == {"0": x, "1": hidden, "2": hidden, "3": narrow, "4": 0}


def test_compress_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyactcomp")
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))
    pyactcomp.compress(model)
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert "compressed Sequential: mode=int8, 2 modules fused, 0 left as they are" in record.getMessage()


def test_a_long_table_gathers_the_smallest_modules_in_one_row() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(23)))
    pyactcomp.compress(model)
    step(model)
    report = pyactcomp.report(model)
    text = str(report)
    size = ROWS * 256 * 4
    assert len(report.modules) == 23
    rest = next(line.split() for line in text.splitlines() if line.startswith("(3 more modules)"))
    sizes = [f"{n / MIB:.2f}" for n in (3 * size, 3 * size, 3 * packed(size // 4))]
    assert rest[3:] == ["3", *sizes, "0.27", sizes[0]]


def test_a_report_is_plain_data() -> None:
    model = pyactcomp.compress(perceptron(), fuse=False)
    step(model)
    report = pyactcomp.report(model)
    restored = pickle.loads(pickle.dumps(report))
    assert restored == report
    assert str(restored) == str(report)
    assert restored.stored_bytes == report.stored_bytes
    assert report != Report(report.tensors[1:])
    records = json.loads(json.dumps([dataclasses.asdict(t) for t in report.tensors]))
    assert sum(r["stored_bytes"] for r in records) == report.stored_bytes
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.note = ""  # type: ignore[misc]


def test_report_of_a_model_that_is_not_compressed_raises() -> None:
    with pytest.raises(PyactcompError, match=r"Sequential is not compressed; call pyactcomp\.compress"):
        pyactcomp.report(perceptron())
    model = pyactcomp.compress(perceptron(), fuse=False)
    with pytest.raises(PyactcompError, match="is not compressed"):
        pyactcomp.report(model[0])
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module.*got int"):
        pyactcomp.report(3)  # type: ignore[arg-type]


def test_fused_modules_and_those_left_alone_are_named() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.LayerNorm(256))
    model[3].forward = lambda x: F.layer_norm(x, (256,))
    pyactcomp.compress(model)
    step(model)
    report = pyactcomp.report(model)
    assert report.fused == (("1", "LayerNorm"), ("2", "GELU"))
    assert [(name, kind) for name, kind, _ in report.left_alone] == [("3", "LayerNorm")]
    assert "Fused: LayerNorm (1), GELU (1)." in str(report)
    assert "Not fused: 3, LayerNorm: its forward was replaced" in str(report)
    # What the fused norm keeps stands for its input: a byte and a sixteenth an element.
    norm = next(line for line in report.modules if line.name == "1")
    assert (norm.unique_bytes, norm.stored_bytes) == (ROWS * 257 * 4, packed(ROWS * 256) + ROWS * 4)


def test_a_forward_that_fails_is_not_reported() -> None:
    model = pyactcomp.compress(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 128)))
    tail, model[2] = model[2], nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes"):
        step(model)
    model[2] = tail
    assert "nothing was recorded yet" in pyactcomp.report(model).note
    step(model)
    assert [t.module for t in pyactcomp.report(model).tensors if t.kept != reasons.PARAMETER] == ["0", "1", "2"]


# A profile with stacks is read in a process of its own: what a torch without this package imports is imported there.
PROFILED = """
import sys
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
import pyactcomp
model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256))
pyactcomp.compress(model, min_bytes=256)
x, modules = torch.randn(256, 256), set()
with profile(activities=[ProfilerActivity.CPU], with_stack=True) as prof:
    modules |= set(sys.modules)
    model(x).square().sum().backward()
    imported = set(sys.modules) - modules
names = {event.name for event in prof.events()}
print(imported, {"pyactcomp::pack", "pyactcomp::unpack"} <= names)
"""


def test_a_profiled_first_step_imports_nothing_whose_name_the_profiler_would_misread() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, check=True)
    assert "set() True" in done.stdout


def test_reason_tells_few_elements_and_narrow_dtypes_from_what_the_reader_needs() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with pyactcomp.compressed(min_bytes=1) as c:
        torch.nn.functional.gelu(x * 1)
        (y * 1).tan()
    few, narrow = [tensor.kept for tensor in pyactcomp.report(c).tensors if tensor.kept not in reasons.ALIVE_ANYWAY]
    assert few == reasons.FEW
    assert narrow is not None
    assert narrow.startswith("16 bits already: aten::tan(result): ")
