"""Enabling the allocator: settings, errors and the two routes, as far as that needs no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyactcomp import PyactcompError, _core, allocator
from pyactcomp.allocator import AllocatorConfig, attach, plain
from pyactcomp.torch_private import extensions

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("allocator_not_enabled")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, allocator_not_enabled: None) -> SimpleNamespace:
    """Pretend that everything is there, with nothing behind it; tells what was called."""
    told = SimpleNamespace(
        configured=[], installed=[], attached=[], cuda_initialized=False, subclass=(None, "no reason")
    )
    told.module = SimpleNamespace(install=told.installed.append)
    monkeypatch.setattr(attach, "unavailable_reason", lambda: None)
    monkeypatch.setattr(extensions, "load", lambda name: told.subclass)
    monkeypatch.setattr(attach, "library_path", lambda: "library")
    monkeypatch.setattr(plain, "attach", told.attached.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: told.cuda_initialized)
    monkeypatch.setattr(_core, "runtime_configure", told.configured.append, raising=False)
    monkeypatch.setattr(_core, "runtime_capsule", lambda: "capsule", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: None)
    return told


def _no_cuda_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


def _no_headers_in_pyactcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_core, "has_cuda_allocator", False)


def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_core, "has_cuda_allocator", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        (_no_cuda_in_torch, r"torch .* is built without CUDA: install"),
        (_no_headers_in_pyactcomp, r"pyactcomp is built without CUDA's headers: pip install nvidia-cuda-runtime"),
        (_no_device, r"torch finds no CUDA device: check nvidia-smi"),
    ],
)
def test_enable_says_what_is_lacking_and_what_to_do(
    lacking: Callable[[pytest.MonkeyPatch], None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch)
    with pytest.raises(PyactcompError, match=f"cannot be enabled: {named}"):
        allocator.enable()
    assert not allocator.is_enabled()


def test_library_path_is_the_native_module_or_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "has_cuda_allocator", True)
    assert Path(allocator.library_path()).is_file()
    monkeypatch.setattr(_core, "has_cuda_allocator", False)
    with pytest.raises(PyactcompError, match="pip install nvidia-cuda-runtime"):
        allocator.library_path()


@pytest.mark.parametrize("text", ["max_split_size_mb", "growth:stitch", "max_split:1"])
def test_a_malformed_environment_is_named(text: str, machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYACTCOMP_ALLOC_CONF", text)
    with pytest.raises(ValueError, match="PYACTCOMP_ALLOC_CONF in the environment: "):
        allocator.enable()
    assert machine.configured == machine.attached == []
    assert not allocator.is_enabled()


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"max_split_size": "1MiB"}, ValueError, "max_split_size"),
        ({"max_split_size": 1.5}, TypeError, "max_split_size"),
        ({"growth": "stitch"}, ValueError, "growth must be 'vmm' or 'malloc', got 'stitch'"),
        ({"roundup_power2_divisions": {"256": 3}}, (TypeError, ValueError), "roundup_power2_divisions"),
        ({"garbage_collection_threshold": 2}, ValueError, "garbage_collection_threshold"),
        ({"memory_fraction": "all"}, TypeError, "memory_fraction"),
        ({"initial_pool_size": "much"}, ValueError, "initial_pool_size"),
    ],
)
def test_enable_refuses_wrong_settings_and_changes_nothing(
    options: dict[str, Any], error: type[Exception], named: str, machine: SimpleNamespace
) -> None:
    with pytest.raises(error, match=named):
        allocator.enable(**options)
    assert machine.configured == machine.attached == []
    assert not allocator.is_enabled()


def test_arguments_stand_over_the_environment_and_that_over_the_defaults(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.subclass = (machine.module, None)
    monkeypatch.setenv("PYACTCOMP_ALLOC_CONF", "max_split_size_mb:64,growth:malloc,large_segment_size_mb:32")
    allocator.enable(max_split_size="128MiB", memory_fraction=0.5, roundup_power2_divisions={256: 1, ">": 4})
    assert machine.configured == [
        AllocatorConfig(
            growth="malloc",
            max_split_size=128 * MIB,
            large_segment_size=32 * MIB,
            memory_fraction=0.5,
            roundup_power2_divisions={256: 1, ">": 4},
        )
    ]


def test_every_keyword_sets_its_setting(machine: SimpleNamespace) -> None:
    machine.subclass = (machine.module, None)
    given = {
        "growth": "malloc",
        "max_split_size": 64 * MIB,
        "max_non_split_rounding": 48 * MIB,
        "large_segment_size": 32 * MIB,
        "roundup_power2_divisions": {1 << interval: 4 for interval in range(16)},
        "garbage_collection_threshold": 0.75,
        "memory_fraction": 0.5,
        "initial_pool_size": 128 * MIB,
        "graph_capture_record_stream_reuse": True,
    }
    assert set(given) == set(AllocatorConfig.settings())
    allocator.enable(**given)  # type: ignore[arg-type]
    [config] = machine.configured
    assert {name: getattr(config, name) for name in given} == given


def test_enable_installs_the_subclass_where_there_is_one(machine: SimpleNamespace) -> None:
    machine.subclass = (machine.module, None)
    machine.cuda_initialized = True
    allocator.enable()
    assert machine.installed == ["capsule"]
    assert machine.attached == []
    assert allocator.is_enabled()


def test_enable_takes_the_plain_route_otherwise_and_says_what_it_lacks(machine: SimpleNamespace) -> None:
    machine.subclass = (None, "its torch subclass is not built: run pyactcomp build-allocator")
    with pytest.warns(UserWarning, match="not built: run pyactcomp build-allocator") as warned:
        allocator.enable()
    assert warned[0].filename == __file__
    for lacking in ("_record_memory_history", "reduce-overhead", "MemPool", "cudnn.benchmark"):
        assert lacking in str(warned[0].message)
    assert machine.attached == ["library"]
    assert allocator.is_enabled()


def test_the_plain_route_is_refused_after_cuda_was_initialized(machine: SimpleNamespace) -> None:
    machine.cuda_initialized = True
    with pytest.raises(PyactcompError, match=r"torch\.cuda\.is_initialized\(\).*before the first use of CUDA"):
        allocator.enable()
    assert machine.configured == machine.attached == []
    assert not allocator.is_enabled()


def test_enabling_twice_names_the_settings_that_hold(machine: SimpleNamespace) -> None:
    machine.subclass = (machine.module, None)
    allocator.enable("64MiB")
    with pytest.raises(PyactcompError, match="enabled already, with max_split_size_mb:64"):
        allocator.enable()
    assert len(machine.configured) == len(machine.installed) == 1


def test_torchs_settings_change_the_running_allocator(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(_core, "runtime_config", lambda: AllocatorConfig(max_split_size="64MiB"), raising=False)
    machine.subclass = (machine.module, None)
    allocator.enable(max_split_size="64MiB")
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:32")
    assert machine.configured[-1] == AllocatorConfig(max_split_size="32MiB")
    torch._C._accelerator_setAllocatorSettings("")
    assert machine.configured[-1] == AllocatorConfig(max_split_size="64MiB")


def test_disabled_by_the_environment_nothing_happens_and_nothing_raises(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    allocator.enable(max_split_size="64MiB")
    allocator.enable()
    assert machine.configured == machine.installed == machine.attached == []
    assert not allocator.is_enabled()
    with allocator.scope("step") as step, allocator.on_pressure(lambda missing: True) as handle:
        assert handle(1) is True
    assert (step.name, step.allocations, step.peak_bytes) == ("step", 0, 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_ooms": device})
    assert allocator.stats(3) == {"num_ooms": 3}


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the subclass would be looked for."""
    monkeypatch.setattr(extensions, "_folders", lambda name: [tmp_path])
    monkeypatch.delitem(sys.modules, "pyactcomp._torch_allocator", raising=False)
    return tmp_path / "_torch_allocator.py"


def test_a_subclass_for_this_torch_is_taken(extension: Path) -> None:
    extension.write_text(f"BUILT_FOR = {torch.__version__!r}\n")
    module, reason = extensions.load("_torch_allocator")
    assert module is not None
    assert module.BUILT_FOR == torch.__version__
    assert reason is None


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (None, "is not built"),
        ("BUILT_FOR = '1.0.0'", "is built for torch 1.0.0, and this is"),
        (
            "raise ImportError('undefined symbol: _ZN3c10')",
            r"does not load with torch .* \(undefined symbol: _ZN3c10\)",
        ),
    ],
)
def test_a_subclass_that_cannot_be_used_says_why_and_what_to_do(
    source: str | None, named: str, extension: Path
) -> None:
    if source is not None:
        extension.write_text(source)
    module, reason = extensions.load("_torch_allocator")
    assert module is None
    assert reason is not None
    with pytest.raises(AssertionError, match=f"{named}.*run pyactcomp build-allocator"):
        raise AssertionError(reason)
