"""The Triton launches of a compiled step, as Inductor plans them for an H100, counted without a GPU.

Inductor generates Triton code for tensors on the CPU, told of a driver and a device that are not there; a launch does
nothing but count. Results of the step are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

H100 = {
    "type": "cuda",
    "index": 0,
    "multi_processor_count": 132,
    "cc": 90,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}


class Launch(NamedTuple):
    """One launch: the kernel's name, and its tensors."""

    kernel: str
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, each read or written once."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


class _Driver:
    """The driver that Triton asks for its target."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def is_active(cls) -> bool:
        return True


@contextmanager
def _counted(launches: list[Launch]) -> Iterator[None]:
    import triton
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.hints import DeviceProperties

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, *arguments: Any, **_: Any) -> None:
            launches.append(Launch(self.name, [a for a in arguments if isinstance(a, Tensor)]))

    # The rules for writing out an expression that is inlined elsewhere, as for a GPU.
    inlining = {"realize_opcount_threshold": 30, "realize_acc_reads_threshold": 8}
    with (
        config.patch({"cpu_backend": "triton", "fx_graph_cache": False, "compile_threads": 1, **inlining}),
        torch._functorch.config.patch({"enable_autograd_cache": False}),
        mock.patch.object(triton.runtime.driver, "_active", _Driver(), create=True),
        mock.patch.object(DeviceProperties, "create", return_value=DeviceProperties(**H100)),
        mock.patch.object(AsyncCompile, "triton", lambda _, name, *arguments, **options: Kernel(name)),
    ):
        yield


def launches_of(step: Callable[..., Tensor], *arguments: Tensor) -> tuple[list[Launch], list[Launch]]:
    """Return the launches of the forward and of the backward of a function that returns a loss."""
    torch._dynamo.reset()
    launches: list[Launch] = []
    with _counted(launches):
        loss = torch.compile(step)(*arguments)
        forward = list(launches)
        launches.clear()
        loss.backward()
    return forward, launches
