"""The allocators that are compared: how a fresh process gets each one, and how it is known to be in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

NATIVE = "native"
OURS = "pyactcomp"
PLAIN = "pyactcomp-plain"
SAVER = "torch_memory_saver"
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYACTCOMP_ALLOC_CONF")
"""Variables that a method's own environment replaces: what the caller has set must not reach a worker."""


@dataclass(frozen=True)
class Method:
    """One allocator of a process; ``attach`` runs before CUDA is initialised, ``in_force`` after an allocation."""

    name: str
    attach: Callable[[], None]
    in_force: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)


def _nothing() -> None:
    """Attach what the environment alone decides."""


def _expandable() -> bool:
    return any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def _native() -> bool:
    return torch.cuda.get_allocator_backend() == "native" and torch.cuda.memory_allocated() > 0 and not _expandable()


def _async() -> bool:
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def _has_pools() -> bool:
    """Return whether private pools exist, which torch refuses for an allocator that is attached by C functions."""
    try:
        torch.cuda.MemPool()
    except RuntimeError:
        return False
    return True


def _rmm(kind: str, size: str) -> Callable[[], None]:
    def attach() -> None:
        import rmm

        upstream = rmm.mr.CudaMemoryResource()
        if kind == "pool":
            resource = rmm.mr.PoolMemoryResource(upstream, initial_pool_size=size)
        else:
            resource = rmm.mr.ArenaMemoryResource(upstream, arena_size=size)
        rmm.mr.set_current_device_resource(resource)
        from rmm.allocators.torch import rmm_torch_allocator

        torch.cuda.memory.change_current_allocator(rmm_torch_allocator)

    return attach


def _enable(growth: str) -> Callable[[], None]:
    def attach() -> None:
        from pyactcomp import allocator

        allocator.enable(growth=growth)

    return attach


def _plain() -> None:
    from pyactcomp import allocator

    library = allocator.library_path()
    torch.cuda.memory.change_current_allocator(
        torch.cuda.memory.CUDAPluggableAllocator(str(library), "pyactcomp_malloc", "pyactcomp_free")
    )


def _saver() -> None:
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"  # as no library is preloaded


def _ours_allocates() -> bool:
    from pyactcomp import _core

    allocator = _core.runtime_existing(torch.cuda.current_device())
    return allocator is not None and bool(allocator.stats()["allocated_bytes.all.current"] > 0)


METHODS = {
    method.name: method
    for method in (
        Method(NATIVE, _nothing, _native),
        Method("expandable", _nothing, _expandable, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        Method("async", _nothing, _async, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
        Method("rmm-pool", _rmm("pool", "4GiB"), lambda: not _has_pools()),
        Method("rmm-arena", _rmm("arena", "4GiB"), lambda: not _has_pools()),
        Method(OURS, _enable("vmm"), lambda: _ours_allocates() and _has_pools()),
        Method("pyactcomp-malloc", _enable("malloc"), lambda: _ours_allocates() and _has_pools()),
        Method(PLAIN, _plain, lambda: _ours_allocates() and not _has_pools()),
        Method(SAVER, _saver, _native),
    )
}
CALLS = tuple(name for name in METHODS if name != SAVER)
"""Each with an allocator of its own."""
SHARING = (NATIVE, "expandable", OURS, "pyactcomp-malloc")
"""The allocators whose tensors other processes can open."""
PAUSING = (NATIVE, SAVER, OURS)
"""Whose memory can be given back for a while: by hand, segment by segment, tag by tag."""
TRAINING = (NATIVE, "expandable", OURS)
"""What a training runs under unless ``--methods`` names others too."""


def use(method: Method) -> None:
    """Attach a method's allocator to this process, initialise CUDA and make sure that it is the one in force."""
    method.attach()
    torch.cuda.init()
    held = torch.empty(1 << 21, dtype=torch.uint8, device="cuda")
    if not method.in_force():
        raise RuntimeError(f"{method.name} is not the allocator that served {held.nbytes} bytes")
