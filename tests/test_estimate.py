"""Estimates without a GPU: bytes that follow from shapes, the device that is not there, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from estimate_children import forked  # noqa: F401
from torch import Tensor, nn

import pyactcomp
from bench.rows import read
from pyactcomp.errors import PyactcompError
from pyactcomp.estimate import Estimate
from pyactcomp.estimate.gpus import GPUS, gpu_named
from pyactcomp.estimate.kernel_memory import RULES, reduction
from pyactcomp.estimate.largest import largest_batch, longest_seq
from pyactcomp.estimate.operators import _key
from pyactcomp.estimate.optimizers import AdamW8bit
from pyactcomp.estimate.programs import _length
from pyactcomp.estimate.result import ModeEstimate
from pyactcomp.layout import repeating
from pyactcomp.torch_private.phantom import SHAPES_FOR_CUDA_ALONE, SHAPES_OF_KERNELS
from pyactcomp.torch_private.recurrent import reserve

MODELS = Path(__file__).with_name("estimate_models.py")
ROOT = Path(__file__).parents[1]
BATCH, WIDTH, HIDDEN, SEQ = 64, 256, 1024, 64
MIB = 1 << 20
LINE, RAISES, WIDE, UNBUILT, UNSHAPED = (
    1 + next(i for i, text in enumerate(MODELS.read_text().splitlines()) if words in text)
    for words in (
        "the error names",
        "where it raises",
        "of the wrong width",
        "with a line break",
        "no shapes are known",
    )
)
TOLERANCE = 0.02  # the bar of an estimate against a measurement


def _rounded(elements: int, itemsize: int) -> int:
    return -(-elements * itemsize // 512) * 512


PARAMETERS = sum(_rounded(n, 4) for n in (WIDTH * HIDDEN, HIDDEN, HIDDEN * WIDTH, WIDTH))


@pytest.fixture(scope="module")
def perceptron() -> Estimate:
    return pyactcomp.estimate(f"{MODELS}:perceptron", batch=BATCH, seq=SEQ, modes=["plain", "int8"], gpu="4090")


def test_parts_of_a_step_are_those_of_its_shapes(perceptron: Estimate) -> None:
    plain = perceptron["plain"]
    assert plain.weights == plain.gradients == PARAMETERS
    # AdamW: two moments; its step counters are on the host.
    assert plain.optimizer == 2 * PARAMETERS
    rows = BATCH * SEQ
    assert plain.inputs == 4 * rows * WIDTH
    # Saved: the GELU's input and output, and the loss's input; and one block of 512 bytes for the loss.
    assert plain.activations == 4 * rows * (2 * HIDDEN + WIDTH) + 512
    # cuBLAS's default below Hopper, in the threads of forward and backward; cuBLASLt's in forward, which adds a bias.
    assert plain.workspaces == 2 * (4096 * 1024 * 2 + 16 * 1024 * 8) + MIB


def test_int8_saves_codes_of_what_plain_saves(perceptron: Estimate) -> None:
    # 8 bits an element and 4 bytes for each group of 64, of the GELU's input, which recomputes its output; the input of
    # the square, which no layer reads, stays.
    rows = BATCH * SEQ
    assert perceptron["int8"].activations == pytest.approx(rows * HIDDEN * 68 / 64 + 4 * rows * WIDTH, rel=TOLERANCE)


def test_an_estimate_compresses_where_its_program_is_told_not_to(
    perceptron: Estimate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    found = pyactcomp.estimate(f"{MODELS}:perceptron", batch=BATCH, seq=SEQ, modes=["int8"], gpu="4090")
    assert found["int8"].activations == perceptron["int8"].activations


def test_reserved_memory_is_whole_segments_above_the_peak(perceptron: Estimate) -> None:
    for each in perceptron.modes:
        assert set(each.peak_reserved) == {"native", "expandable", "pyactcomp"}
        for reserved in each.peak_reserved.values():
            assert reserved % (2 * MIB) == 0
            assert reserved >= each.peak_allocated >= each.first_step
        assert all(each.fits.values())
        assert each.peak_allocated == max(allocated for allocated, _ in each.curve)


def test_what_is_alive_at_the_peak_adds_up(perceptron: Estimate) -> None:
    for each in perceptron.modes:
        assert sum(size for _, size in each.at_peak) == each.peak_allocated
    names = dict(perceptron["plain"].at_peak)
    # Of the model's modules, numbers of blocks that repeat are left out, the first number is not.
    assert names["0"] == names["1"] == 4 * BATCH * SEQ * HIDDEN


def test_tensors_are_cudas_and_no_mode_is_active() -> None:
    found = pyactcomp.estimate(f"{MODELS}:asking", batch=4, modes=["plain"], gpu="4090")
    assert "read 3 values" in found["plain"].notes[0]


def test_numbers_stand_for_tensors_in_operators_that_run_in_python() -> None:
    found = [
        pyactcomp.estimate(f"{MODELS}:{each}", batch=64, modes=["plain"], gpu="4090")["plain"]
        for each in ("remainder", "addition")
    ]
    assert found[0].peak_allocated == found[1].peak_allocated
    assert found[0].activations == found[1].activations > 64 * 64 * 4


def test_configuration_of_transformers_is_not_downloaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "pyactcomp", "estimate", str(tmp_path), "--batch", "4", "--seq", "256", "--json"]
    command += ["--mode", "plain,checkpoint,int8", "--dtype", "bfloat16", "--gpu", "24GiB", "--no-largest"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    modes = {each["mode"]: each for each in json.loads(ran.stdout)["modes"]}
    attention = 256 * 256 * 2 + 256 * 128 * 2
    layer = attention + 3 * 256 * 512 + 2 * 256
    count = 4 * layer + 2 * 1024 * 256 + 256
    assert modes["plain"]["gradients"] == pytest.approx(2 * count, rel=1e-2)  # blocks of 512 bytes
    assert modes["checkpoint"]["activations"] < modes["int8"]["activations"] < modes["plain"]["activations"]
    # A checkpointed block saves its input: 2 bytes an element; above the blocks, what plain saves too.
    tokens = 4 * 256
    saved = modes["plain"]["activations"] - modes["checkpoint"]["activations"]
    # A block of Llama in bfloat16 saves at least the inputs of its seven products and of its gate.
    assert saved > 4 * 2 * tokens * (3 * 256 + 2 * 512)


def test_a_configuration_without_a_size_of_images_takes_those_of_imagenet(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    values = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
    (tmp_path / "config.json").write_text(json.dumps(values | {"layer_type": "basic"}))
    found = pyactcomp.estimate(str(tmp_path), batch=4, modes=["plain"], gpu="4090")["plain"]
    assert found.inputs == _rounded(4 * 3 * 224 * 224, 4) + _rounded(4, 8)


def test_a_configuration_of_text_and_images_classifies_images_by_its_part_for_images(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    part = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = {"model_type": "clip", "vision_config": {**part, "image_size": 32, "patch_size": 8, "num_channels": 4}}
    (tmp_path / "config.json").write_text(json.dumps(values | {"text_config": part | {"vocab_size": 64}}))
    found = pyactcomp.estimate(str(tmp_path), batch=4, modes=["plain"], gpu="4090")["plain"]
    assert found.inputs == _rounded(4 * 4 * 32 * 32, 4) + _rounded(4, 8)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("nothing", [], ["'nothing' is no model type", "Nothing is downloaded", "config.json"]),
        (f"{MODELS}:missing", [], ["has no function 'missing'"]),
        (f"{MODELS.with_name('no_such.py')}:build", [], ["there is no file"]),
        (
            f"{MODELS}:selecting",
            [],
            ["decides by values", "aten.index.Tensor", f"estimate_models.py:{LINE}", "real batch"],
        ),
        (
            f"{MODELS}:checking",
            [],
            [f"ValueError, in {MODELS}:{RAISES}", "labels must be below 32", "had read 1 value", "real batch"],
        ),
        pytest.param(
            f"{MODELS}:waiting",
            [],
            ["a loop seems to wait for a value", "estimate_models.py:", "real batch"],
            marks=pytest.mark.slow,  # a hundred thousand values
        ),
        (f"{MODELS}:raising", [], ["RuntimeError", f"{MODELS}:{WIDE}", "read no values", "--autocast"]),
        (f"{MODELS}:unbuilt", [], [f"KeyError, in {MODELS}:{UNBUILT}", "width", "or heads"]),
        (
            f"{MODELS}:packing",
            [],
            ["does not know the shapes", "_cslt_compress", f"{MODELS}:{UNSHAPED}", "register_fake"],
        ),
        (f"{MODELS}:without_loss", [], ["a tensor of shape (8, 8), not a loss", "(model, batch, loss)"]),
        (f"{MODELS}:fixed", [], ["takes the number of samples, as batch", "()"]),
        (f"{MODELS}:single", [], ["returns (model, batch)", "Linear"]),
        ("bert", ["--gpu", "big"], ["gpu is one of", "24GiB", "'big'"]),
        ("bert", ["--mode", "plain,int3"], ["mode is one of plain", "'int3'"]),
        ("bert", ["--optimizer", "adamw:slow"], ["optimizer is one of", "'adamw:slow'"]),
        ("bert", ["--batch", "0"], ["batch is a whole number", "got 0"]),
        ("bert", ["--dtype", "int8"], ["dtype is one of", "'int8'"]),
        ("bert", ["--autocast", "float32"], ["autocast is one of bfloat16, float16; got", "'float32'"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model: str, options: list[str], words: list[str]) -> None:
    for name in ("typer", "rich"):
        pytest.importorskip(name)
    from typer.testing import CliRunner

    from pyactcomp.cli.commands import app

    ran = CliRunner().invoke(app, ["estimate", model, "--mode", "plain", *options])
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert all(word in ran.stderr for word in words), ran.stderr


def test_functions_that_a_child_cannot_import_are_refused() -> None:
    for function in (lambda batch: None, Path("x").exists, dataclasses.replace(GPUS["t4"]).__eq__):
        with pytest.raises(PyactcompError, match="a function at the top of a module"):
            pyactcomp.estimate(function)


def test_gpus_are_found_by_name_and_by_size() -> None:
    assert gpu_named("H100") is GPUS["h100"]
    assert gpu_named("a100") is GPUS["a100-80"]
    assert gpu_named("24GiB").memory == 24 << 30
    assert gpu_named("24 GB").memory == 24 * 10**9
    for wrong in ("0GiB", "24", "-1GiB", "24XB"):
        with pytest.raises(PyactcompError, match="GiB"):
            gpu_named(wrong)


def _with_reserved(size: int, reserved: int, room: int) -> ModeEstimate:
    return ModeEstimate(
        "plain", size, None, 0, 0, 0, 0, 0, 0, 0, reserved, reserved, {"pyactcomp": reserved},
        {"pyactcomp": reserved <= room}, (), (),
    )  # fmt: skip


@pytest.mark.parametrize("fixed", [0, 5 << 30])
@pytest.mark.parametrize("each", [700 * MIB, 30 * MIB, 9 << 30, 40 << 30])
def test_largest_batch_is_the_last_that_fits(fixed: int, each: int) -> None:
    gpu = dataclasses.replace(GPUS["4090"], context=0)
    asked = []

    def run(size: int, seq: int | None) -> ModeEstimate:
        asked.append(size)
        return _with_reserved(size, -(-(fixed + size * each) // (2 * MIB)) * 2 * MIB, gpu.memory)

    found = largest_batch(run(8, None), run, gpu).largest_batch
    expected = (gpu.memory // (2 * MIB) * 2 * MIB - fixed) // each
    assert found == (expected or None)
    assert found is None or found in asked
    assert len(asked) <= 7  # the first, one for the line, and what the line misses by rounding


@pytest.mark.parametrize(
    ("positions", "seq", "expected"), [(512, None, 512), (4096, None, 1024), (None, 2048, 2048), (-1, None, 1024)]
)
def test_sequences_are_as_long_as_the_model_has_positions(
    positions: int | None, seq: int | None, expected: int
) -> None:
    """Models with relative positions, and recurrent ones, have no number of them; XLNet has -1."""
    assert _length(types.SimpleNamespace(max_position_embeddings=positions), seq) == expected
    with pytest.raises(PyactcompError, match="the model has 512 positions; got --seq 513"):
        _length(types.SimpleNamespace(max_position_embeddings=512), 513)


@pytest.mark.parametrize(("room", "limited"), [(64 << 30, True), (1 << 30, False)])
def test_longest_sequence_says_where_the_positions_end_it(room: int, limited: bool) -> None:
    gpu = dataclasses.replace(GPUS["4090"], memory=room, context=0)

    def run(size: int, seq: int | None) -> ModeEstimate:
        assert seq is not None
        if seq > 512:
            raise PyactcompError(f"the model has 512 positions; got --seq {seq}")
        return dataclasses.replace(_with_reserved(size, 3 * MIB * seq, room), seq=seq)

    found = longest_seq(run(8, 100), run, gpu)
    assert found.longest_seq == (512 if limited else room // (3 * MIB))
    assert [note for note in found.notes if "positions" in note] == (
        ["the model's positions limit the longest sequence, not the memory"] if limited else []
    )


def test_checkpointing_takes_blocks_of_stages_and_not_stages() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def stage() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.ModuleDict({"blocks": nn.Sequential(*(block() for _ in range(3)))}))

    stages = nn.Sequential(*(stage() for _ in range(2)))
    model = nn.ModuleDict({"stages": stages, "head": nn.Linear(8, 2)})
    assert list(repeating(model)) == [each for one in stages for each in one[1]["blocks"]]
    # Most of a block's parameters are not in the two parts that repeat: it stays whole.
    parts = [nn.ModuleDict({"wide": nn.Linear(64, 64), "two": nn.Sequential(block(), block())}) for _ in range(2)]
    assert list(repeating(nn.ModuleDict({"parts": nn.ModuleList(parts)}))) == parts


def test_checkpointing_takes_the_switch_of_a_model_of_timm() -> None:
    found = pyactcomp.estimate(f"{MODELS}:switched", batch=256, modes=["plain", "checkpoint"], gpu="4090")
    # The hidden layer and its activation's result are not kept.
    assert found["plain"].activations - found["checkpoint"].activations == 2 * 4 * 256 * HIDDEN


def test_8_bit_optimizer_has_the_state_of_bitsandbytes() -> None:
    large, small = torch.nn.Parameter(torch.zeros(64, 100)), torch.nn.Parameter(torch.zeros(100))
    optimizer = AdamW8bit([large, small])
    large.grad, small.grad = torch.zeros_like(large), torch.zeros_like(small)
    optimizer.step()
    assert [each.nbytes for each in optimizer.state[large].values()] == [6400, 6400, 4 * 25, 4 * 25]
    assert [each.nbytes for each in optimizer.state[small].values()] == [400, 400]


@pytest.mark.parametrize(
    ("shape", "over", "blocks"),
    [
        # As an H100 under torch 2.11 allocated them in the backward of linear layers: sums over 32768 rows.
        ((32768, 512), [0], [128 * MIB, 4 * 4]),
        ((32768, 2048), [0], [132 * MIB, 16 * 4]),
        # A block of 512 threads, of which each sums 256 elements.
        ((1 << 28,), [], [4 * (1 << 28) // (512 * 256), 4]),
        ((4096, 512), [1], []),  # a row for each warp: nothing is shared
        ((100, 512), [0], []),
        ((0, 512), [0], []),
        ((1, 512), [0], []),
    ],
)
def test_reductions_take_memory_for_the_parts_of_thread_blocks(
    shape: tuple[int, ...], over: list[int], blocks: list[int]
) -> None:
    x = torch.empty(shape, device="meta")
    assert reduction(GPUS["h100"], x, over, 4, 4) == blocks
    # The order of the dimensions in memory decides, not that of the shape.
    turned = [x.dim() - 1 - d for d in over]
    assert reduction(GPUS["h100"], x.T if x.dim() == 2 else x, turned, 4, 4) == blocks


def test_initial_values_that_are_drawn_until_they_fit_are_not_waited_for() -> None:
    found = pyactcomp.estimate(f"{MODELS}:truncated", batch=4, modes=["plain"], gpu="h100")["plain"]
    assert found.weights == _rounded(64, 4)
    assert not [note for note in found.notes if "read" in note]


def test_large_initial_values_on_the_host_are_not_drawn() -> None:
    """Otherwise a model of a function takes as much host memory as its weights, and each mode the time to draw them."""
    assert pyactcomp.estimate(f"{MODELS}:uninitialised", batch=4, modes=["plain"], gpu="4090")["plain"].weights


def test_a_model_that_asks_whether_something_is_wrong_is_told_no() -> None:
    """And still yes where it asks whether all is well."""
    found = pyactcomp.estimate(f"{MODELS}:validating", batch=4, modes=["plain"], gpu="4090")["plain"]
    assert found.weights == (8 * WIDTH + 8 + 120) * 4  # the bias fills a block of 512 bytes
    # In each of three steps two booleans by bool(), one by a copy, and the four labels by tolist().
    assert "read 21 values on the host" in found.notes[0]
    with pytest.raises(pyactcomp.PyactcompError, match="always"):
        pyactcomp.estimate(f"{MODELS}:doomed", batch=4, modes=["plain"], gpu="4090")


def test_operators_that_the_library_calls_have_shapes_without_cuda() -> None:
    """Otherwise an estimate ends where a model makes the library call one."""
    headers = [path.read_text() for room in ("engine", "functions") for path in (ROOT / "csrc" / room).glob("*.hpp")]
    called = {name for text in headers for name in re.findall(r"#include <ATen/ops/(\w+)\.h>", text)}
    tables = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    kernels = {name for key in tables for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    with_shapes = {name for name in called if any(each.split(".")[0] == f"aten::{name}" for each in kernels)}
    assert "silu" in with_shapes
    assert called - with_shapes <= SHAPES_FOR_CUDA_ALONE.keys()


def test_instance_norms_of_few_large_images_are_recomputed() -> None:
    found = pyactcomp.estimate(f"{MODELS}:normed", batch=2, modes=["plain", "int8"], gpu="h100")
    # The first input, a twentieth of plain's bytes, stays as it is; 64 elements of 256 bytes take 68 as codes.
    assert found["int8"].activations <= (1 / 20 + 68 / 256) * found["plain"].activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("columns", [16, 21])
def test_grouped_products_have_the_shapes_of_kernels(dtype: torch.dtype, first: int, second: int, columns: int) -> None:
    a = torch.zeros(*(4,)[: first - 2], 16, 32, dtype=dtype)
    b = torch.zeros(*(4,)[: second - 2], 32, 24, dtype=dtype)[..., :columns]
    ends = None if first == second == 3 else torch.full((4,), 4, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    expected = torch._grouped_mm(a, b, offs=ends)
    found = SHAPES_OF_KERNELS["_grouped_mm"](a, b, ends)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_grouped_products_of_columns_that_no_kernel_reads_are_refused() -> None:
    a, b = torch.zeros(16, 32), torch.zeros(4, 32, 21)
    for product in (torch._grouped_mm, SHAPES_OF_KERNELS["_grouped_mm"]):
        with pytest.raises(RuntimeError, match="16 bytes"):
            product(a, b, torch.full((4,), 16, dtype=torch.int32))


def test_experts_in_32_bits_are_estimated() -> None:
    found = pyactcomp.estimate(f"{MODELS}:groups", batch=512, modes=["plain"], gpu="h100")["plain"]
    assert found.gradients == 4 * 4 * WIDTH * HIDDEN
    # Saved: the products' input, which the batch is, and their result; and a block for the loss, and one for the ends.
    assert found.activations == 4 * 512 * HIDDEN + 2 * 512
    assert found.workspaces == 2 * GPUS["h100"].workspaces[0]


def test_slices_of_a_tensor_that_begin_elsewhere_share_a_plan() -> None:
    """Otherwise a model that loops over a sequence works out the shapes of each operator at each step."""
    x = torch.zeros(4, 64, 16)
    assert len({_key([x[:, step], x[:, step + 2]], [], {}) for step in range(60)}) == 1
    assert _key([x[:, 0], x[:, 1]], [], {}) != _key([x[:, 0], x[:, 2]], [], {})
    assert _key(x.flatten()[1:17], [], {}) != _key(x.flatten()[2:18], [], {})  # no kernel loads both 16 bytes at once
    assert _key([x, x], [], {}) != _key([x, x.clone()], [], {})


def test_a_model_of_more_than_any_gpu_has_its_bytes_too() -> None:
    found = pyactcomp.estimate(f"{MODELS}:wide", batch=4, modes=["plain"], gpu="h100")["plain"]
    weight = 4 * HIDDEN << 25
    assert found.weights == found.gradients == weight
    assert found.optimizer == 2 * weight
    # AdamW's step on one parameter takes two tensors as large as the weight: the square root, and what it divides by.
    assert found.peak_allocated >= 4 * weight
    assert all(size >= found.peak_allocated for size in found.peak_reserved.values())
    assert not any(found.fits.values())


# As cuDNN 9.19 kept them on an H200: the bytes of a step that a backward gave back.
@pytest.mark.parametrize(
    ("mode", "layers", "directions", "dropout", "itemsize", "measured"),
    [
        (2, 1, 1, False, 4, 21_103_104),
        (2, 3, 1, False, 4, 71_696_896),
        (2, 2, 2, False, 4, 92_799_488),
        (2, 2, 1, True, 4, 46_531_072),
        (2, 1, 1, False, 2, 10_551_808),
        (3, 2, 1, True, 4, 54_788_608),
        (3, 2, 2, False, 4, 109_314_560),
        (1, 3, 1, False, 4, 21_168_640),
    ],
)
def test_recurrent_layers_keep_what_cudnn_keeps(
    mode: int, layers: int, directions: int, dropout: bool, itemsize: int, measured: int
) -> None:
    found = reserve(mode, 64 * 32, 32, 512, layers, directions, itemsize, dropout)
    assert 0 <= measured - found <= 1024  # the ends of two blocks


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn", pytest.param("packed_lstm", marks=pytest.mark.slow)])
def test_recurrent_layers_run_as_cudnn_runs_them(name: str) -> None:
    found = pyactcomp.estimate(f"{MODELS}:{name}", batch=BATCH, modes=["plain"], gpu="h100")["plain"]
    mode, gates = {"rnn": (1, 1), "gru": (3, 3)}.get(name, (2, 4))
    hidden, rows = 2 * WIDTH, BATCH * SEQ
    assert found.weights == found.gradients == 4 * gates * hidden * (WIDTH + 3 * hidden + 2 * 2)
    kept = reserve(mode, rows, BATCH, hidden, 2, 1, 4, dropout=True)
    states = 2 * 4 * BATCH * hidden * (2 if mode == 2 else 1)  # two layers; before the first step, and after the last
    rest = found.activations - kept - 4 * rows * hidden - states
    if name == "packed_lstm":
        rest -= 4 * rows * WIDTH  # the steps in the order of the packing
    assert 0 <= rest <= states + 4 * 512


@pytest.mark.parametrize(("name", "gates", "kept"), [("lstm_cell", 4, 4), ("gru_cell", 3, 5)])
def test_cells_of_recurrent_layers_run(name: str, gates: int, kept: int) -> None:
    found = pyactcomp.estimate(f"{MODELS}:{name}", batch=BATCH, modes=["plain"], gpu="h100")["plain"]
    assert found.weights == found.gradients == 4 * gates * WIDTH * (2 * WIDTH + 2)
    # Each step keeps at least its workspace and its result.
    assert found.activations >= 8 * 4 * BATCH * WIDTH * (kept + 1)


def test_a_first_step_of_many_more_tensors_leaves_the_steady_one_exact() -> None:
    found, other = (
        pyactcomp.estimate(f"{MODELS}:{name}", batch=BATCH, modes=["plain"], optimizer="sgd")["plain"]
        for name in ("warming", "warm")
    )
    assert found.peak_allocated == other.peak_allocated
    assert sum(size for _, size in found.at_peak) == found.peak_allocated


def test_usual_modes_that_a_model_does_not_support_are_left_out() -> None:
    found = pyactcomp.estimate(f"{MODELS}:validating", batch=4)
    assert [each.mode for each in found.modes] == ["plain", "int8"]
    assert found.notes == (
        "int8+checkpoint is left out: mode 'checkpoint' needs blocks that repeat, in a ModuleList or Sequential, and "
        "there are none",
    )
    with pytest.raises(PyactcompError, match="needs blocks that repeat"):
        pyactcomp.estimate(f"{MODELS}:validating", batch=4, modes=["plain", "int8+checkpoint"])


def test_modes_share_the_imports_of_a_function_that_builds_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers_of_mine.py").write_text(
        "import os\nfrom torch import nn\n"
        "with open(os.path.join(os.path.dirname(__file__), 'imports'), 'a') as file:\n    file.write('again ')\n"
    )
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef build(batch):\n    from layers_of_mine import nn\n"
        "    return nn.Linear(8, 8), torch.ones(batch, 8), lambda out: out.sum()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    modes = ["plain", "lossless", "int8", "int8+offload"]
    pyactcomp.estimate("mine:build", batch=4, modes=modes)
    # The process of the first mode, and the one that it forked from: the others fork later.
    assert (tmp_path / "imports").read_text().split() == ["again"] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_an_estimate_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    told = tmp_path / "processes"
    program = f"import pyactcomp; pyactcomp.estimate({f'{MODELS}:sleeping'!r}, batch=4, modes=['plain'])"
    environment = os.environ | {"PYACTCOMP_TEST_PROCESSES": str(told)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as running:
        while not told.exists():
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(number)
    processes = [Path("/proc", each) for each in told.read_text().split()]
    deadline = time.monotonic() + 30  # of the minute that building the model takes
    while any(_runs(each) for each in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [each for each in processes if _runs(each)]


def _runs(process: Path) -> bool:
    """Return whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        return (process / "stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_attention_takes_no_kernel_where_torchs_cuda_build_takes_none() -> None:
    """No kernel reads a bias whose last dimension is not dense, as T5's, or a bias beside heads of 12 elements."""
    names = ("dense_bias", "turned_bias", "turned_bias_without_kernel", "odd_heads", "odd_heads_without_kernel")
    found = {
        name: pyactcomp.estimate(f"{MODELS}:{name}", batch=256, modes=["plain"], gpu="h100")["plain"] for name in names
    }
    probabilities = 256 * 4 * SEQ * SEQ * 2
    for name in ("turned_bias", "odd_heads"):
        assert found[name].peak_allocated == found[f"{name}_without_kernel"].peak_allocated
    assert found["turned_bias"].activations >= found["dense_bias"].activations + probabilities


def test_long_reductions_run_in_halves() -> None:
    x = torch.empty((1 << 21, 1024), dtype=torch.bfloat16, device="meta")  # 4 GiB: offsets take more than 31 bits
    half = torch.empty((1 << 20, 1024), dtype=torch.bfloat16, device="meta")
    parts = reduction(GPUS["h100"], half, [0], 4, 2)
    assert parts[0] % (4 * 1024) == 0
    assert reduction(GPUS["h100"], x, [0], 4, 2) == [*parts, 4 * 1024]
    assert reduction(GPUS["h100"], x, [0], 4, 4) == parts


def test_gradient_of_a_bias_needs_memory_beside_its_layers() -> None:
    found = pyactcomp.estimate(f"{MODELS}:perceptron", batch=512, seq=SEQ, modes=["plain"], gpu="h100")["plain"]
    rows, names = 512 * SEQ, dict(found.at_peak)
    # The peak is at the backward of the first layer: the GELU's input and gradient, and the parts of the bias's sum.
    grad = torch.empty((rows, HIDDEN), device="meta")
    parts = sum(reduction(GPUS["h100"], grad, [0], 4, 4))
    assert names["backward"] >= parts > 4 * rows * HIDDEN / 2


CONVOLUTIONS = read(ROOT / "bench" / "results" / "convolutions.json")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolutions_take_the_workspaces_that_were_measured(dtype: torch.dtype) -> None:
    """Within 20 MiB of up to 770: sums in parts for the gradient of a weight, and how far channels are padded."""
    compared = 0
    for row in CONVOLUTIONS:
        if row["dtype"] != str(dtype) or row["groups"] > 1 or row["cin"] == 1 or row["k"] == 1:
            continue
        dims, side, k, stride = (row[name] for name in ("dims", "side", "k", "stride"))
        last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(dims)
        layout = last if row["last"] else torch.contiguous_format

        def made(*shape: int, layout: Any = layout) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta").to(memory_format=layout)

        x, weight = made(row["n"], row["cin"], *[side] * dims), made(row["cout"], row["cin"], *[k] * dims)
        grad = made(row["n"], row["cout"], *[(side + k // 2 * 2 - k) // stride + 1] * dims)
        how = [stride] * dims, [k // 2] * dims, [1] * dims, False, [0] * dims, 1
        forward = RULES["aten::convolution"](GPUS["h200"], x, weight, None, *how)
        backward = RULES["aten::convolution_backward"](GPUS["h200"], grad, x, weight, [0], *how, [True, True, False])
        for name, blocks in (("forward", forward), ("input", backward), ("weight", backward)):
            assert abs(sum(blocks) - row[name]) <= 20 << 20, (name, row)
        compared += 1
    assert compared >= 20
