"""What the allocator's tests share: allocators on a simulated device, and whose physical memory is whose."""

from __future__ import annotations

import ast
import struct
from pathlib import Path
from typing import Any

from pyactcomp._core import AllocatorConfig, CachingAllocator, SimulatedDevice

KIB = 1 << 10
MIB = 1 << 20
GROWTHS = ("vmm", "malloc")
POOL = (0, 1)


def make(
    growth: str = "malloc", capacity: int | str = "8GiB", **settings: Any
) -> tuple[CachingAllocator, SimulatedDevice]:
    device = SimulatedDevice(capacity)
    return CachingAllocator(device, AllocatorConfig(growth=growth, **settings)), device


def stat(allocator: CachingAllocator, name: str) -> Any:
    return allocator.stats()[name]


def allocated(allocator: CachingAllocator) -> int:
    return int(stat(allocator, "allocated_bytes.all.current"))


def reserved(allocator: CachingAllocator) -> int:
    return int(stat(allocator, "reserved_bytes.all.current"))


def blocks(allocator: CachingAllocator, state: str) -> dict[int, int]:
    """Return address -> size of the blocks in one state."""
    return {
        block["address"]: block["size"]
        for segment in allocator.snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == state
    }


def physical(device: SimulatedDevice, address: int, size: int) -> list[tuple[int, int, int]]:
    """Return the (handle, begin, end) that lie under a range of addresses."""
    found = []
    end = address + size
    while address < end:
        handle, offset, rest = device.physical(address)
        taken = min(rest, end - address)
        found.append((handle, offset, offset + taken))
        address += taken
    return found


def overlap(left: list[tuple[int, int, int]], right: list[tuple[int, int, int]]) -> bool:
    return any(a == b and begin < stop and start < end for a, begin, end in left for b, start, stop in right)


HEADER = ("pid", "nonce", "segment", "segment_size", "begin", "offset", "size")
"""The numbers of a shared block's text; behind them the handles, a footer and the magic."""
PIECE = ("id", "size", "descriptor")


def read_text(text: bytes) -> tuple[dict[str, int], list[dict[str, int]], bytes]:
    """Return the header, the handles and the magic of a text without a prefix."""
    header = dict(zip(HEADER, struct.unpack_from("<q6Q", text), strict=True))
    count = (len(text) - 56 - 12) // 20
    pieces = [dict(zip(PIECE, struct.unpack_from("<QQi", text, 56 + 20 * i), strict=True)) for i in range(count)]
    return header, pieces, text[56 + 20 * count + 12 :]


def write_text(header: dict[str, int], pieces: list[dict[str, int]], magic: bytes) -> bytes:
    """Return a text with a right checksum, FNV-1a."""
    text = struct.pack("<q6Q", *header.values())
    text += b"".join(struct.pack("<QQi", *piece.values()) for piece in pieces) + struct.pack("<I", len(pieces))
    checksum = 0xCBF29CE484222325
    for byte in text:
        checksum = (checksum ^ byte) * 0x100000001B3 % 2**64
    return text + struct.pack("<Q", checksum) + magic


def assert_typed(path: Path, settings: list[str]) -> None:
    """Assert that the stub of AllocatorConfig has the settings, in their order, as arguments and as properties."""
    stub = ast.parse(path.read_text())
    [config] = [node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "AllocatorConfig"]
    functions = [node for node in config.body if isinstance(node, ast.FunctionDef)]
    [init] = [node for node in functions if node.name == "__init__"]
    assert [argument.arg for argument in init.args.args[1:]] == settings
    properties = [
        node.name for node in functions if [ast.unparse(each) for each in node.decorator_list] == ["property"]
    ]
    assert properties == settings
