"""A test for each private name of torch in ``torch_private/distributed.py``, as ``tests.py`` has for the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import (
    FROM_LOCAL,
    REDISTRIBUTED,
    TO_LOCAL,
    Gather,
    all_gather,
    default_group,
    gather_of,
    local_tensor,
    placements_before,
    placements_of,
    wait_for,
    waited,
)


def test_dtensors() -> None:
    """Gather a DTensor of two processes, of which torch's fake group stands for the other."""
    if not dist.is_available() or dist.is_initialized():
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert default_group is not None
    assert default_group() is None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert default_group() is dist.group.WORLD
        _test_nodes()
        _test_waiting()
    finally:
        dist.destroy_process_group()
    assert default_group() is None


def _test_nodes() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    shard = torch.zeros(2, 3, 4, requires_grad=True)
    x = DTensor.from_local(shard, mesh, [Shard(1)], run_check=False)
    whole = x.redistribute(placements=[Replicate()])
    source: Any = x.grad_fn
    assert source.name() == FROM_LOCAL, source.name()
    node: Any = whole.grad_fn
    assert node.name() == REDISTRIBUTED, node.name()
    assert node.next_functions[0][0] is source
    assert placements_of(whole) == (Replicate(),)
    assert gather_of(node, placements_of(whole)) == Gather(mesh.get_group(), torch.Size([2, 6, 4]), 1)
    assert gather_of(node, (Shard(0),)) is None
    local = whole.to_local()
    of_local: Any = local.grad_fn
    assert of_local.name() == TO_LOCAL, of_local.name()
    assert placements_before(of_local) == (Replicate(),)
    # A write to a DTensor moves its version counter alone; a local tensor's is that of what `to_local` returns.
    before = whole._version, local_tensor(whole)._version
    with torch.no_grad():
        whole.mul_(2)
    assert (whole._version, local_tensor(whole)._version) == (before[0] + 1, before[1])
    with torch.no_grad():
        local.mul_(2)
    assert (whole._version, local_tensor(whole)._version) == (before[0] + 1, before[1] + 1)
    all_gather(torch.zeros(4), torch.zeros(2), mesh.get_group())


def _test_waiting() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    gathered: Any = DTensor.from_local(torch.zeros(1, 4), mesh, [Shard(0)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    local = local_tensor(gathered)
    assert type(local) is not Tensor, "a collective returns a plain tensor before it is done"
    assert type(waited(local)) is Tensor
    wait_for(gathered)
    assert type(local_tensor(gathered)) is Tensor
    assert gathered.to_local().shape == (2, 4)


TESTS = {"names, fields and versions of torch.distributed.tensor": test_dtensors}
