"""CUDA tensors sent between processes, and memory that two GPUs share. Each case has its own process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from child_script import run_case

from pyactcomp import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h"),
]

CASES = "allocator_sharing_gpu_cases.py"
both_growths = pytest.mark.parametrize("growth", ["vmm", "malloc"])
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, and there is {torch.cuda.device_count()}"
)
# Since 2.13 torch's expandable segments have another format, which this allocator does not write.
TORCH_READS_MAPPED = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)


@both_growths
@pytest.mark.parametrize("receivers", [1, 2])
def test_receivers_write_a_tensor(receivers: int, growth: str) -> None:
    run_case(CASES, "written_by_receivers", growth, ",".join([growth] * receivers))


def test_native_receiver_writes_a_tensor_of_cuda_malloc() -> None:
    run_case(CASES, "written_by_receivers", "malloc", "native")


@pytest.mark.skipif(not TORCH_READS_MAPPED, reason="this torch reads another format of mapped memory")
def test_native_receiver_writes_a_tensor_whose_handles_have_one_size() -> None:
    run_case(CASES, "written_by_receivers", "vmm", "native")


def test_native_receiver_refuses_handles_of_several_sizes() -> None:
    run_case(CASES, "native_receiver_of_mixed_handles")


@both_growths
@pytest.mark.parametrize(
    "case",
    [
        "freed_and_refilled",
        "more_than_the_limit_of_files",
        "what_receivers_return_is_used_again",
        "sent_back",
        "loader",
        "learner_and_actor",
    ],
)
def test_tensors_travel_between_processes(case: str, growth: str) -> None:
    run_case(CASES, case, growth)


@two_gpus
@both_growths
def test_peers_reach_each_other(growth: str) -> None:
    run_case(CASES, "peers", growth)


@two_gpus
@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch is built without NCCL")
@both_growths
def test_nccl_registers_a_pool_as_natively(growth: str, tmp_path: Path) -> None:
    outcomes = {}
    for kind in ("native", growth):
        run_case(CASES, "nccl_user_buffers", kind, str(tmp_path))
        outcomes[kind] = [(tmp_path / f"{kind}-{rank}.txt").read_text() for rank in (0, 1)]
    logs = {path.name: path.read_text()[-4000:] for path in sorted(tmp_path.glob(f"{growth}-*.log"))}
    assert outcomes[growth] == outcomes["native"], logs
