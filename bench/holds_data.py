"""What the suite `holds` trains on: the source of the installed packages, scikit-learn's digits, and random bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

HELD_OUT = ("fsspec", "jinja2", "mpmath", "networkx")
"""Packages that torch requires, so that they are there wherever torch is; training sees no byte of them."""
PACKAGE_BYTES = 1 << 20
"""Of one package, so that the largest few are not all there is."""
TEXT_BYTES = 32 << 20
DIGITS = Path(__file__).parent / "data" / "digits.npz"
TRAINING_IMAGES = 897
"""The other 900 validate: at an accuracy near 1 the validation images decide how finely it can be told."""
SHIFT = 1.0 / 16
"""Half a pixel of an 8 x 8 image, in widths of the image."""


@dataclass(frozen=True)
class Text:
    """Bytes as uint8 [n]."""

    training: Tensor
    validation: Tensor


@dataclass(frozen=True)
class Images:
    """Images float32 [n, 1, 8, 8] from -1 to 1 and labels int64 [n]."""

    training: Tensor
    training_labels: Tensor
    validation: Tensor
    validation_labels: Tensor


def site_packages() -> Path:
    """Return the folder torch is installed in."""
    return Path(torch.__file__).parent.parent


def read_sources(path: Path, limit: int) -> bytes:
    """Return the first ``limit`` bytes of a package's Python files, in the order of their paths."""
    text = bytearray()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        text += file.read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def installed_sources(folder: Path, limit: int = TEXT_BYTES, package_limit: int = PACKAGE_BYTES) -> Text:
    """Return the sources of the packages in a folder, in the order of their names, and those of the held-out ones.

    Raises
    ------
    ModuleNotFoundError
        If a held-out package is not there.
    """
    if missing := [name for name in HELD_OUT if not (folder / name).is_dir()]:
        raise ModuleNotFoundError(f"{folder} has no {', '.join(missing)}, whose source validates")
    held_out = [read_sources(folder / name, package_limit) for name in HELD_OUT]
    training: list[bytes] = []
    left = limit
    for path in sorted(folder.iterdir()):
        if path.name in HELD_OUT or not (path.is_dir() or path.suffix == ".py"):
            continue
        if left and (text := read_sources(path, min(package_limit, left))):
            training.append(text)
            left -= len(text)
    return Text(_bytes(b"".join(training)), _bytes(b"".join(held_out)))


def random_sequences(count: int, length: int) -> Tensor:
    """Return random bytes int64 [count, length]; each row starts with a byte of its own, so that it can be known."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(256, (count, length), generator=generator)
    sequences[:, 0] = torch.randperm(256, generator=generator)[:count]
    return sequences


def digits() -> Images:
    """Return the digits, split by a fixed permutation."""
    import numpy

    with numpy.load(DIGITS) as file:
        images = torch.from_numpy(file["images"]).float().div(8).sub(1).unsqueeze(1)
        labels = torch.from_numpy(file["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, validation = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    return Images(images[training], labels[training], images[validation], labels[validation])


def render(images: Tensor, transforms: Tensor, side: int) -> Tensor:
    """Return the images [n, 1, side, side], scaled up bilinearly under affine transforms [n, 2, 3]."""
    grid = F.affine_grid(transforms, [len(images), 1, side, side], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def random_transforms(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return transforms [*shape, 2, 3] that turn by up to 12 degrees, scale by 10 % and shift by an eighth."""
    angle, scale, across, down = torch.rand((4, *shape), generator=generator) * 2 - 1
    angle, scale = angle * math.radians(12), 1 + 0.1 * scale
    rows = (scale * angle.cos(), -scale * angle.sin(), across / 4, scale * angle.sin(), scale * angle.cos(), down / 4)
    return torch.stack(rows, dim=-1).unflatten(-1, (2, 3))


def shifted_views(images: Tensor, side: int) -> Tensor:
    """Return each image as it is, then each shifted by half a source pixel to the four sides: [5 n, 1, side, side]."""
    views = []
    for across, down in ((0, 0), (SHIFT, 0), (-SHIFT, 0), (0, SHIFT), (0, -SHIFT)):
        transform = torch.tensor([[1.0, 0.0, 2 * across], [0.0, 1.0, 2 * down]])
        views.append(render(images, transform.expand(len(images), 2, 3), side))
    return torch.cat(views)
