"""Real text on every machine: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_HELD_OUT_ONE_IN = 10


def is_held_out(module: str) -> bool:
    """Return whether a top-level module is kept for validation, by a hash of the name."""
    return zlib.crc32(module.encode()) % _HELD_OUT_ONE_IN == 0


def load(root: Path | None = None) -> tuple[Tensor, Tensor]:
    """Return the training text and the validation text of a folder, by default of the standard library: [n], uint8.

    Whole top-level modules (a package with all its files) go to one side or the other.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    training, validation = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _NOT_LIBRARY.isdisjoint(relative.parts):
            continue
        side = validation if is_held_out(relative.with_suffix("").parts[0]) else training
        side += path.read_bytes()
    if not training or not validation:
        raise RuntimeError(
            f"found {len(training)} bytes of training and {len(validation)} bytes of validation text in {root}, "
            "expected the standard library's source files; use an interpreter that ships them"
        )
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ``count`` random windows of ``length`` bytes, and the next byte of each position: both [count, length]."""
    starts = torch.randint(text.numel() - length, (count, 1), generator=generator)
    drawn = text[starts + torch.arange(length + 1)].to(torch.int64)
    return drawn[:, :-1], drawn[:, 1:]
