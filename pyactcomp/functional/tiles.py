"""Tiles of rows: how many rows a function takes at a time, and sums of products over tiles."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Tile = int | Literal["auto"] | None

# The widest tensor of one tile: 4096 rows of 32000 bfloat16 logits, or 9362 rows of an MLP of 14336. Smaller tiles mean
# more products, and each reads and writes the whole sum for a weight; larger ones raise the peak. By estimate, at
# 256 MiB the sums cost 0.5 ms of the 10 ms that the head of a Llama of 1 B parameters takes, and 4 % of the backward of
# an MLP of 4096 by 14336.
TILE_BYTES = 2**28
# The rows of a tile are a multiple of a matrix product's tile.
ROWS = 128


def equal_tiles(count: int, row_bytes: int) -> int:
    """Return the rows of a tile: the fewest tiles within TILE_BYTES, all of about the same size."""
    tiles = max(-(-count * row_bytes // TILE_BYTES), 1)
    return max(-(-count // (tiles * ROWS)) * ROWS, 1)


def rows_of(tile: Tile, count: int, row_bytes: int) -> int | None:
    """Return the rows of a tile of an MLP, or None if all rows are one.

    ``"auto"`` makes tiles where a tensor of all rows would take more than two of them: 512 MiB, of which backward holds
    three at once without tiles.
    """
    if tile == "auto":
        return equal_tiles(count, row_bytes) if count * row_bytes > 2 * TILE_BYTES else None
    return None if tile is None or tile >= count else tile


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a.T @ b`` to ``total`` without rounding the product to the dtype of the factors."""
    if a.dtype is total.dtype:
        total.addmm_(a.t(), b)
    elif a.is_cuda:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.t().to(total.dtype), b.to(total.dtype))
