"""The options of offload: the share that "auto" chooses, checkpoints, reports, and what is refused."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_programs import (
    DATA,
    KIB,
    Delayed,
    Model,
    assert_equal,
    check_clean,
    compressed,
    delayed_fixture,
    gradients,
    one,
    only,
)
from torch import Tensor, nn

import pyactcomp
from pyactcomp.engine import offloading
from pyactcomp.errors import ImplementationUnavailableError

__all__ = ["delayed_fixture"]


LAYER_S = 1e-3
LAYERS = 8


def _slow_link(delayed: Delayed, fits: float) -> tuple[Any, nn.Module]:
    """Return a link that moves this part of what a forward stores while the device computes the forward, and the model.

    The window is one layer. Each takes LAYER_S of the device's time, evenly spread over its modules, and in backward
    twice as long.
    """
    compressed(plain := Model(layers=LAYERS, dropout=0.0))
    one(plain)
    nbytes = pyactcomp.report(plain).stored_bytes
    link = delayed.use("late", window=nbytes // LAYERS)
    link.rate = fits * nbytes / (LAYERS * LAYER_S)
    model = Model(layers=LAYERS, dropout=0.0)

    def work(*arguments: Any) -> None:
        link.clock += LAYER_S / len(parts)
        arguments[-1].register_hook(work_back)

    def work_back(_: Tensor) -> None:
        link.clock += 2 * LAYER_S / len(parts)

    for block in model.blocks:
        parts = [module for module in block.modules() if not list(module.children())]
        for part in parts:
            part.register_forward_hook(work)
    return link, model


def _forward_s(link: Any, model: nn.Module, steps: int) -> list[float]:
    """Return how long the device took for the forward of each step."""
    found = []
    for _ in range(steps):
        before = link.clock
        loss = model(DATA).square().mean()
        found.append(link.clock - before)
        loss.backward()
    return found


@pytest.mark.parametrize("fits", [0.3, 0.55, 2.0])
def test_auto_lets_go_what_the_link_has_time_for(delayed: Delayed, fits: float) -> None:
    """At 8k tokens of an 8B model a link of 25 GB/s moves 0.55 of the bytes while the forward runs."""
    link, model = _slow_link(delayed, fits)
    compressed(model, offload="auto")
    seconds = _forward_s(link, model, 12)
    # The second forward still lets everything go: it takes as long as the copies do, but for the window.
    assert (seconds[1] > 1.1 * LAYERS * LAYER_S) == (fits < 1)
    assert max(seconds[2:]) <= 1.03 * LAYERS * LAYER_S
    [tape] = [each for one in offloading.all_alive() for each in one._tapes.values()]
    # No less than the link has time for, but for the margin and the window, whose bytes need not cross.
    assert min(1.0, fits) * 0.97 - 1 / LAYERS <= tape.share <= min(1.0, fits) + 1 / LAYERS
    check_clean()


def test_the_share_and_the_memory_stay_from_the_third_step_on(delayed: Delayed) -> None:
    _, model = _slow_link(delayed, 0.55)
    compressed(model, offload="auto")
    held = []
    for _ in range(10):
        loss = model(DATA).square().mean()
        found = only()
        held.append((found["device_bytes"], found["host_bytes"]))
        loss.backward()
    assert len(set(held[2:])) == 1, held


class Timed:
    """A tape that has timed forwards and backwards."""

    def __init__(self, *timings: tuple[float, float]) -> None:
        self.share = 1.0
        self._timings = [(bool(i % 2), *timing) for i, timing in enumerate(timings)]
        self.finished: list[bool] = []

    @property
    def timings(self) -> int:
        return len(self._timings)

    def next_timing(self, finish: bool) -> tuple[bool, float, float] | None:
        self.finished.append(finish)
        return self._timings.pop(0) if self._timings else None


FREE = (1.0, 0.0)


@pytest.mark.parametrize(
    ("timings", "share"),
    [
        ([(9.0, 8.0), (9.0, 8.0), FREE, FREE], 1.0),  # the first step compiles
        ([FREE, FREE, (1.0, 0.4), FREE], 0.97 * 0.6),
        ([FREE, FREE, FREE, (2.0, 0.8)], 0.97 * 0.6),
        ([FREE, FREE, (1.0, 0.5), (2.0, 0.8)], 0.97 * 0.5),  # the slower of the two decides, once
        ([FREE, FREE, (1.0, 0.009), (0.0, 0.0)], 1.0),
        ([*[FREE] * 4, *[(1.0, 0.5), FREE] * 2], 1.0),  # two steps in a row may be a checkpoint being written
        ([*[FREE] * 4, (1.0, 0.5), FREE, FREE, (1.0, 0.2), (1.0, 0.3), FREE], 0.97 * 0.8),
    ],
)
def test_the_share_follows_from_what_was_waited(timings: list[tuple[float, float]], share: float) -> None:
    tape = Timed(*timings)
    waits = offloading.Waits(tape, adapts=True)
    waits.read_timings()
    assert tape.share == pytest.approx(share)
    for sums, parts in ((waits.forward, timings[::2]), (waits.backward, timings[1::2])):
        assert (sums.seconds, sums.waited) == pytest.approx(tuple(map(sum, zip(*parts, strict=True))))


def test_the_host_waits_once_for_the_second_step() -> None:
    for adapts in (True, False):
        tape = Timed()
        waits = offloading.Waits(tape, adapts)
        waited = []
        for _ in range(5):
            tape.finished.clear()
            waits.read_timings()
            waited.append(any(tape.finished))
            tape._timings += [(False, *FREE), (True, *FREE)]
        assert waited == [False, False, adapts, False, False]


def test_backwards_that_wait_are_told_and_lower_the_share(delayed: Delayed) -> None:
    """A window of one byte brings each tensor as backward asks for it, on a link that takes its time."""
    link = delayed.use("late", window=1)
    link.rate = 1e6
    model = compressed(Model(dropout=0.0), offload="auto")
    begin = link.clock
    one(model)
    one(model)
    [tape] = [each for found in offloading.all_alive() for each in found._tapes.values()]
    assert tape.share == 1.0
    counts = only()
    assert 0 < counts["backward_waited_seconds"] <= counts["backward_seconds"]
    assert counts["forward_seconds"] + counts["backward_seconds"] <= link.clock - begin
    # Each byte that was brought crossed the link while the stream waited for it.
    assert counts["backward_waited_seconds"] >= 0.9 * counts["brought_bytes"] / link.rate
    assert tape.share < 0.5


def test_the_report_says_how_much_left(delayed: Delayed) -> None:
    delayed.use("late", window=64 * KIB)
    model = compressed(Model(), offload=1.0)
    one(model)
    found = check_clean()
    [line] = pyactcomp.report(model).offloaded
    gone = found["left_bytes"] / found["packed_bytes"]
    assert line.startswith(f"Offload: {gone:.1%} of the bytes stored so far left cpu, 100% are to leave; window 0 MiB;")
    assert line in str(pyactcomp.report(model))
    assert pyactcomp.report(compressed(Model())).offloaded == ()


def test_the_report_says_where_each_tensor_is(delayed: Delayed) -> None:
    delayed.use("late", window=64 * KIB)
    model = compressed(Model(), offload=1.0)
    one(model)
    found = pyactcomp.report(model)
    assert {each.where for each in found.tensors if each.stored_bytes == 0} == {"device"}
    on_host = sum(each.stored_bytes for each in found.tensors if each.where == "host")
    counts = check_clean()
    assert found.host_bytes == on_host == counts["packed_bytes"]
    assert "on host MiB" in str(found)
    assert "on host MiB" not in str(pyactcomp.report(_trained(compressed(Model()))))
    plain = pyactcomp.report(_trained(compressed(Model()))).peak_bytes
    assert found.window_bytes == 64 * KIB
    assert found.peak_bytes <= plain


def _trained(model: nn.Module) -> nn.Module:
    one(model)
    return model


def test_hardly_anything_of_a_language_model_stays(delayed: Delayed) -> None:
    """Of 32 layers a window of one, and what is too small to leave: 5 % of the stored bytes.

    Recipes read codes too, and must not hold them.
    """
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=32, **shape)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.randint(64, (1, 256), generator=torch.Generator().manual_seed(0))

    def step(_: nn.Module) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    for mode in ("int8", "lossless"):
        head = mode == "int8"
        compressed(model, mode=mode, min_bytes=KIB, fuse_head=head)
        step(model)
        stored = pyactcomp.report(model).stored_bytes
        expected = gradients(model, step)
        pyactcomp.decompress(model)
        delayed.use("random", window=stored // 32)
        compressed(model, mode=mode, min_bytes=KIB, fuse_head=head, offload=1.0)
        assert_equal(gradients(model, step), expected)
        found = pyactcomp.report(model)
        stays = sum(each.stored_bytes for each in found.tensors if each.where == "device")
        counts = check_clean()
        # Backward reads each layer from its end, but for the tables of positions, which stand before the first.
        assert counts["late"] <= 0.05 * counts["brought"], counts
        assert counts["packed_bytes"] == found.host_bytes
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        check_clean()  # a graph that is alive holds nothing once backward has run
        del loss
        assert stays + counts["packed_bytes"] - counts["left_bytes"] <= 0.05 * stored, (mode, stays, counts)
        pyactcomp.decompress(model)


def test_a_step_is_drawn(delayed: Delayed, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    delayed.use("late", window=64 * KIB)
    model = compressed(Model(layers=8), offload=1.0)
    with pytest.raises(pyactcomp.PyactcompError, match="nothing to draw: run a training step"):
        pyactcomp.report(model).plot(tmp_path / "step.png")
    one(model)
    found = pyactcomp.report(model)
    samples = found.step["cpu"]
    assert max(each.host_bytes for each in samples) == check_clean()["host_peak_bytes"]
    assert [each.backward for each in samples] == sorted(each.backward for each in samples)
    assert {each.allocated_bytes for each in samples} == {0}
    bars, curves = found.plot(tmp_path / "step.png").axes
    host = next(each for each in bars.containers if each.get_label() == "on the host")
    assert bars.get_xlabel() == "KiB"
    assert sum(bar.get_width() for bar in host) * 1024 == pytest.approx(found.host_bytes)
    assert [line.get_label() for line in curves.lines][-1] == "backward begins"
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("store", ["int8", "exact"])
@pytest.mark.parametrize("around", [False, True])
def test_inputs_of_checkpointed_blocks_leave(delayed: Delayed, store: Any, around: bool) -> None:
    link = delayed.use("random", window=1)

    def run(offload: Any) -> list[Tensor]:
        model = Model(layers=6, dropout=0.0)
        if around:
            compressed(model)
        x = torch.randn(2, 2048, 64, generator=torch.Generator().manual_seed(2))  # codes of 136 KiB

        def step(_: nn.Module) -> None:
            y = model.blocks[0](x)
            for block in model.blocks[1:]:
                y = pyactcomp.checkpoint(block, y, store=store, offload=offload)
            y.square().mean().backward()

        return gradients(model, step)

    assert_equal(run(1.0), run(False))
    found = pyactcomp.offload.statistics()["cpu"]
    assert found["left"] >= 4
    assert (found["alive"], found["host_bytes"]) == (0, 0)
    assert link.pinned > 0
    assert pyactcomp.offload.trim() > 0
    from pyactcomp.checkpoint import _packing

    _packing.cache_clear()  # the link is this test's


def test_use_checkpoint_lets_the_inputs_of_a_model_leave(delayed: Delayed) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from pyactcomp.checkpoint import _packing

    delayed.use("late", window=1)

    def run(offload: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(checkpoint_wrapper(nn.Sequential(nn.Linear(256, 256), nn.Tanh())) for _ in range(5)))
        handle = pyactcomp.use_checkpoint(model, store="exact", offload=offload)
        assert handle.modules == 5
        return gradients(model, lambda m: m(torch.ones(256, 256)).sum().backward())

    assert_equal(run(1.0), run(False))
    assert pyactcomp.offload.statistics()["cpu"]["left"] >= 3
    _packing.cache_clear()


def test_a_callback_with_offload_on_the_cpu_leaves_the_model_as_it_was() -> None:
    pytest.importorskip("transformers")
    from pyactcomp.integrations.transformers import CompressionCallback

    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    callback = CompressionCallback(checkpoint="int8", offload="auto")
    with pytest.raises(ValueError, match="offload='auto' cannot work: the device is cpu"):
        callback._compress(types.SimpleNamespace(gradient_checkpointing_kwargs=None, fsdp_config=None), model)
    assert [type(module) for module in model] == [nn.Linear, nn.LayerNorm]


def test_checkpoints_refuse_what_compress_refuses() -> None:
    block, x = nn.Linear(4, 4), torch.ones(4, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"a share of the stored bytes from 0 to 1, .* got 1.5"):
        pyactcomp.checkpoint(block, x, offload=1.5)
    with pytest.raises(ValueError, match="offload='auto' cannot work: the device is cpu"):
        pyactcomp.checkpoint(block, x, offload="auto")
    with pytest.raises(ValueError, match="offload='auto' cannot work: the device is cpu"):
        pyactcomp.use_checkpoint(block, offload="auto")


def test_memory_that_device_and_host_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(pyactcomp._core, "CudaLink"):
        pytest.skip("built without cuda.h")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(offloading, "link_of", lambda device: types.SimpleNamespace(is_integrated=True))
    offloading.reason_without_link.cache_clear()
    with pytest.raises(ValueError, match="cuda:0 shares its memory with the host, so nothing is won"):
        offloading.refuse_without_link("auto", [torch.device("cuda", 0)])
    offloading.reason_without_link.cache_clear()


@pytest.mark.parametrize(
    ("offload", "error", "text"),
    [
        (True, ValueError, "got True: offload=1.0 moves everything"),
        (1.5, ValueError, "a share of the stored bytes from 0 to 1"),
        (-1, ValueError, "got -1"),
        ("x", ValueError, "got 'x'"),
        ("0GiB", ValueError, "got '0GiB'"),
        ("12MiB", ValueError, "less than the 64 MiB of stored bytes that stay on the device"),
        (None, TypeError, "got None"),
        (float("nan"), ValueError, "got nan"),
    ],
)
def test_bad_values_are_refused(offload: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pyactcomp.compress(nn.Linear(4, 4), offload=offload)


def test_a_model_on_the_cpu_is_refused_and_unchanged() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="the device is cpu, and offload moves memory of NVIDIA GPUs alone"):
        pyactcomp.compress(model, offload=1.0)
    assert [type(module) for module in model.modules()] == classes
    with pytest.raises(ImplementationUnavailableError, match="the device is cpu"):
        pyactcomp.offload.link("cpu")


def test_a_share_of_zero_is_off(delayed: Delayed) -> None:
    delayed.use("late", window=1)
    one(compressed(Model(), offload=0))
    assert pyactcomp.offload.statistics() == {}


def test_a_device_without_a_near_cpu_is_remote(tmp_path: Path) -> None:
    here = min(os.sched_getaffinity(0))
    (tmp_path / "0000:0a:00.0").mkdir()
    for near, expected in ((f"{here}", False), (f"{here}-{here + 3},900", False), ("900-903,910", True), ("", None)):
        (tmp_path / "0000:0a:00.0" / "local_cpulist").write_text(near + "\n")
        assert offloading.is_remote("0000:0A:00.0", tmp_path) is expected, near
    assert offloading.is_remote("0000:0B:00.0", tmp_path) is None
