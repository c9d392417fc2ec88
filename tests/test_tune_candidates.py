"""Contract under test: the setting a snapshot was recorded under is known, and what is tried can be undone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from allocator_cases import MIB

from pyactcomp.allocator import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.snapshots import read_snapshot
from pyactcomp.snapshots.candidates import AXES, Candidate, coarse_moves, recorded_candidate
from pyactcomp.snapshots.model import Settings


@pytest.mark.parametrize("family", ["native", "pyactcomp"])
@pytest.mark.parametrize("retries", [0, 1])
def test_every_setting_can_be_left_out_again(family: str, retries: int) -> None:
    settings = {
        "max_split_size_mb": "64",
        "max_non_split_rounding": str(33 * MIB + 1),
        "garbage_collection_threshold": "0.8",
        "per_process_memory_fraction": "0.99",
    }
    candidate = Candidate.make(family, settings)
    moved = [
        candidate.moved(move) for axis in AXES[family] for move in coarse_moves(axis, candidate, retries, (30, 80))
    ]
    for left_out in (
        ("max_split_size_mb",),
        ("max_non_split_rounding",),
        ("garbage_collection_threshold", "per_process_memory_fraction"),
    ):
        kept = {key: value for key, value in settings.items() if key not in left_out}
        assert Candidate.make(family, kept) in moved
    # Another value takes the place of one in bytes.
    other = candidate.moved({"max_non_split_rounding_mb": "32"})
    assert other is not None
    assert (other.get("max_non_split_rounding_mb"), other.get("max_non_split_rounding")) == ("32", "")


def recorded_by(config: AllocatorConfig, folder: Path) -> Settings:
    """Return the settings in a snapshot of our allocator."""
    allocator = CachingAllocator(SimulatedDevice("1GiB"), config)
    allocator.record_history("all", stacks=None)
    allocator.free(allocator.allocate("30MiB"))
    path = folder / "snapshot.json"
    path.write_text(json.dumps(allocator.snapshot()))
    return read_snapshot(path).settings


@pytest.mark.parametrize("growth", ["vmm", "malloc"])
def test_setting_that_our_allocator_recorded_under_is_known(growth: str, tmp_path: Path) -> None:
    config = AllocatorConfig(growth=growth, max_split_size="64MiB", large_segment_size="32MiB")
    candidate, notes = recorded_candidate(recorded_by(config, tmp_path))
    settings = "max_split_size_mb:64,large_segment_size_mb:32"
    assert candidate.config == ("pyactcomp[" + ("growth:malloc," if growth == "malloc" else "") + settings + "]")
    assert notes == ()


def test_sizes_of_our_allocator_that_are_no_whole_mebibytes_are_known(tmp_path: Path) -> None:
    config = AllocatorConfig(max_split_size=64 * MIB + 512, max_non_split_rounding=33 * MIB + 1, initial_pool_size=5)
    candidate, notes = recorded_candidate(recorded_by(config, tmp_path))
    assert notes == ()
    assert candidate.family == "pyactcomp"
    settings = AllocatorConfig.parse(candidate.config.removeprefix("pyactcomp[")[:-1])
    for key in ("max_split_size", "max_non_split_rounding", "initial_pool_size"):
        assert getattr(settings, key) == getattr(config, key), key


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        (Settings(), "native"),
        (Settings("expandable_segments:True", expandable_segments=True), "expandable"),
        (Settings("max_split_size_mb:128", max_split_size=128 * MIB), "native[max_split_size_mb:128]"),
        (
            Settings("pinned_use_background_threads:True,per_process_memory_fraction:0.9"),
            "native[per_process_memory_fraction:0.9]",
        ),
        (
            Settings(roundup_power2_divisions={1 << interval: 8 for interval in range(16)}),
            "native[roundup_power2_divisions:8]",
        ),
        (
            Settings("expandable_segments:True", expandable_segments=True, max_split_size=128 * MIB),
            "expandable[max_split_size_mb:128]",
        ),
    ],
)
def test_setting_that_pytorch_recorded_under_is_known(settings: Settings, config: str) -> None:
    candidate, notes = recorded_candidate(settings)
    assert (candidate.config, notes) == (config, ())


def test_rounding_of_some_sizes_only_is_known() -> None:
    candidate, notes = recorded_candidate(Settings(roundup_power2_divisions={256: 4, 512: 8}))
    config = AllocatorConfig.parse(candidate.config.removeprefix("native[")[:-1])
    found = {size: divisions for size, divisions in config.roundup_power2_divisions.items() if divisions > 1}
    assert found == {256: 4, 512: 8}
    assert notes == ()


def test_recorded_garbage_collection_without_a_fraction_is_named() -> None:
    candidate, notes = recorded_candidate(Settings(garbage_collection_threshold=0.5))
    assert candidate.config == "native[garbage_collection_threshold:0.5]"
    assert "collects only under a memory fraction" in notes[0]
    limited = Settings("per_process_memory_fraction:0.9", garbage_collection_threshold=0.5)
    assert recorded_candidate(limited)[1] == ()


def test_recorded_setting_that_cannot_be_replayed_is_named() -> None:
    candidate, notes = recorded_candidate(Settings(max_split_size=MIB))
    assert candidate == Candidate("native")
    assert "max_split_size" in notes[0]
