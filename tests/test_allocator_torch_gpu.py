"""The allocator as a subclass of torch's: everything of torch.cuda works as before. Each case has its own process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from child_script import run_case

from pyactcomp import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h"),
]

CASES = "allocator_torch_cases.py"
MEMORY_CASES = "allocator_torch_memory_cases.py"
both_growths = pytest.mark.parametrize("growth", ["vmm", "malloc"])


@both_growths
@pytest.mark.parametrize("case", ["graph", "mem_pool", "pool_or_capture", "frees_behind_a_spin", "no_split"])
def test_torch_cuda_works_as_with_its_own_allocator(case: str, growth: str) -> None:
    run_case(CASES, case, growth)


@both_growths
@pytest.mark.parametrize("case", ["statistics", "out_of_memory", "limits", "unknown", "history_of_frees"])
def test_torch_cuda_tells_of_memory_as_with_its_own_allocator(case: str, growth: str) -> None:
    run_case(MEMORY_CASES, case, growth)


@both_growths
@pytest.mark.parametrize("case", ["graph_takes_the_memory_of_one_step", "streams_that_do_not_join_keep_their_memory"])
def test_memory_is_reused_within_a_capture(case: str, growth: str) -> None:
    run_case("allocator_capture_cases.py", case, growth)


@pytest.mark.parametrize("case", ["convolution", "profiled", "gpu_trace", "raw", "pinned_loader"])
def test_torch_works_as_with_its_own_allocator(case: str) -> None:
    run_case(CASES, case)


@both_growths
def test_memory_is_accounted_in_units_of_512_bytes(growth: str) -> None:
    run_case(MEMORY_CASES, "small_numbers", growth)


def test_history_is_recorded_with_python_stacks(tmp_path: Path) -> None:
    run_case(MEMORY_CASES, "history", str(tmp_path))


@pytest.mark.slow
@both_growths
def test_graphs_of_compiled_models_compute_what_eager_does(growth: str) -> None:
    run_case(CASES, "reduce_overhead", growth)


@both_growths
def test_enabling_after_initialisation_keeps_native_memory(growth: str) -> None:
    run_case(CASES, "after_initialisation", growth)


@both_growths
@pytest.mark.parametrize("protection", ["protected", "unprotected"])
def test_record_stream_alone_keeps_a_block_from_reuse(protection: str, growth: str) -> None:
    run_case(CASES, "race", growth, protection)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_nccl_reduces_on_its_streams(world: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, and there is {torch.cuda.device_count()}")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    run_case(CASES, "nccl", str(world), str(tmp_path / "rendezvous"))


def test_live_tensors_at_exit_are_silent() -> None:
    native = run_case(CASES, "live_at_exit", "native")
    ours = run_case(CASES, "live_at_exit", "pyactcomp")
    # Torch itself may warn, of a missing numpy say.
    assert (ours.stdout, ours.stderr) == (native.stdout, native.stderr)
