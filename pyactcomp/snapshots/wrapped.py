"""The pickle or JSON of a snapshot that lies inside another file: a gzip file, or a page of memory_viz.

What is no snapshot is named for what it is.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

# The beginnings of files that people take for snapshots, and what to do with each.
_OTHERS = (
    (b"PK\x03\x04", "a zip archive: unpack it, or write the snapshot with torch.cuda.memory._dump_snapshot"),
    (b"BZh", "compressed by bzip2: unpack it first"),
    (b"\xfd7zXZ", "compressed by xz: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it first"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself: run git lfs pull"),
)
_WRITE = "write a snapshot with torch.cuda.memory._dump_snapshot"
_PIECE = 1 << 20
# Snapshots shrink to a tenth or less; a file that grows by far more is no snapshot, and would fill the disk.
_MOST_GROWTH, _OF_ANY_FILE = 200, 64 << 20
_EMBEDDED = re.compile(rb'"base64":\s*"([A-Za-z0-9+/=]+)"')


@contextmanager
def unwrapped(file: BinaryIO, size: int) -> Iterator[tuple[BinaryIO, int]]:
    """Give the file with the snapshot itself, and its size: ``file``, or a temporary file.

    Raises
    ------
    ValueError
        If the file is cut off, or is another kind of file.
    """
    begin = os.pread(file.fileno(), 64, 0)
    for magic, what in _OTHERS:
        if begin.startswith(magic):
            raise ValueError(f"not a memory snapshot but {what}")
    pieces: Iterable[bytes]
    if begin.startswith(b"\x1f\x8b"):
        pieces = _decompressed(file, max(_OF_ANY_FILE, _MOST_GROWTH * size))
    elif begin.lstrip().startswith(b"<"):
        pieces = _embedded(file)
    else:
        yield file, size
        return
    with tempfile.TemporaryFile() as inner:
        for piece in pieces:
            inner.write(piece)
        inner_size = inner.tell()
        inner.seek(0)
        yield inner, inner_size


def _decompressed(file: BinaryIO, most: int) -> Iterator[bytes]:
    """Yield the content of a gzip file."""
    unpacker = zlib.decompressobj(wbits=31)
    total = 0
    while piece := unpacker.unconsumed_tail or file.read(_PIECE):
        try:
            part = unpacker.decompress(piece, _PIECE)
        except zlib.error as error:
            raise ValueError(f"a gzip file that cannot be unpacked: {error}") from error
        total += len(part)
        if total > most:
            raise ValueError(f"a gzip file of more than {most:,} bytes inside, which no snapshot of its size has")
        yield part
        if unpacker.eof:
            return
    raise ValueError("a gzip file that is cut off: copy it again")


def _embedded(file: BinaryIO) -> Iterable[bytes]:
    """Return the snapshot in a page of torch.cuda._memory_viz."""
    page = file.read()
    found = _EMBEDDED.search(page)
    if found is None:
        kind = "a picture (SVG)" if b"<svg" in page[:4096] else "a web page without a snapshot inside"
        raise ValueError(f"not a memory snapshot but {kind}: {_WRITE}")
    try:
        return [base64.b64decode(found[1], validate=True)]
    except binascii.Error as error:
        raise ValueError(f"a page of memory_viz whose snapshot is cut off ({error}): save the page again") from error
