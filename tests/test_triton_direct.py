"""The launch of compiled kernels: the function in C gets what Triton's public launch gives it, hooks aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyactcomp.codec.kernels import triton as kernels

pytest.importorskip("triton")

import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

from pyactcomp.codec.kernels.triton_direct import direct

FUNCTION, METADATA, STREAM = 0xF00, (4, 1, 0), 77
ARGUMENTS = 0xA0, 0xB0, 12, 0.5, True, 64


class _Launcher:
    """Triton's object that launches one kernel: how releases call the function in C."""

    def __init__(self, launch: Callable[..., object], scratch: int = 0) -> None:
        self.launch, self.scratch = launch, scratch


class Of34(_Launcher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: object) -> None:
        memory = x * y * z * self.scratch if self.scratch > 0 else None
        self.launch(x, y, z, stream, function, False, False, memory, *args)


class Of35(_Launcher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: object) -> None:
        memory = x * y * z * self.scratch if self.scratch > 0 else None
        self.launch(x, y, z, stream, function, False, False, memory, None, *args)


class Of37(_Launcher):
    def __call__(  # as Triton names them
        self, x: int, y: int, z: int, stream: int, function: int, kernel: object, info: object, enter: object,
        leave: object, *args: object,
    ) -> None:  # fmt: skip
        memory = x * y * z * self.scratch if self.scratch > 0 else None
        self.launch(
            x, y, z, stream, function, False, False, kernel, info, enter, leave, memory, None, [], b"PPif", args
        )


class Elsewhere(_Launcher):
    """A release to come, in which the function takes its stream first."""

    def __call__(self, x: int, y: int, z: int, stream: int, *args: object) -> None:
        self.launch(stream, x, y, z, *args)


class Installed(_Launcher):
    """The release in use, without its driver."""

    def __new__(cls, launch: Callable[..., object], scratch: int = 0) -> Any:
        made = object.__new__(CudaLauncher)
        vars(made).update(dict.fromkeys(("num_ctas", "global_scratch_align", "profile_scratch_align"), 1))
        vars(made).update(
            dict.fromkeys(("profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "gsan_enabled"), 0)
        )
        vars(made).update(launch=launch, global_scratch_size=scratch, arg_annotations=[], kernel_signature=b"PPif")
        return made


def compiled_by(launcher: Any) -> Any:
    """Return a compiled kernel that is loaded, with a launcher."""
    kernel = object.__new__(CompiledKernel)
    state = {"module": 1, "function": FUNCTION, "packed_metadata": METADATA, "src": None, "name": "kernel"}
    vars(kernel).update(state, run=launcher, _run=launcher)
    return kernel


@pytest.mark.parametrize("release", [Of34, Of35, Of37, Installed])
def test_the_function_in_c_gets_what_the_public_launch_gives(release: Any) -> None:
    calls: list[tuple[object, ...]] = []
    kernel = compiled_by(release(lambda *given: calls.append(given)))
    launch = direct(kernel)
    assert launch is not None
    assert not calls
    launch.function(5, 1, 1, STREAM, *launch.fixed, *((ARGUMENTS,) if launch.packs else ARGUMENTS))
    kernel.run(5, 1, 1, STREAM, FUNCTION, METADATA, None, None, None, *ARGUMENTS)
    kernel[5, 1, 1](*ARGUMENTS, stream=STREAM)
    assert calls[0] == calls[1]
    # The public launch differs in the hooks, empty chains of them, and in what they would be told.
    differing = [now for now, public in zip(calls[0], calls[2], strict=True) if now != public]
    assert differing in ([], [None] * 3)


@pytest.mark.parametrize(
    ("release", "scratch"), [(Elsewhere, 0), (Of34, 16), (Of35, 16), (Of37, 16), (Installed, 16), (object, 0)]
)
def test_a_kernel_that_needs_more_or_an_unknown_release_is_left_to_triton(release: Any, scratch: int) -> None:
    launcher = release() if release is object else release(lambda *_: None, scratch)
    assert direct(compiled_by(launcher)) is None


def test_a_release_whose_hooks_are_elsewhere_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compiled_by(Installed(lambda *_: None))
    monkeypatch.delattr(triton, "knobs")
    assert direct(kernel) is None


class Kernel:
    """A kernel compiled at its first launch: counts compilations, and launches that did not go past Triton."""

    def __init__(self) -> None:
        self.compiled: list[tuple[object, ...]] = []
        self.launched: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: object, **_: object) -> Any:
            self.compiled.append((grid, *arguments))
            return compiled_by(Installed(lambda *given: self.launched.append(given)))

        return launch


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> kernels.Launcher:
    """Return a launcher of a stand-in for a kernel, which takes CPU tensors for those of a GPU."""
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "current_cuda_device", lambda: -1)
    monkeypatch.setattr(kernels, "current_raw_stream", lambda _: STREAM)
    made = kernels.Launcher(Kernel(), (64,), 4, torch.device("cpu"))
    made._index, made._indices = -1, {-1}  # what CPU tensors give for the index of their GPU
    return made


def pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


def test_kernels_are_compiled_for_dtypes_and_alignments_and_launched_directly(launcher: kernels.Launcher) -> None:
    kernel: Any = launcher._kernel
    x, y = torch.zeros(64), torch.zeros(64, dtype=torch.uint8)
    for tensors in ((x, y), (x, y), (x, y[1:]), (x[4:], y[1:]), (x, y.to(torch.int16)), (x[1:], y), (x[4:], y[16:])):
        launcher(3, tensors, (12,))
    assert [tuple(map(type, given[1:3])) for given in kernel.compiled] == [(Tensor, Tensor)] * 4
    assert [given[3:] for given in kernel.compiled] == [(12, 64)] * 4
    direct_launches = (x, y), (x[4:], y[1:]), (x[4:], y[16:])
    assert [given[:4] for given in kernel.launched] == [(3, 1, 1, STREAM)] * 3
    arguments = [given[-1] if isinstance(given[-1], tuple) else given[-4:] for given in kernel.launched]
    assert arguments == [(*pointers(*each), 12, 64) for each in direct_launches]


def test_hooks_of_a_profiler_see_every_launch(launcher: kernels.Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    kernel: Any = launcher._kernel
    x = torch.zeros(64)
    launcher(1, (x,), ())
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            chain = getattr(triton.knobs.runtime, hook)
            if hasattr(chain, "calls"):
                patch.setattr(chain, "calls", [seen.append])
            else:
                patch.setattr(triton.knobs.runtime, hook, seen.append)
            launcher(1, (x,), ())
    launcher(1, (x,), ())
    # The function in C calls the hooks that it is given, with what it is given for them.
    hooks = [[given for given in call if callable(given)] for call in kernel.launched]
    assert len(hooks) == 3
    assert len(hooks[0]) == len(hooks[1]) > 0
    assert hooks[2] == []


def test_tensors_on_another_device_are_refused(launcher: kernels.Launcher) -> None:
    launcher._indices = {0}
    with pytest.raises(ValueError, match="expected all tensors on cuda:-1, got some on cpu, meta"):
        launcher(1, (torch.zeros(1, device="meta"), torch.zeros(1)), ())
    launcher(0, (torch.zeros(1, device="meta"),), ())
    kernel: Any = launcher._kernel
    assert not kernel.compiled
