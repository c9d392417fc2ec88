"""torch_memory_saver's names over allocator.pause: over simulated devices in place of GPUs."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocator_cases import MIB
from pausing_machine import Machine, installed

from pyactcomp import PyactcompError
from pyactcomp.allocator import memory_saver, pausing


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, allocator_not_enabled: None) -> Machine:
    return installed(monkeypatch)


def test_regions_are_paused_and_the_rest_is_not(machine: Machine) -> None:
    saver = memory_saver.TorchMemorySaver()
    machine.allocate(50 * MIB)
    alone = machine.reserved[0]
    with saver.region(tag="weights", enable_cpu_backup=True):
        machine.allocate(100 * MIB)
        with saver.region(tag="kv"):
            machine.allocate(200 * MIB)
        with saver.disable():
            machine.allocate(2 * MIB)
    with saver.region(tag="weights"):
        machine.allocate(30 * MIB)
    before = machine.reserved[0]
    saver.pause("kv")
    assert before - machine.reserved[0] >= 200 * MIB
    saver.pause()
    assert alone <= machine.reserved[0] <= alone + 22 * MIB
    assert machine.devices[0].pinned == 100 * MIB
    machine.allocate(20 * MIB)
    saver.resume("weights")
    saver.resume()
    assert machine.devices[0].pinned == 0
    assert saver.enabled


def test_a_tag_without_a_region_is_nothing_to_pause(machine: Machine) -> None:
    saver = memory_saver.TorchMemorySaver()
    saver.pause("cuda_graph")
    saver.resume("cuda_graph")
    with saver.region("weights", enable_cpu_backup=True):
        machine.allocate(100 * MIB)
    before = machine.reserved
    saver.pause("cuda_graph")
    assert machine.reserved == before
    saver.pause()
    saver.resume("cuda_graph")
    # Memory kept for the paused region stays, and so does a second pause's error.
    assert machine.reserved[0] == 0
    assert machine.devices[0].pinned == 100 * MIB
    with pytest.raises(PyactcompError, match="paused already"):
        saver.pause("weights")


def test_the_empty_tag_means_all_regions(machine: Machine) -> None:
    saver = memory_saver.TorchMemorySaver()
    for name in ("weights", "kv"):
        with saver.region(name):
            machine.allocate(100 * MIB)
    before = machine.reserved
    saver.pause("")
    assert machine.reserved == [0, 0]
    saver.pause("")
    saver.resume("")
    assert machine.reserved == before


@pytest.mark.parametrize("tag", ["weights", None])
def test_regions_of_a_device_first_used_while_paused_join_later(machine: Machine, tag: str | None) -> None:
    saver = memory_saver.TorchMemorySaver()
    machine.used = {0}
    with saver.region("weights", enable_cpu_backup=True):
        machine.allocate(100 * MIB)
    saver.pause(tag)
    machine.used = {0, 1}
    with saver.region("weights", enable_cpu_backup=True):
        machine.allocate(40 * MIB, 1)
    saver.pause(tag)
    assert machine.reserved == [0, 0]
    saver.resume(tag)
    # Contents that are kept and contents that are dropped are two tags of one region.
    saver.pause(tag)
    with saver.region("weights"):
        machine.allocate(60 * MIB)
    saver.resume(tag)
    assert machine.paused == [set(), set()]
    assert machine.reserved[0] >= 160 * MIB


def test_pinned_memory_stays_where_it_is_retained(machine: Machine) -> None:
    saver = memory_saver.TorchMemorySaver()
    saver.retain_cpu_backup = True
    with saver.region(enable_cpu_backup=True):
        machine.allocate(100 * MIB)
    saver.pause()
    saver.resume()
    assert machine.devices[0].pinned == 100 * MIB


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"enable_disk_backup": True}, NotImplementedError),
        ({"enable_cpu_backup": True, "cpu_backup_backend": "mmap"}, NotImplementedError),
        ({"cpu_backup_backend": "pinned"}, ValueError),
    ],
)
def test_options_without_a_counterpart_raise(machine: Machine, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error), memory_saver.TorchMemorySaver().region(**options):
        pass


def test_contents_of_a_paused_tensor_can_be_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(6, dtype=torch.float32)
    halves = [(values.data_ptr(), 8), (values.data_ptr() + 8, 16)]
    monkeypatch.setattr(pausing, "saved", lambda tensor: halves)
    paused = SimpleNamespace(
        is_cuda=True, is_contiguous=lambda: True, nbytes=24, dtype=torch.float32, shape=torch.Size([2, 3])
    )
    found = memory_saver.TorchMemorySaver().get_cpu_backup(paused)  # type: ignore[arg-type]
    assert found is not None
    assert torch.equal(found, values.view(2, 3))
    with pytest.raises(NotImplementedError, match="2 pieces"):
        memory_saver.TorchMemorySaver().get_cpu_backup(paused, zero_copy=True)  # type: ignore[arg-type]
    monkeypatch.setattr(pausing, "saved", lambda tensor: [])
    assert memory_saver.TorchMemorySaver().get_cpu_backup(paused) is None  # type: ignore[arg-type]


def test_subprocesses_get_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYACTCOMP_ALLOCATOR", raising=False)
    with memory_saver.configure_subprocess():
        assert os.environ["PYACTCOMP_ALLOCATOR"] == "1"
    assert "PYACTCOMP_ALLOCATOR" not in os.environ
