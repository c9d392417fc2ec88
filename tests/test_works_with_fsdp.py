"""Works with: FSDP2, DTensor and tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import distributed_worker as worker
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from works_with import GRADIENT_BOUND, WIDTH, assert_compressed, assert_step_agrees, relative_error

from pyactcomp.engine import reasons

WORLD = 2


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_fsdp2_gradients_agree_and_gathered_weights_are_not_compressed(backend: str, tmp_path: Path) -> None:
    worker.need_devices(backend, WORLD)
    for results in worker.run(worker.fsdp, backend, WORLD, tmp_path):
        for found, exact, report in results.values():
            assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND
            assert_compressed(report)
            worker.assert_no_weight_compressed(report)
            assert any(tensor.kept in reasons.ALIVE_ANYWAY for tensor in report.tensors)


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_dtensor_model_compresses_local_tensors(backend: str, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    worker.need_devices(backend, 1)
    device = worker.device_of(backend, 0)
    if backend == "nccl":
        torch.cuda.init()  # a mesh warns if no device was chosen before
        torch.cuda.set_device(0)
    with worker.process_group(backend, 0, 1, tmp_path):
        mesh = init_device_mesh(torch.device(device).type, (1,))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        assert isinstance(model[0].weight, DTensor)
        inputs = torch.randn(128, WIDTH, device=device)
        report = assert_step_agrees(model, lambda m: F.mse_loss(m(inputs), inputs))
        # The GELU's input and the second layer's, both DTensors; the first layer's input is the model's own.
        packed = [tensor for tensor in report.tensors if tensor.kept is None]
        assert len(packed) == 2
        weights = {tuple(sorted(p.shape)) for p in model.parameters()}
        assert not weights & {tuple(sorted(tensor.shape)) for tensor in packed}


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_norm_waits_for_what_a_tensor_parallel_linear_returns(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
    worker.need_devices(backend, WORLD)
    for each in worker.run(worker.tensor_parallel, backend, WORLD, tmp_path):
        assert each["given"] == ["AsyncCollectiveTensor"] * 2
        for found, exact in each["results"].values():
            assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND


@pytest.mark.parametrize("backend", worker.BACKENDS)
def test_mlps_in_tiles_have_the_gradients_of_whole_ones(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
    worker.need_devices(backend, WORLD)
    for results in worker.run(worker.tiled_mlp, backend, WORLD, tmp_path):
        assert len(results) == 4
        for found, exact, tiles in results.values():
            assert len(tiles) == 2
            assert found.keys() == exact.keys()
            assert 0.0 < relative_error(found, exact) <= GRADIENT_BOUND
