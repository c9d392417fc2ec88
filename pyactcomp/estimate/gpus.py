"""The GPUs that an estimate knows: memory, instructions, and the context of CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch.nn import Module

from ..engine.offloading import rates_of, reason_without_link, room_on_host
from ..errors import PyactcompError
from ..sizes import bytes_of

GIB = 1 << 30
MIB = 1 << 20

# What large kernels reach of a data sheet's rates.
_REACHED_FLOPS, _REACHED_BYTES = 0.6, 0.85


@dataclass(frozen=True)
class Gpu:
    """A GPU's properties as :func:`torch.cuda.get_device_properties` has them.

    Attributes
    ----------
    name : str
    memory : int
        Bytes that the driver reports in all.
    major, minor : int
        Version of the instructions.
    processors : int
    optin : int
        Shared memory of a block, in bytes.
    tera_half, tera_single : float
        10**12 FLOPs a second of matrix products, as the data sheet has them: of 16-bit elements without sparsity, and
        of float32 without TF32.
    tera_bytes : float
        10**12 bytes a second of the memory, as the data sheet has them.
    giga_link : float
        10**9 bytes a second that copies from and to pinned memory of the host reach, each way: 55 over 16 lanes of PCIe
        of generation 5, measured on an H200; half of it for each generation before.
    context : int
        Bytes that CUDA takes before the first tensor: code of torch's kernels, stacks, tables.
    """

    name: str
    memory: int
    major: int
    minor: int
    processors: int
    optin: int
    tera_half: float
    tera_single: float
    tera_bytes: float
    giga_link: float
    context: int = 520 * MIB

    def flops(self, wide: bool) -> float:
        """Return the FLOPs a second that products of 16-bit elements reach, or of wider ones."""
        return _REACHED_FLOPS * 1e12 * (self.tera_single if wide else self.tera_half)

    @property
    def bandwidth(self) -> float:
        """Bytes a second that kernels reach."""
        return _REACHED_BYTES * 1e12 * self.tera_bytes

    @property
    def link(self) -> float:
        """Bytes a second that copies from and to the host reach."""
        return 1e9 * self.giga_link

    @property
    def workspaces(self) -> tuple[int, int]:
        """Bytes that cuBLAS takes in each thread that multiplies matrices, and cuBLASLt in each that adds a bias.

        torch's defaults for the instructions.
        """
        return 32 * MIB if self.major >= 9 and self.major < 12 else 4096 * 1024 * 2 + 16 * 1024 * 8, MIB

    @property
    def threads(self) -> int:
        """Threads that a processor holds."""
        return 1536 if (self.major, self.minor) in ((8, 6), (8, 9)) else 1024 if self.major == 7 else 2048

    @property
    def properties(self) -> SimpleNamespace:
        """Stand-in for torch's object."""
        return SimpleNamespace(
            name=self.name,
            major=self.major,
            minor=self.minor,
            total_memory=self.memory,
            multi_processor_count=self.processors,
            max_threads_per_multi_processor=self.threads,
            warp_size=32,
            regs_per_multiprocessor=65536,
            shared_memory_per_block_optin=self.optin,
            L2_cache_size=40 * MIB,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName="",
            uuid="phantom",
        )


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", 85_017_755_648, 9, 0, 132, 232_448, 989.0, 67.0, 3.35, 55.0),
    "h200": Gpu("NVIDIA H200", 150_109_880_320, 9, 0, 132, 232_448, 989.0, 67.0, 4.8, 55.0),
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", 42_297_786_368, 8, 0, 108, 166_912, 312.0, 19.5, 1.555, 25.0),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", 85_094_105_088, 8, 0, 108, 166_912, 312.0, 19.5, 2.039, 25.0),
    "4090": Gpu("NVIDIA GeForce RTX 4090", 25_386_352_640, 8, 9, 128, 101_376, 165.0, 82.6, 1.008, 25.0),
    "3090": Gpu("NVIDIA GeForce RTX 3090", 25_298_141_184, 8, 6, 82, 101_376, 71.0, 35.6, 0.936, 25.0),
    "l4": Gpu("NVIDIA L4", 23_659_151_360, 8, 9, 58, 101_376, 121.0, 30.3, 0.3, 25.0),
    "t4": Gpu("Tesla T4", 15_655_829_504, 7, 5, 40, 65_536, 65.0, 8.1, 0.32, 12.0),
}
ALIASES = {"a100": "a100-80", "rtx4090": "4090", "rtx3090": "3090"}


def gpu_named(text: str) -> Gpu:
    """Return a GPU by its name in :data:`GPUS`, or an H100 with as much memory as a size says.

    Raises
    ------
    PyactcompError
        For another text, and for less than 1 GiB.
    """
    key = text.strip().lower()
    known = GPUS.get(ALIASES.get(key, key))
    if known is not None:
        return known
    memory = bytes_of(text)
    if memory is None:
        raise PyactcompError(f"gpu is one of {', '.join(GPUS)}, or a size such as 24GiB; got {text!r}")
    if memory < GIB:
        raise PyactcompError(f"a GPU has at least 1 GiB; got {text!r}")
    h100 = GPUS["h100"]
    return replace(h100, name=text.strip(), memory=memory)


def device_of(model: object) -> torch.device | None:
    """Return the GPU that a model's parameters are on, None for other models and for what is no Module."""
    parameters = model.parameters() if isinstance(model, Module) else iter(())
    return next((each.device for each in parameters if each.is_cuda), None)


def gpu_of(text: str | None, model: object) -> Gpu:
    """Return a GPU by its name or size; without one the GPU that a model is on, or else an H100.

    A GPU that is not in :data:`GPUS` has the rates of the H100: of several choices they tell which takes longer.
    """
    if text is not None:
        return gpu_named(text)
    device = device_of(model)
    if device is None:
        return GPUS["h100"]
    found = torch.cuda.get_device_properties(device)
    known = next((each for each in GPUS.values() if each.name == found.name), GPUS["h100"])
    return replace(
        known,
        name=found.name,
        memory=found.total_memory,
        major=found.major,
        minor=found.minor,
        processors=found.multi_processor_count,
        optin=int(getattr(found, "shared_memory_per_block_optin", known.optin)),
    )


def with_measured_link(gpu: Gpu, model: object) -> Gpu:
    """Return a GPU with the rate of the link that a model's device has; as it is for a model that is on none."""
    device = device_of(model)
    return gpu if device is None else replace(gpu, giga_link=min(rates_of(device)) / 1e9)


def room_of(model: object) -> int | None:
    """Return how many bytes the host of a model's GPU can pin; None for a model that is on none."""
    device = device_of(model)
    return None if device is None else room_on_host(device)


def reason_without_offload(model: object) -> str | None:
    """Return why a Module's stored bytes cannot leave its devices; None if they can, and for other models."""
    places = {each.device for each in model.parameters()} if isinstance(model, Module) else ()
    return next(filter(None, map(reason_without_link, places)), None)
