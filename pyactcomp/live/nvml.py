"""What the driver's management library says of all GPUs and their processes; needs the package ``nvidia-ml-py``."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from ..errors import PyactcompError

INSTALL = "pip install nvidia-ml-py"


@dataclass(frozen=True)
class Process:
    """A process on a GPU; ``bytes`` is None where the driver does not tell."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, with the memory in use and the processes that use it; ``busy`` is in percent."""

    index: int
    name: str
    uuid: str
    used: int
    total: int
    busy: int | None
    processes: tuple[Process, ...]


@functools.cache
def _library() -> Any:
    try:
        library = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise PyactcompError(f"GPUs and their processes are read by nvidia-ml-py; run: {INSTALL}") from None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise PyactcompError(f"there is no NVIDIA driver to ask ({error}): look at nvidia-smi") from None
    return library


def gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of this machine, whatever ``CUDA_VISIBLE_DEVICES`` says.

    Raises
    ------
    PyactcompError
        If nvidia-ml-py is not installed, finds no driver or fails; the message says what to do.
    """
    library = _library()
    try:
        return tuple(_gpu(library, index) for index in range(library.nvmlDeviceGetCount()))
    except library.NVMLError as error:
        raise PyactcompError(f"the driver does not answer ({error}): look at nvidia-smi") from None


def gpu_of(uuid: str) -> Gpu | None:
    """Return the GPU with a UUID, as torch has it, or None if NVML is missing or knows no such GPU."""
    try:
        return next((gpu for gpu in gpus() if gpu.uuid.endswith(uuid)), None)
    except PyactcompError:
        return None


def _gpu(library: Any, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    running = library.nvmlDeviceGetComputeRunningProcesses(handle)
    return Gpu(
        index,
        _text(library.nvmlDeviceGetName(handle)),
        _text(library.nvmlDeviceGetUUID(handle)),
        int(memory.used),
        int(memory.total),
        _or_none(library, lambda: int(library.nvmlDeviceGetUtilizationRates(handle).gpu)),
        tuple(
            Process(
                each.pid,
                _or_none(library, lambda pid=each.pid: _text(library.nvmlSystemGetProcessName(pid))) or "unknown",
                each.usedGpuMemory,
            )
            for each in running
        ),
    )


def _or_none(library: Any, ask: Any) -> Any:
    # Some GPUs, and containers, do not tell.
    try:
        return ask()
    except library.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
