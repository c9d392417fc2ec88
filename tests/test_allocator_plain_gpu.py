"""The allocator as the PyTorch manual attaches one: two functions of a library. Each case has a process of its own."""

from __future__ import annotations

import pytest
import torch
from child_script import run_case

from pyactcomp import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h"),
]

CASES = "allocator_plain_cases.py"
both_growths = pytest.mark.parametrize("growth", ["vmm", "malloc"])


def _run(case: str, *arguments: str, growth: str = "vmm") -> None:
    run_case(CASES, case, *arguments, PYACTCOMP_ALLOC_CONF=f"growth:{growth}")


@both_growths
def test_training_gives_the_bits_of_the_native_allocator(growth: str) -> None:
    # What deterministic algorithms ask of cuBLAS.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYACTCOMP_ALLOC_CONF": f"growth:{growth}"}
    native = run_case(CASES, "training", "native", **environment).stdout
    assert len(native) == 64
    assert run_case(CASES, "training", "plain", **environment).stdout == native


@both_growths
def test_record_stream_keeps_a_block_until_the_stream_has_read_it(growth: str) -> None:
    _run("race", "protected", growth=growth)


@both_growths
def test_race_is_lost_where_record_stream_is_dropped(growth: str) -> None:
    _run("race", "unprotected", growth=growth)


@both_growths
def test_thousand_frees_do_not_wait_for_the_device(growth: str) -> None:
    _run("frees_behind_a_spin", growth=growth)


@both_growths
def test_graph_owns_the_memory_of_its_capture(growth: str) -> None:
    _run("graph", growth=growth)


@both_growths
def test_out_of_memory_reads_as_pytorch_writes_it(growth: str) -> None:
    _run("out_of_memory", growth=growth)


@both_growths
def test_setters_reach_the_allocator(growth: str) -> None:
    _run("setters", growth=growth)


@pytest.mark.parametrize("setters", [[], ["set_init_fn"]], ids=["bare", "init"])
def test_malformed_settings_are_named_when_first_needed(setters: list[str]) -> None:
    run_case(CASES, "malformed_settings", *setters, PYACTCOMP_ALLOC_CONF="max_split_size_mb:tiny")


def test_mem_pool_takes_its_segments_from_us() -> None:
    _run("mem_pool")


def test_throwing_function_is_survived_under_a_mem_pool() -> None:
    _run("bare_in_mem_pool")


@both_growths
def test_peers_reach_each_other(growth: str) -> None:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs with a peer-to-peer connection")
    _run("peers", growth=growth)


@both_growths
def test_free_from_a_thread_without_a_context(growth: str) -> None:
    _run("free_from_a_thread", growth=growth)


def test_fork_after_cuda_was_initialised_is_named() -> None:
    _run("fork")


@both_growths
def test_live_tensors_at_exit_are_silent(growth: str) -> None:
    native = run_case(CASES, "live_at_exit", "native")
    plain = run_case(CASES, "live_at_exit", "plain", PYACTCOMP_ALLOC_CONF=f"growth:{growth}")
    # Torch itself may warn, of a missing numpy say.
    assert (plain.stdout, plain.stderr) == (native.stdout, native.stderr)


@both_growths
def test_wrong_frees_are_kept_as_faults_and_change_nothing(growth: str) -> None:
    _run("wrong_frees", growth=growth)
