"""``memory()``: each part is what the program made, and the parts add up to what the allocator and the device say."""

from __future__ import annotations

import gc
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_stand_in import CONTEXT, Driver, StandIn, stand_in
from torch import nn

import pyactcomp
from pyactcomp.live import nvml
from pyactcomp.live.device import Blocks, Cuda


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(monkeypatch)


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """Graphs of other tests, in cycles that nobody has collected, would go in the midst of a test."""
    gc.collect()


def step_until_backward(model: nn.Module, rows: int = 64) -> torch.Tensor:
    return model(torch.randn(rows, 256)).square().mean()


def built() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


WEIGHTS = 4 * (256 * 512 + 512 + 512 * 256 + 256)


def test_parts_are_the_tensors_of_the_program() -> None:
    model = built()
    optimizer = torch.optim.Adam(model.parameters())
    before = m = pyactcomp.memory(model, optimizer)
    assert (m.device, m.weights, m.gradients, m.optimizer) == ("cpu", WEIGHTS, 0, 0)
    loss = step_until_backward(model)
    m = pyactcomp.memory(model, optimizer)
    # The input, the output of ReLU, the model's output, and the loss, which the program holds.
    assert m.kept - before.kept == 4 * (64 * 256 + 64 * 512 + 64 * 256 + 1)
    assert m.packed == before.packed
    loss.backward()
    optimizer.step()
    del loss
    m = pyactcomp.memory(model, optimizer)
    # Two moments, and a step of 4 bytes for each of four parameters.
    assert (m.weights, m.gradients, m.optimizer) == (WEIGHTS, WEIGHTS, 2 * WEIGHTS + 16)
    assert m.activations == before.activations
    assert (m.allocated, m.temporary, m.used) == (None, None, None)


def test_without_arguments_all_models_and_optimizers_count() -> None:
    before = pyactcomp.memory()
    first, second = built(), built()
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    step_until_backward(second).backward()
    optimizer.step()
    m = pyactcomp.memory()
    found = (m.weights - before.weights, m.gradients - before.gradients, m.optimizer - before.optimizer)
    assert found == (2 * WEIGHTS, WEIGHTS, WEIGHTS)
    assert pyactcomp.memory(first).weights == WEIGHTS


def test_shared_storages_count_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("flat", model[0].weight.detach().view(-1))
    assert pyactcomp.memory(model).weights == 4 * 64 * 64


@pytest.mark.parametrize("fuse", [True, False])
def test_packed_is_what_the_engine_stores(fuse: bool) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256), nn.Linear(256, 8))
    pyactcomp.compress(model, fuse=fuse, min_bytes=0)
    before = pyactcomp.memory(model)
    out = model(torch.randn(64, 256))
    m = pyactcomp.memory(model)
    stored = pyactcomp.report(model).stored_bytes
    assert m.packed > before.packed
    assert m.activations - before.activations == stored + out.nbytes  # the program holds the output
    out.sum().backward()
    assert pyactcomp.memory(model).packed == before.packed


def test_tensors_that_hooks_moved_to_the_host(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "holds", lambda place: False)
    model = built()
    before = pyactcomp.memory(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: ("cpu", x.clone()), lambda packed: packed[1]):
        loss = step_until_backward(model)
    m = pyactcomp.memory(model)
    assert m.kept == 0
    # Copies: of the input, of the output of ReLU, for ReLU and for the layer, of that layer's weight and of the output.
    # The loss, which the program holds, is a tensor of the CPU too.
    elements = 64 * 256 + 2 * 64 * 512 + 256 * 512 + 64 * 256 + 1
    assert m.host - before.host == 4 * elements
    assert "on the host" in str(m)
    loss.backward()


def test_parts_add_up_to_the_byte(device: StandIn) -> None:
    model = built()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = step_until_backward(model, 4096)  # the large pool, whose blocks may exceed a request by up to 1 MiB
        m = pyactcomp.memory(model, optimizer)
        counters = device.counters()
        assert m.allocated == counters.allocated
        parts = (m.weights, m.gradients, m.optimizer, m.packed, m.kept, m.temporary)
        assert sum(filter(None, parts)) == counters.allocated
        assert (m.reserved, m.cached) == (counters.reserved, counters.reserved - counters.allocated)
        assert m.context == CONTEXT
        assert m.used == CONTEXT + counters.reserved + (64 << 20)
        loss.backward()
        optimizer.step()
        del loss
    # Four parameters, each in blocks of 512 bytes.
    assert m.weights % 512 == 0
    assert WEIGHTS <= m.weights < WEIGHTS + 4 * 512


def test_weights_count_the_whole_block(device: StandIn) -> None:
    model = nn.Linear(3, 1, bias=False)  # 12 bytes of a block of 512
    assert pyactcomp.memory(model).weights == 512


def test_others_that_nobody_sees_count_with_the_context(device: StandIn) -> None:
    device.others = None
    m = pyactcomp.memory()
    assert m.others is None
    assert m.context == CONTEXT
    assert "context and other processes" in str(m)


def test_block_that_holds_an_address() -> None:
    blocks = Blocks([1000, 2000], [512, 1024])
    assert blocks.allocated == 1536
    assert blocks.block_of(1511, 4) == (1000, 512)
    assert blocks.block_of(2000, 4) == (2000, 1024)
    # Memory of another allocator: its own size.
    assert blocks.block_of(1512, 4) == (1512, 4)
    assert blocks.block_of(3024, 8) == (3024, 8)
    assert blocks.block_of(999, 8) == (999, 8)


def test_result_as_text_json_and_html(device: StandIn) -> None:
    model = built()
    m = pyactcomp.memory(model)
    assert json.loads(m.json()) == m.as_dict()
    lines = str(m).splitlines()
    assert lines[0].split() == ["cuda:0", "MiB"]
    rows = {line[: line.rindex(" ")].strip(): float(line.split()[-1].replace(",", "")) for line in lines[1:]}
    assert rows["weights"] == round(m.weights / 2**20, 2)
    assert rows["context"] == 300
    parts = ("weights", "gradients", "optimizer state", "activations, packed", "activations, kept")
    assert {name for depth, name, _ in m.rows() if depth} == {*parts, "temporary and other"}
    assert len({len(line) for line in lines}) == 1
    assert f"<td>{m.weights / 2**20:,.2f}</td>" in m._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": [1]}, TypeError, "torch.nn.modules.module.Module, got list"),
        ({"optimizer": nn.Linear(1, 1)}, TypeError, "Optimizer, got Linear"),
        ({"device": 1.5}, TypeError, "got 1.5"),
        ({"device": True}, TypeError, "got True"),
        ({"device": "tpu"}, ValueError, "got 'tpu'"),
        ({"device": "meta"}, ValueError, "got 'meta'"),
        ({"device": 99}, ValueError, "there is no device 99"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    for call in (pyactcomp.memory, pyactcomp.watch):
        with pytest.raises(error, match=text):
            call(**arguments)


@pytest.mark.parametrize(
    ("processes", "others"),
    [
        ({os.getpid(): 5, 7: 3, 8: 4}, 7),
        ({os.getpid(): 5}, 0),
        ({7: 3}, None),  # in a container whose processes have other numbers
        ({os.getpid(): 5, 7: None}, None),  # the driver does not tell
    ],
)
def test_other_processes(processes: dict[int, int | None], others: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: Driver(processes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="100"))
    assert Cuda(0).other_processes() == others
    driver = Driver(processes)
    driver.nvmlDeviceGetCount = lambda: driver.name_of(7)
    monkeypatch.setattr(nvml, "_library", lambda: driver)
    assert Cuda(0).other_processes() is None  # the driver fails: no error from the thread
    monkeypatch.setattr(nvml, "_library", lambda: Driver(processes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="another"))
    assert Cuda(0).other_processes() is None


@pytest.mark.gpu
@pytest.mark.alone
def test_breakdown_of_a_gpu() -> None:
    model = built().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    pyactcomp.compress(model, min_bytes=0)
    for _ in range(2):
        loss = model(torch.randn(4096, 256, device="cuda")).square().mean()
        m = pyactcomp.memory(model, optimizer)
        assert m.allocated == torch.cuda.memory_allocated()
        assert m.reserved == torch.cuda.memory_reserved()
        assert m.packed > 0
        free, total = torch.cuda.mem_get_info()
        parts = (m.context or 0) + (m.reserved or 0) + (m.others or 0)
        assert abs(parts - (total - free)) <= 0.01 * (total - free)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    m = pyactcomp.memory(model, optimizer)
    assert (m.packed, m.gradients) == (0, 0)
    assert m.optimizer >= 2 * WEIGHTS
