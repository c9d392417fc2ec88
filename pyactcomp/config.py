"""The configuration shared by ``compress``, ``compressed`` and ``verify``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict, cast

import torch

from .codec import IMPLS, ROUNDINGS, Impl, Rounding
from .codec import format as fmt
from .errors import check_choice, check_integer, check_tile
from .sizes import bytes_of

Mode = Literal["int8", "lossless"]
OnConflict = Literal["raise", "skip"]
Exactness = Literal["exact", "int8"]
Skip = str | type[torch.nn.Module]
Tile = int | Literal["auto"] | None

# Bits of a code. In lossless mode they hold for ``unknown="int8"`` and ``attention="int8"``, which ask for codes.
_BITS: dict[Mode, int] = {"int8": 8, "lossless": 8}
MODES = tuple(_BITS)

# Below 128 KiB a kernel launch costs more than the memory is worth. Statistics of normalisation layers (mean and
# reciprocal deviation, one number a row: 64 KiB at 16,384 tokens) stay exact too.
MIN_BYTES = 128 * 1024


class Former(TypedDict, total=False):
    """Options that ``compress``, ``compressed`` and ``verify`` take for this release alone, each with a warning."""

    impl: Impl
    rounding: Rounding
    seed: int
    on_conflict: OnConflict
    unknown: Exactness


_INSTEAD = {
    "impl": "to debug kernels, set PYACTCOMP_IMPL in the environment",
    "rounding": "leave it out; functional.Codes and codec.quantize still round stochastically",
    "seed": "leave it out, as rounding",
    "unknown": "pyactcomp.register_reader says of one operator what its backward needs",
    "on_conflict": "open the other hooks inside the model, or catch pyactcomp.HookConflictError",
}


def warn_of_former(function: str, options: Mapping[str, object]) -> None:
    """Warn of each option that goes with the next release; raise TypeError for others, and for a budget."""
    if "budget" in options:
        budget = options["budget"]
        raise TypeError(
            f"{function} takes no budget, got budget={budget!r}: a step's peak depends on its batch, so a plan runs "
            "the step first. Give the plan, with loss= if the model does not return its loss: "
            f"pyactcomp.compress(model, plan=pyactcomp.plan(model, batch, budget={budget!r}))"
        )
    for name in options:
        if name not in _INSTEAD:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        warnings.warn(
            f"{function}({name}=...) goes with the next release: {_INSTEAD[name]}", DeprecationWarning, stacklevel=3
        )


def _impl_of_environment() -> Impl:
    impl = os.environ.get("PYACTCOMP_IMPL", "auto")
    check_choice("PYACTCOMP_IMPL", impl, IMPLS)
    return cast("Impl", impl)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How saved tensors are compressed.

    Parameters
    ----------
    mode, fuse, fuse_head, tile, group_size, min_bytes, skip, attention, keep_weight_copies, compile_blocks, offload
        As in :func:`pyactcomp.compress`.
    rounding : {"nearest", "stochastic"}
        Stochastic rounding is unbiased and about 1.4 times noisier.
    seed : int
        Seed of the stochastic rounding, from 0 to 2**64 - 1.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation of the kernels, by default that of ``PYACTCOMP_IMPL`` in the environment, else ``"auto"``, which
        alone falls back to another.
    unknown : {"exact", "int8"}
        How to store the tensors of an operator missing from the table of readers
        (:func:`pyactcomp.register_reader` adds a row): unchanged, or in codes, which may not be exact enough.
    on_conflict : {"raise", "skip"}
        Raise, or step aside, if another pair of saved-tensor hooks is active: ours would silence the other pair.

    Raises
    ------
    TypeError, ValueError
        For a value outside of the choices above, for ``fuse_head`` in lossless mode, and for ``compile_blocks`` with
        ``rounding`` or ``impl`` of which the compiler has no use.
    """

    mode: Mode = "int8"
    fuse: bool = True
    fuse_head: bool = False
    tile: Tile = "auto"
    group_size: int = 64
    rounding: Rounding = "nearest"
    seed: int = 0
    min_bytes: int = MIN_BYTES
    skip: Iterable[Skip] = ()
    impl: Impl = field(default_factory=_impl_of_environment)
    unknown: Exactness = "exact"
    attention: Exactness = "exact"
    keep_weight_copies: bool = False
    on_conflict: OnConflict = "raise"
    compile_blocks: bool = False
    offload: bool | float | str = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, MODES),
            ("group_size", self.group_size, fmt.GROUP_SIZES),
            ("rounding", self.rounding, ROUNDINGS),
            ("impl", self.impl, IMPLS),
            ("on_conflict", self.on_conflict, ("raise", "skip")),
            ("unknown", self.unknown, ("exact", "int8")),
            ("attention", self.attention, ("exact", "int8")),
            ("fuse", self.fuse, (True, False)),
            ("fuse_head", self.fuse_head, (True, False)),
            ("keep_weight_copies", self.keep_weight_copies, (True, False)),
            ("compile_blocks", self.compile_blocks, (True, False)),
        ):
            check_choice(name, value, allowed)
        if self.fuse_head and self.mode == "lossless":
            raise ValueError(
                "fuse_head=True sums in another order than torch, so it cannot be lossless: drop fuse_head=True or "
                "mode='lossless'"
            )
        if self.compile_blocks and self.rounding != "nearest":
            raise ValueError(
                f"compile_blocks=True rounds to nearest in the compiled blocks: drop compile_blocks=True or "
                f"rounding={self.rounding!r}"
            )
        if self.compile_blocks and self.impl != "auto":
            raise ValueError(
                f"compile_blocks=True leaves the kernels of the blocks to the compiler: drop compile_blocks=True or "
                f"impl={self.impl!r}"
            )
        check_tile(self.tile)
        check_offload(self.offload)
        check_integer("seed", self.seed, 2**64)
        check_integer("min_bytes", self.min_bytes, 2**63)
        object.__setattr__(self, "skip", _skip_tuple(self.skip))

    @property
    def bits(self) -> int:
        """Bits of a code, in lossless mode of the codes that ``unknown`` and ``attention`` ask for."""
        return _BITS[self.mode]


SMALLEST_HOST = 64 << 20
"""The least host memory that ``offload`` may name: what stays on the device in any case, the smallest window."""

_OFFLOADS = "False, 'auto', a share of the stored bytes from 0 to 1, or a size of host memory such as '12GiB'"


def check_offload(offload: object) -> None:
    """Raise unless ``offload`` is False, "auto", a share or a size above zero."""
    if offload is True:
        raise ValueError(f"offload must be {_OFFLOADS}, got True: offload=1.0 moves everything")
    if isinstance(offload, str):
        if offload != "auto" and not bytes_of(offload):
            raise ValueError(f"offload must be {_OFFLOADS}, got {offload!r}")
        if (bytes_of(offload) or SMALLEST_HOST) < SMALLEST_HOST:
            raise ValueError(
                f"offload={offload!r} is less than the {SMALLEST_HOST >> 20} MiB of stored bytes that stay on the "
                "device in any case, so nothing is won: give the host memory of some layers, such as offload='12GiB'"
            )
    elif not isinstance(offload, (int, float)):
        raise TypeError(f"offload must be {_OFFLOADS}, got {offload!r}")
    elif not 0 <= offload <= 1:
        raise ValueError(f"offload must be {_OFFLOADS}, got {offload!r}")


def share_of(offload: float | str) -> float:
    """Return the share of the stored bytes that an ``offload`` lets go at first."""
    return 1.0 if isinstance(offload, str) else float(offload)


def _skip_tuple(skip: object) -> tuple[Skip, ...]:
    if isinstance(skip, (str, type)) or not isinstance(skip, Iterable):
        raise TypeError(f"skip must be a sequence of module names and types, got {skip!r}; write skip=[{skip!r}]")
    items = tuple(skip)
    for item in items:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, torch.nn.Module)):
            raise TypeError(f"skip takes module names and torch.nn.Module types, got {item!r}")
    return items


class Options(Former, total=False):
    """The options of ``compress``, for functions that pass them on: their types, and their names in an editor."""

    mode: Mode
    fuse: bool
    fuse_head: bool
    tile: Tile
    group_size: int
    min_bytes: int
    skip: Iterable[Skip]
    attention: Exactness
    keep_weight_copies: bool
    compile_blocks: bool
    offload: bool | float | str
