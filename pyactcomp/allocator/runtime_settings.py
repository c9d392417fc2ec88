"""Settings of a running allocator: every text that ``torch.cuda.memory._set_allocator_settings`` takes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping

import torch

from .. import _core, torch_private
from .._core import AllocatorConfig

_WITHOUT_EFFECT = AllocatorConfig.foreign() | {
    "expandable_segments": "the allocator keeps the growth that it was enabled with, and under growth='vmm' all memory "
    "grows as expandable segments do, whichever value is set"
}
"""PyTorch's keys without an effect here, and the reason for each."""

_OWN = {key for row in AllocatorConfig.settings().values() for key in row["keys"]} - {"expandable_segments"}


def attach(given: AllocatorConfig) -> None:
    """Let torch's function change this allocator's settings; ``given`` is what the allocator was enabled with."""
    setter_of_torch = torch_private.allocator_settings_setter()
    told: set[str] = set()

    def set_settings(text: str) -> None:
        own, foreign = split(text)
        running = [_core.runtime_existing(index) for index in range(torch.cuda.device_count())]
        config = changed(_core.runtime_config(), own, given)
        # Each device may have a memory fraction of its own.
        configs = [(device, changed(device.config, own, given)) for device in running if device is not None]
        setter_of_torch(",".join(entry for _, entry in foreign if entry))
        _core.runtime_configure(config)
        for device, of_device in configs:
            device.configure(of_device)
        for key, _ in foreign:
            if key in _WITHOUT_EFFECT and key not in told:
                told.add(key)
                warnings.warn(
                    f"PyTorch's setting '{key}' has no effect on pyactcomp's allocator: {_WITHOUT_EFFECT[key]}",
                    stacklevel=3,  # torch.cuda.memory's caller
                )

    torch_private.replace_entry_points({"_accelerator_setAllocatorSettings": set_settings})


def changed(current: AllocatorConfig, own: Mapping[str, str], given: AllocatorConfig) -> AllocatorConfig:
    """Return ``current`` after the entries of a text.

    As in PyTorch, three settings return to their first value, that of ``given``, where no entry names them.
    """
    base = current.replace(
        max_split_size=None,
        roundup_power2_divisions=given.roundup_power2_divisions,
        garbage_collection_threshold=given.garbage_collection_threshold,
    )
    config = AllocatorConfig.parse(",".join(own.values()), base)
    if "growth" in own and AllocatorConfig.parse(own["growth"]).growth != given.growth:
        raise ValueError(f"growth cannot change while the allocator runs, and is '{given.growth}'; got {own['growth']}")
    if given.max_split_size is not None and not {"max_split_size", "max_split_size_mb"} & own.keys():
        config = config.replace(max_split_size=max(given.max_split_size, config.large_segment_size))
    return config


def split(text: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the entries of a text that are this allocator's, the last of each key, and those for torch, with keys.

    The tokens are PyTorch's: white space counts nowhere, and any token may stand for a colon or a comma.
    """
    tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"[ \t\n\v\f\r]", "", text))
    own: dict[str, str] = {}
    foreign: list[tuple[str, str]] = []
    at = 0
    while at < len(tokens):
        key, end = tokens[at], at + 3
        if tokens[at + 2 : end] == ["["]:
            while end < len(tokens) and tokens[end - 1] != "]":
                end += 1
        entry, value = "".join(tokens[at:end]), tokens[at + 2 : end]
        if key in _OWN:
            own[key] = f"{key}:{_READ.get(key, ''.join)(value)}"
        elif key == "expandable_segments":
            # Set False in torch: no part of torch may take this allocator's memory for torch's expandable segments.
            foreign.append((key, re.sub("True$", "False", entry)))
        else:
            # The check for "native" in torch would find the name of this allocator.
            foreign.append((key, "" if entry == "backend:native" else entry))
        at = end + 1
    return own, foreign


# PyTorch reads a number up to the first character that belongs to none, so that 512MB is 512. Each function returns the
# value for AllocatorConfig.parse, and a value that is no number as it is.


def _whole(token: str) -> int | None:
    number = re.match(r"([+-]?)0*([0-9]+)", token)
    # int() raises for thousands of digits, and 2^64 has 20.
    if number is None or len(number[2]) > 20 or int(number[2]) >= 1 << 64:
        return None
    return int(number[1] + number[2]) % (1 << 64)  # a negative number wraps around


def _mebibytes(value: list[str]) -> str:
    number = _whole("".join(value))
    return "".join(value) if number is None else str(min(number, (1 << 44) - 1))


def _even_mebibytes(value: list[str]) -> str:
    """Return an even number of MiB: PyTorch's, up to the most that this allocator takes."""
    number = _whole("".join(value))
    return "".join(value) if number is None else str(min(number + number % 2, (1 << 36) - 2))


def _power_of_two(token: str, largest: int) -> str:
    number = _whole(token)
    return token if number is None else str(min(number, largest) if number & (number - 1) == 0 else number)


def _share(value: list[str]) -> str:
    token = "".join(value)
    number = re.match(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", token)
    binary = re.match(r"[+-]?0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)([pP][+-]?[0-9]+)?", token)
    if binary is not None:
        try:
            return repr(float.fromhex(binary[0]))
        except (OverflowError, ValueError):  # beyond a float, in either direction
            return token
    return token if number is None else repr(float(number[0]))


def _divisions(value: list[str]) -> str:
    most = 1 << 31
    if len(value) == 1:
        return _power_of_two(value[0], most)
    if value[-1:] != ["]"]:
        return "".join(value)
    intervals = []
    at = 1
    while at < len(value) - 1:
        boundary, count = value[at], "".join(value[at + 2 : at + 3])
        intervals.append(f"{_power_of_two(boundary, most)}:{_power_of_two(count, most)}")
        at += 3 if value[at + 3 : at + 4] == ["]"] else 4
    return f"[{','.join(intervals)}]" if intervals else "0"


_READ: dict[str, Callable[[list[str]], str]] = {
    "max_split_size_mb": _mebibytes,
    "max_non_split_rounding_mb": _mebibytes,
    "large_segment_size_mb": _even_mebibytes,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _share,
    "per_process_memory_fraction": _share,
}
"""The keys that PyTorch has too."""
