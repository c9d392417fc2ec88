"""From a program that runs out of memory on a GPU to a setting under which it does not; each run has its process."""

from __future__ import annotations

from pathlib import Path

import pytest
from child_script import run_case
from replay_gpu_cases import MIB

from pyactcomp.snapshots import explain, replay, tune
from pyactcomp.snapshots.reader import Snapshot, read_snapshot

pytestmark = pytest.mark.gpu

FILE = "replay_gpu_cases.py"
# The program has 735 MiB alive at most, and PyTorch's allocator reserves 908 where it may.
CAPACITY = 850 * MIB
ENDLESS = 1 << 40


def recorded(capacity: int, folder: Path) -> Path:
    path = folder / "snapshot.pickle"
    run_case(FILE, "record", str(capacity), str(path), PYTORCH_CUDA_ALLOC_CONF="")
    return path


def reserved(capacity: int, folder: Path, settings: str) -> int:
    """Return the bytes that a run to the end reserves under PyTorch's allocator."""
    # This variable goes first in every version.
    run_case(FILE, "measure", str(capacity), str(folder / "reserved"), PYTORCH_CUDA_ALLOC_CONF=settings)
    return int((folder / "reserved").read_text())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(CAPACITY, tmp_path_factory.mktemp("recording"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return read_snapshot(recorded(ENDLESS, tmp_path_factory.mktemp("whole")))


def test_recorded_program_runs_out_of_memory_where_the_replay_says(recording: Path) -> None:
    found = explain(recording, capacity=CAPACITY)
    fits = {fit.config: fit.oom_at for fit in found.fits}
    assert fits == {"native": found.event, "expandable": None, "pyactcomp": None}
    assert any(line.rsplit(":", 1)[0].endswith(FILE) for line in found.by_stack[0].stack)
    assert sum(group.bytes for group in found.by_stack) == found.live_bytes
    assert found.reserved_bytes is not None
    assert found.live_bytes + (found.request_bytes or 0) <= CAPACITY < found.reserved_bytes + (found.request_bytes or 0)


def test_setting_that_tune_exports_runs_the_program_in_the_capacity(recording: Path, tmp_path: Path) -> None:
    result = tune(recording, CAPACITY)
    assert not result.recorded.fits
    assert result.pytorch is not None
    assert result.pytorch.fits
    assert reserved(CAPACITY, tmp_path, result.pytorch.conf) <= CAPACITY


@pytest.mark.parametrize(
    ("config", "settings", "tolerance"),
    [
        ("native", "", 0.0),
        # Of equal free blocks the lowest is taken, and where segments lie that the recording did not have is not known.
        ("native[max_split_size_mb:64]", "max_split_size_mb:64", 2 * MIB),
        ("native[roundup_power2_divisions:4]", "roundup_power2_divisions:4", 2 * MIB),
        # Without a memory fraction, PyTorch collects nothing.
        ("native[garbage_collection_threshold:0.005]", "garbage_collection_threshold:0.005", 0.0),
        # A page of the large pool.
        ("expandable", "expandable_segments:True", 20 * MIB),
        ("expandable[max_split_size_mb:64]", "expandable_segments:True,max_split_size_mb:64", 20 * MIB),
    ],
)
def test_replay_predicts_what_a_run_reserves(
    config: str, settings: str, tolerance: float, whole: Snapshot, tmp_path: Path
) -> None:
    real = reserved(ENDLESS, tmp_path, settings)
    assert abs(replay(whole, config).peak_reserved - real) <= tolerance


@pytest.mark.parametrize("threshold", ["0.5", "0.7"])
def test_replay_predicts_what_garbage_collection_leaves(threshold: str, whole: Snapshot, tmp_path: Path) -> None:
    limit = 1000 * MIB  # the program reserves 908 without collection
    settings = f"garbage_collection_threshold:{threshold}"
    real = reserved(limit, tmp_path, settings)
    # A run's share of the device, and half of twice as much here: the same limit.
    config = f"native[{settings},per_process_memory_fraction:0.5]"
    assert abs(replay(whole, config, 2 * (limit + MIB)).peak_reserved - real) <= 2 * MIB


def test_memory_of_a_side_stream_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    run_case(FILE, "record_side_stream", str(path), PYTORCH_CUDA_ALLOC_CONF="")
    found = explain(path)
    assert found.free_memory == ()
    (told,) = (note for note in found.notes if "free on other streams" in note)
    assert f"{640 * MIB:,} bytes, {400 * MIB:,} of them free" in told
    assert replay(read_snapshot(path), "native").peak_reserved == 640 * MIB
