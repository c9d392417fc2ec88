"""Norms under sequence parallelism: input and output are DTensors, of which each process has some of the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..codec.layouts import contiguous_layout
from ..engine.gathered import mark_as_shards
from ..engine.marks import RECIPE
from ..engine.saved import PLAIN
from ..torch_private.distributed import placements_of, wait_for


def local_rows(x: Any, normalized: int, *parameters: Any) -> tuple[Any, ...]:
    """Return the local tensors of ``x`` and of the parameters, if each row lies in one process; else all unchanged.

    Parameters
    ----------
    x : Tensor
    normalized : int
        Number of the last dimensions, which form a row.
    *parameters : Tensor or None
        Must be whole in each process. Their gradient is a sum over rows, of which each process has its own.
    """
    unchanged = x, *parameters
    if type(x) in PLAIN or torch.compiler.is_compiling() or not (placements := placements_of(x)):
        return unchanged
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole = [isinstance(each, Replicate) for each in placements]
    rows = [type(each) is Shard and each.dim < x.dim() - normalized for each in placements]
    if not all(a or b for a, b in zip(whole, rows, strict=True)):
        return unchanged
    for each in parameters:
        if each is None:
            continue
        placed = placements_of(each)
        if not placed or each.device_mesh != x.device_mesh or not all(isinstance(place, Replicate) for place in placed):
            return unchanged
    terms = [Replicate() if each else Partial() for each in whole]
    wait_for(x)
    own = [None if each is None else each.to_local(grad_placements=terms) for each in parameters]
    return x.to_local(), *own


def of_rows(out: Tensor, x: Any) -> Tensor:
    """Return the DTensor with the local tensor ``out``, placed as the input ``x`` and of its shape."""
    from torch.distributed.tensor import DTensor

    # A write to a DTensor does not move the version counter of its local tensor: nothing would notice that a recomputed
    # output is another.
    RECIPE.drop(out.grad_fn)
    placed: Tensor = DTensor.from_local(
        out, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=contiguous_layout(x.shape).stride
    )
    mark_as_shards(placed)
    return placed
