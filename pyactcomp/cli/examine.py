"""Examine this machine: the working parts of pyactcomp, the failing parts, and the remedies."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from typing import Any

import torch

from .. import codec, offload
from .._version import __version__
from ..codec import reference
from ..errors import PyactcompError
from ..torch_private import extensions
from ..torch_private import tests as torch_private_tests

# Native device of each implementation; without CUDA, Triton can still be tested in the interpreter.
_IMPLEMENTATIONS = {"reference": "cpu", "cpu": "cpu", "cuda": "cuda", "triton": "cuda"}

# A partial last group, and more groups than one block of threads packs.
_TEST_NUMEL = 64 * 1024 + 37


def examine() -> dict[str, Any]:
    """Examine the machine: versions, devices, implementations, and the private names of torch in use.

    Runs a few small kernels on every available implementation; on a machine with a GPU this creates a CUDA context.

    Returns
    -------
    dict
        ``versions``: name to version or None; ``devices``: a list of ``device``, ``name``, ``memory_bytes``, ``link``;
        ``implementations``: name to ``device``, ``unavailable_reason`` and ``self_test``, each None or a
        sentence (``self_test`` is None if the test passed or could not run); ``allocator``: ``unavailable_reason``,
        ``torch_subclass`` and ``settings``, each None or a sentence (why the subclass is not there, the error in
        the environment's settings), and ``variable``, the state of ``PYACTCOMP_ALLOCATOR``; ``observer``: None or
        why the observer is not there;
        ``torch_private``: name to None or the deviation; ``problems``: a sentence for every failure.

    Examples
    --------
    >>> examined = examine()
    >>> examined["implementations"]["reference"]["unavailable_reason"] is None
    True
    """
    devices = _devices()
    implementations = {name: _implementation(name, device) for name, device in _IMPLEMENTATIONS.items()}
    allocator = _allocator()
    private = torch_private_tests.self_test()
    observer = _library("_observer")
    problems = [
        f"{name}: {entry['self_test']}" for name, entry in implementations.items() if entry["self_test"] is not None
    ]
    problems += _lost("_observer", observer)
    # A torch without CUDA has no allocator to subclass.
    subclass = allocator["torch_subclass"] if torch.version.cuda is not None else None
    problems += [f"the allocator: {lost}" for lost in _lost("_torch_allocator", subclass)]
    problems += [f"the allocator's settings: {allocator['settings']}"] if allocator["settings"] else []
    if allocator["variable"] and allocator["variable"]["problem"]:
        problems.append(f"PYACTCOMP_ALLOCATOR has no effect: {allocator['variable']['problem']}")
    problems += [f"torch's {name}: {wrong}" for name, wrong in private.items() if wrong is not None]
    for device in devices:
        if codec.resolve("auto", torch.device(device["device"])) == "reference":
            problems.append(
                f"{device['device']}: only the slow reference implementation serves it; the reasons stand under "
                "the implementations"
            )
    return {
        "versions": _versions(),
        "devices": devices,
        "implementations": implementations,
        "allocator": allocator,
        "observer": observer,
        "torch_private": private,
        "problems": problems,
    }


def _library(name: str) -> str | None:
    """Return None if a library loads, otherwise the reason and what will happen or what to do."""
    reason = extensions.load(name)[1]
    if reason is None:
        return None
    lacking = _lacking(name)
    first_use = f"; the first use compiles it, in about {extensions.LIBRARIES[name].duration}"
    return reason + (first_use if lacking is None else f". It cannot be compiled here: {lacking}")


def _lacking(name: str) -> str | None:
    """Return what is missing to compile a library, and what to install, or None."""
    try:
        if name == "_torch_allocator":
            from ..allocator.build import cuda_headers

            cuda_headers()
        extensions.compile_command(name)
    except PyactcompError as missing:
        return str(missing)
    return None


def _lost(name: str, reason: str | None) -> list[str]:
    """Return what a missing library costs, unless the first use compiles the library."""
    if reason is None or _lacking(name) is None:
        return []
    return [f"{reason}; {extensions.LIBRARIES[name].price}"]


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "pyactcomp": __version__,
        "torch": str(torch.__version__),
        "torch's CUDA": torch.version.cuda,
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else None,
    }


def _devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "name": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "memory_bytes": None,
            "link": None,
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": f"{properties.name}, sm_{properties.major}{properties.minor}",
                "memory_bytes": properties.total_memory,
                "link": _link(torch.device("cuda", index)),
            }
        )
    return devices


def _link(device: torch.device) -> str:
    """Return the rates of a GPU's link to the host, or why offload cannot use it."""
    try:
        rates = offload.link(device)
        remote = offload.is_remote(device)
    except PyactcompError as error:
        return str(error)
    far = "; no CPU of this process is near the GPU: bind the process to the GPU's NUMA node" if remote else ""
    return f"{rates.to_host / 1e9:.0f} GB/s to the host, {rates.to_device / 1e9:.0f} back{far}"


def _implementation(name: str, device_type: str) -> dict[str, str | None]:
    device = torch.device(device_type if torch.cuda.is_available() else "cpu")
    reason = codec.unavailable_reason(name, device)
    return {
        "device": str(device),
        "unavailable_reason": reason,
        "self_test": _self_test(name, device) if reason is None else None,
    }


def _allocator() -> dict[str, Any]:
    try:
        from ..allocator import attach, settings, variable
    except ImportError as error:
        reason = f"the native module pyactcomp._core does not load ({error}); reinstall pyactcomp"
        return {"unavailable_reason": reason, "torch_subclass": None, "settings": None, "variable": None}
    malformed = None
    try:
        settings.from_environment()
    except ValueError as error:
        malformed = str(error)
    return {
        "unavailable_reason": attach.unavailable_reason(),
        "torch_subclass": _library("_torch_allocator"),
        "settings": malformed,
        "variable": variable.state(),
    }


def _self_test(name: str, device: torch.device) -> str | None:
    """Return None if the implementation's bytes are the reference's, otherwise the difference."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_TEST_NUMEL, generator=generator)
    values[5], values[500] = float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        source = values.to(dtype)
        try:
            packed = codec.quantize(source.to(device), impl=name)  # type: ignore[arg-type]
            restored = codec.dequantize(packed, impl=name)  # type: ignore[arg-type]
        except Exception as error:  # A diagnosis reports every kind of failure.
            return f"raised {type(error).__name__}: {error}"
        expected = reference.quantize(source)
        if not torch.equal(packed.buffer.cpu(), expected):
            return f"packs {dtype} into other bytes than the reference; reinstall pyactcomp, or report this"
        expected_values = reference.dequantize(expected, _TEST_NUMEL, dtype=dtype)
        if not torch.equal(restored.cpu().view(torch.uint8), expected_values.view(torch.uint8)):
            return f"restores {dtype} to other values than the reference; reinstall pyactcomp, or report this"
    return None
