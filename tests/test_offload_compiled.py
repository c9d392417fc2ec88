"""Graphs of torch.compile send what they save: every gradient is bitwise the one without offload."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import compiled_programs
import programs
import pytest
import torch
from compiled_backend import as_inductor, held_by_graphs
from offload_programs import (
    DATA,
    KIB,
    WHEN,
    Delayed,
    Model,
    accumulate,
    assert_equal,
    check_clean,
    compressed,
    crossed,
    delayed_fixture,
    gradients,
    one,
    one_forward_one_backward,
    only,
    part,
    twice,
)
from programs_check import all_same, same_error
from torch import Tensor, nn

import pyactcomp

__all__ = ["delayed_fixture"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    # With it torch refuses to retain a graph.
    with torch._functorch.config.patch(donated_buffer=False):
        yield
    torch.compiler.reset()


def compiled(model: nn.Module, backend: Any = as_inductor, **options: Any) -> nn.Module:
    """Compress a model and compile it whole."""
    compressed(model, **options).compile(backend=backend)
    return model


# Each layer takes a second to compile.
small = functools.partial(Model, layers=2)
RUNS = (one, twice, accumulate, crossed, one_forward_one_backward, part)


@functools.cache
def wanted(mode: str) -> tuple[list[Tensor], ...]:
    """Return the gradients of the compiled model without offload, for each run."""
    model = compiled(small(), mode=mode)
    return tuple(gradients(model, run) for run in RUNS)


@pytest.mark.parametrize(("when", "window", "share"), [("late", 1, 1.0), ("random", 16 * KIB, 0.5)])
@pytest.mark.parametrize("mode", ["int8", "lossless"])
def test_gradients_are_bitwise_those_without_offload(
    delayed: Delayed, mode: str, when: str, window: int, share: float
) -> None:
    expected = wanted(mode)
    link = delayed.use(when, window=window)
    model = compiled(small(), mode=mode, offload=share)
    for run, each in (*zip(RUNS, expected, strict=True), (one, expected[0])):
        before = only() if pyactcomp.offload.statistics() else {"left": 0, "brought": 0}
        assert_equal(gradients(model, run), each, run)
        found = check_clean()
        assert found["brought"] - before["brought"] >= found["left"] - before["left"] > 0
    del model
    gc.collect()
    assert (link.pinned, link.live_events) == (0, 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "start", [50_000_000, *(pytest.param(start, marks=pytest.mark.slow) for start in range(50_000_004, 50_000_016, 4))]
)
def test_random_programs(delayed: Delayed, start: int) -> None:
    """Each program once without and once with offload. Without loss: of two compilations torch's cut may save other
    values, and codes of others are other gradients."""
    sent = 0
    for seed in range(start, start + 4):
        namespace = compiled_programs.module_of(programs.generate(seed))
        options: dict[str, Any] = {"min_bytes": 1, "mode": "lossless"}
        plain, _ = compiled_programs.compiled(namespace, **options)
        delayed.use(WHEN[seed % 3], seed, window=(1, 512)[seed % 2])
        got, _ = compiled_programs.compiled(namespace, offload=1.0, **options)
        assert same_error(got, plain), (seed, got.error)
        assert all_same(got.gradients, plain.gradients), seed
        sent += sum(int(counts["sent"]) for counts in pyactcomp.offload.statistics().values())
        gc.collect()
    assert sent > 0


def llama(layers: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a Llama of transformers, and a function that returns its loss."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=layers, use_cache=False, **shape)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.randint(64, (1, 256), generator=torch.Generator().manual_seed(0))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


@pytest.mark.slow
def test_hardly_anything_of_a_language_model_stays(delayed: Delayed) -> None:
    """Of twelve layers a window of half a layer, the tensor in hand, and what is too small to leave."""
    model, loss = llama(12)
    compiled(model, min_bytes=KIB)
    stored, _ = held_by_graphs(loss(), model)
    expected = gradients(model, lambda _: loss().backward())
    pyactcomp.decompress(model)
    delayed.use("random", window=stored // 24)
    compiled(model, min_bytes=KIB, offload=1.0)
    for _ in range(2):
        last = loss()
        stays, _ = held_by_graphs(last, model)
        assert stays + only()["device_bytes"] <= 0.1 * stored, (stays, only(), stored)
        model.zero_grad()
        last.backward()
    assert_equal([parameter.grad for parameter in model.parameters()], expected)
    check_clean()


def test_the_report_says_what_graphs_send(delayed: Delayed) -> None:
    delayed.use("late", window=16 * KIB)
    model = compiled(small(dropout=0.0), offload=1.0)
    one(model)
    report = pyactcomp.report(model)
    [graph] = report.graphs
    counts = check_clean()
    assert report.host_bytes == sum(value.after for value in graph.saved if value.where == "host")
    # The exponent beside a tensor's halves is too small for the tape.
    assert 0 <= report.host_bytes - counts["packed_bytes"] <= 4 * len(graph.saved)
    # The model's input and the sums of the softmax stay.
    assert report.host_bytes >= 0.95 * (report.stored_bytes - DATA.nbytes)
    assert f"{report.host_bytes / 2**20:.2f} leave for the host" in str(report)
    assert report.offloaded[0].startswith(f"Offload: {counts['left_bytes'] / counts['packed_bytes']:.1%} of the bytes")
    assert {value.where for value in pyactcomp.report(_trained(compiled(small()))).graphs[0].saved} == {"device"}


def _trained(model: nn.Module) -> nn.Module:
    one(model)
    return model


def test_a_forward_without_backward_leaves_nothing(delayed: Delayed) -> None:
    delayed.use("random", window=8 * KIB)
    model = compiled(small(), offload=1.0)
    for _ in range(3):
        loss = model(DATA).square().mean()
        assert only()["alive"] > 0
        del loss
        check_clean()
    assert_equal(gradients(model, one), wanted("int8")[0])
    check_clean()


@pytest.mark.slow
def test_breaks_of_the_graph_and_other_shapes(delayed: Delayed) -> None:
    class Broken(Model):
        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x)
                if index == 0:
                    torch._dynamo.graph_break()
            return x

    def run(model: nn.Module) -> None:
        for batch, tokens in ((2, 48), (2, 17)):
            model(DATA[:batch, :tokens]).square().mean().backward()

    expected = gradients(compiled(Broken(layers=2, dropout=0.0)), run)
    delayed.use("late", window=8 * KIB)
    model = compiled(Broken(layers=2, dropout=0.0), offload=1.0)
    assert_equal(gradients(model, run), expected)
    assert check_clean()["left"] > 0
    assert {value.where for graph in pyactcomp.report(model).graphs for value in graph.saved} >= {"host"}


def test_compiled_blocks_in_an_eager_model(delayed: Delayed) -> None:
    """The graphs send what they save, the rest of the model leaves by the hooks: on one tape."""

    class Headed(Model):
        def __init__(self) -> None:
            super().__init__(layers=2, dropout=0.0)
            self.first = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.first(x))

    def make(**options: Any) -> nn.Module:
        model = compressed(Headed(), **options)
        for block in model.blocks:
            block.compile(backend=as_inductor)
        return model

    expected = gradients(make(), one)
    delayed.use("random", window=16 * KIB)
    model = make(offload=1.0)
    for _ in range(2):
        assert_equal(gradients(model, one), expected)
    found = check_clean()
    report = pyactcomp.report(model)
    assert 0 <= 2 * report.host_bytes - found["packed_bytes"] <= 4 * len(report.tensors)
    assert found["left"] > 0


def test_copies_and_models_compressed_again_have_a_tape(delayed: Delayed) -> None:
    delayed.use("late", window=8 * KIB)
    model = compiled(small(), offload=1.0)
    assert_equal(gradients(model, one), wanted("int8")[0])
    other = copy.deepcopy(model)
    other.compile(backend=as_inductor)  # a copy is not compiled
    pyactcomp.decompress(model)
    del model
    assert_equal(gradients(other, one), wanted("int8")[0])
    assert check_clean()["left"] > 0
    pyactcomp.decompress(other)
    gc.collect()
    assert pyactcomp.offload.statistics() == {}
    compressed(other, offload=1.0)
    assert_equal(gradients(other, one), wanted("int8")[0])
    assert check_clean()["left"] > 0


def test_hooks_that_copy_handles_are_named(delayed: Delayed) -> None:
    delayed.use("late", window=1)
    model = compiled(small(), offload=1.0)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = model(DATA).square().mean()
    with pytest.raises(pyactcomp.PyactcompError, match=r"save_on_cpu, have copied it\. Drop"):
        loss.backward()


def test_graphs_from_torchs_cache_find_the_tape(delayed: Delayed) -> None:
    """The number of a tape is part of a graph's key."""
    from pyactcomp.compiled.context import Graphs
    from pyactcomp.config import Config

    first, second, plain = (Graphs(Config(offload=offload)) for offload in (1.0, 1.0, False))
    assert 0 < first.tape < second.tape
    assert plain.tape == 0
    assert copy.copy(first).tape == first.tape


@pytest.mark.slow
def test_inductors_code(delayed: Delayed) -> None:
    """Memory that Inductor uses again after its last reader, and graphs that are retained."""

    def make(**options: Any) -> nn.Module:
        torch.compiler.reset()
        return compiled(small(dropout=0.0), "inductor", **options)

    def retained(model: nn.Module) -> None:
        x = DATA.clone().requires_grad_()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    expected = gradients(make(), retained)
    delayed.use("late", window=1)
    model = make(offload=1.0)
    for _ in range(2):
        assert_equal(gradients(model, retained), expected)
    assert check_clean()["left"] > 0


def test_inductor_keeps_both_operators_out_of_cuda_graphs() -> None:
    if not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch has no tag for it: Inductor captures no graph with a tensor of the CPU")
    from pyactcomp.compiled import away

    assert away is not None
    for name in ("send", "take"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.pyactcomp, name).default.tags
