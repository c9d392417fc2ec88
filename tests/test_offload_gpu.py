"""Stored bytes leave a GPU and come back; the logic is tested without one in test_offload.py."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyactcomp
from pyactcomp.engine import offloading

pytestmark = pytest.mark.gpu

MIB = 1 << 20
TOKENS, WIDTH, LAYERS = 2048, 512, 8


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two runs give the same bits: no attention of cuDNN's, which has no such backward, and a workspace of cuBLAS's."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.1, batch_first=True) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def _data() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(3)
    return torch.randn(4, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)


def _gradients(model: nn.Module, data: Tensor, *, retain: bool = False) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    loss = model(data).float().square().mean()
    if retain:
        loss.backward(retain_graph=True)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _counts() -> dict[str, int]:
    gc.collect()
    [found] = pyactcomp.offload.statistics().values()
    return found


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", ["int8", "lossless"])
@pytest.mark.parametrize("window", [1, 8 * MIB, 64 * MIB])
def test_gradients_are_bitwise_those_without_offload_however_late_copies_run(
    monkeypatch: pytest.MonkeyPatch, mode: Any, window: int
) -> None:
    monkeypatch.setattr(offloading, "WINDOW", window)
    data, model = _data(), _model()
    draw = random.Random(window)
    streams: list[Any] = []

    def delay(*_: object) -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(draw.random() * 5e6))  # up to about 3 ms

    for layer in model[1:]:  # a hook of backward wants an input that requires grad
        layer.register_forward_hook(delay)
        layer.register_full_backward_pre_hook(delay)
    pyactcomp.compress(model, mode=mode)
    wanted = [_gradients(model, data, retain=retain) for retain in (False, True)]
    pyactcomp.decompress(model)
    streams += [torch.cuda.ExternalStream(each) for each in offloading.link_of(data.device).streams]
    pyactcomp.compress(model, mode=mode, offload=1.0)
    for _ in range(3):
        for retain in (False, True):
            found = _gradients(model, data, retain=retain)
            assert all(map(torch.equal, found, wanted[retain]))
            del found
    counts = _counts()
    assert (counts["alive"], counts["device_bytes"], counts["host_bytes"]) == (0, 0, 0)
    assert counts["left"] > 0


def test_memory_is_the_same_in_each_step_and_nothing_is_pinned_after_the_second() -> None:
    data = _data()
    model = pyactcomp.compress(_model(), offload=1.0)
    peaks, pins, after_forward = [], [], []
    for step in range(10):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(data).float().square().mean()
        after_forward.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        del loss
        if step % 3 == 0:
            torch.cuda.synchronize()  # however far the host runs ahead
        peaks.append(torch.cuda.max_memory_allocated())
        pins.append(_counts()["pins"])
    assert len(set(peaks[2:])) == 1, peaks
    assert len(set(pins[1:])) == 1, pins
    plain = pyactcomp.compress(_model())
    plain(data).float().square().mean().backward()
    before = torch.cuda.memory_allocated()
    loss = plain(data).float().square().mean()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    # One layer's window of eight, or the smallest window; the loss and what is too small to leave come on top.
    assert after_forward[-1] <= max(held / LAYERS, 64 * MIB) + held / LAYERS


def test_pinned_memory_is_hardly_more_than_what_is_taken() -> None:
    model = pyactcomp.compress(_model(), offload=1.0)
    data = _data()
    for _ in range(2):
        _gradients(model, data)
    counts = _counts()
    # The last slab of 32 MiB may be empty but for one block.
    assert counts["pinned_bytes"] <= 1.1 * counts["host_peak_bytes"] + 32 * MIB
    assert pyactcomp.offload.trim() == counts["pinned_bytes"]


def test_the_link_is_measured_and_its_place_told() -> None:
    rates = pyactcomp.offload.link()
    assert rates.to_host > 1e9
    assert rates.to_device > 1e9
    assert pyactcomp.offload.is_remote() in (True, False, None)


# Torch's own: parameters get gradients from graphs of two streams.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.usefixtures("deterministic")
def test_other_streams_and_other_orders_of_backward() -> None:
    """Forward on a stream of the user, two graphs alive, and a backward that is called on the default stream."""
    data = _data()

    def run(**options: Any) -> list[Tensor]:
        model = pyactcomp.compress(_model(), **options)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(3):
            with torch.cuda.stream(stream):
                torch.manual_seed(1)
                first = model(data).float().square().mean()
            torch.cuda.current_stream().wait_stream(stream)
            second = model(data).float().abs().mean()
            first.backward()
            second.backward()
            stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(stream)
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert all(map(torch.equal, run(offload=1.0), run()))


@pytest.mark.usefixtures("deterministic")
def test_memory_freed_early_is_not_written_to_while_a_copy_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that begin late read memory that the forward frees meanwhile; other work takes such memory at once."""
    monkeypatch.setattr(offloading, "WINDOW", 1)
    data = _data()
    out = torch.cuda.ExternalStream(offloading.link_of(data.device).streams[0])

    def run(**options: Any) -> list[Tensor]:
        model = pyactcomp.compress(_model(), mode="lossless", **options)

        def take(*_: object) -> None:
            with torch.cuda.stream(out):
                torch.cuda._sleep(5_000_000)
            for _ in range(8):
                torch.full((4, TOKENS, WIDTH), float("nan"), device="cuda", dtype=torch.bfloat16)

        for layer in model:
            layer.register_forward_hook(take)
        return _gradients(model, data)

    expected = run()
    for _ in range(5):
        assert all(map(torch.equal, run(offload=1.0), expected))


def _requested() -> int:
    """Return the bytes asked for and alive; the allocator's blocks may be larger by what it does not split off."""
    found: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return found


def _llama(layers: int, **options: Any) -> tuple[nn.Module, Tensor]:
    """Return a model of Llama-3.1-8B's widths, compressed, and tokens."""
    transformers = pytest.importorskip("transformers")
    if torch.cuda.get_device_properties(0).total_memory < 70e9:
        pytest.skip("the widths of an 8B model at 8k tokens need a card of 80 GB")
    torch.manual_seed(0)
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("cuda"):
        config = transformers.LlamaConfig(vocab_size=32000, num_hidden_layers=layers, **shape)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return pyactcomp.compress(model, fuse_head=True, **options), torch.randint(32000, (1, 8192), device="cuda")


def _milliseconds(model: nn.Module, tokens: Tensor, skip: int = 6, steps: int = 7) -> float:
    """Return the median time of a step, after those that choose the share."""
    found = []
    for step in range(skip + steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        model(input_ids=tokens, labels=tokens).loss.backward()
        end.record()
        for parameter in model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        if step >= skip:
            found.append(begin.elapsed_time(end))
    return sorted(found)[len(found) // 2]


@pytest.mark.alone
@pytest.mark.parametrize(("repeat", "offload"), [(1, 1.0), (1, "auto"), (2, "auto"), (4, "auto")])
def test_the_copies_hide_at_the_widths_of_an_8b_model(repeat: int, offload: Any, record_property: Any) -> None:
    """On half and on a quarter of the link's rate "auto" lets a part go."""
    link = offloading.link_of(torch.device("cuda", 0))
    model, tokens = _llama(8)
    plain = _milliseconds(model, tokens)
    pyactcomp.decompress(model)
    pyactcomp.compress(model, fuse_head=True, offload=offload)
    link.repeat = repeat
    try:
        ours = _milliseconds(model, tokens)
    finally:
        link.repeat = 1
    record_property("ratio", ours / plain)
    record_property("counts", _counts())
    assert ours <= 1.03 * plain, (ours, plain, _counts())


def test_hardly_anything_of_32_layers_stays_on_the_device(record_property: Any) -> None:
    model, tokens = _llama(32, offload=1.0)
    tokens = tokens[:, :4096]
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        counts = _counts()
        loss.backward()
        assert _counts()["alive"] == 0
    found = pyactcomp.report(model)
    # The head computes its gradients in the forward: no codes, and backward begins with them.
    head = {(32000, 4096), (4096, 4096)}
    codes = [each for each in found.tensors if each.dtype != "bfloat16" or each.shape not in head or each.kept is None]
    share = (counts["device_bytes"] + sum(each.stored_bytes for each in codes if each.where == "device")) / sum(
        each.stored_bytes for each in codes
    )
    record_property("share", share)
    assert share <= 0.05, counts
    assert found.step["cuda:0"][0].allocated_bytes > 0


# Of the empty graph that torch records for a pool of "reduce-overhead".
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_graphs_send_what_they_save(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """In both modes: of "reduce-overhead" the copies run between the CUDA graphs."""
    monkeypatch.setattr(offloading, "WINDOW", 8 * MIB)
    data = _data()

    def run(**options: Any) -> tuple[list[Tensor], list[int], dict[str, int]]:
        torch.compiler.reset()
        model = pyactcomp.compress(_model().train(), **options)
        for layer in model:
            layer.dropout.p = layer.dropout1.p = layer.dropout2.p = layer.self_attn.dropout = 0.0
        model.compile(mode=mode)
        held = []
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            before = _requested()
            loss = model(data).float().square().mean()
            held.append(_requested() - before)
            for parameter in model.parameters():
                parameter.grad = None
            loss.backward()
            del loss
        counts = _counts() if options else {}
        return [parameter.grad.clone() for parameter in model.parameters()], held, counts

    expected, kept, _ = run()
    found, held, counts = run(offload=1.0)
    assert all(map(torch.equal, found, expected))
    assert (counts["alive"], counts["device_bytes"], counts["host_bytes"]) == (0, 0, 0)
    assert counts["left_bytes"] > 0.8 * counts["packed_bytes"]
    if mode == "default":
        assert held[-1] <= 0.3 * kept[-1]
        assert held[1:] == [held[1]] * 3
    torch.compiler.reset()


def test_a_captured_forward_that_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "WINDOW", 1)
    model = pyactcomp.compress(_model(), offload=1.0)
    data = _data()
    _gradients(model, data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(pyactcomp.PyactcompError, match="CUDA graph is being captured"), torch.cuda.graph(graph):
        model(data)
