"""The one configuration object behind ``compress``, ``compressed`` and ``verify``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from .codec import IMPLS, ROUNDINGS, Impl, Rounding
from .codec import format as fmt
from .errors import check_choice, check_integer

Mode = Literal["int8", "lossless"]
OnConflict = Literal["raise", "skip"]
Exactness = Literal["exact", "int8"]
Skip = str | type[torch.nn.Module]

MODES: tuple[Mode, ...] = ("int8", "lossless")

# Below this a launch costs more than the memory is worth, and the statistics of normalisation layers (mean and
# reciprocal deviation, one number a row: 64 KiB at 16,384 tokens) stay exact.
MIN_BYTES = 128 * 1024


@dataclass(frozen=True, kw_only=True)
class Config:
    """How saved tensors are compressed.

    Parameters
    ----------
    mode : {"int8", "lossless"}
        The form of a floating-point tensor that backward cannot compute again: 8-bit codes, or itself. Either way
        duplicates are stored once, outputs of cheap operators whose operands are stored are computed again in
        backward, and booleans take a bit.
    fuse : bool
        Run modules for which there is a fused function through it; in lossless mode only where the results are the
        same to the bit.
    fuse_head : bool
        Compute the loss of a Hugging Face language model from its last hidden states in chunks, so that the logits
        of a whole batch never exist; the output's ``logits`` are then None, in training only.
    group_size : {64, 128, 256}
        Elements that share a minimum and a step: 8.5, 8.25 or 8.125 bits an element.
    rounding : {"nearest", "stochastic"}
        Stochastic rounding is unbiased and about 1.4 times noisier.
    seed : int
        Seed of the stochastic rounding, from 0 to 2**64 - 1.
    min_bytes : int
        Smaller tensors are kept as they are.
    skip : sequence of str or module types
        Modules, by qualified name or by type, inside which nothing is compressed.
    impl : {"auto", "cuda", "triton", "cpu", "reference"}
        Implementation; a named one never falls back.
    unknown : {"exact", "int8"}
        How to store the tensors of an operator that is not in the table of readers
        (:func:`pyactcomp.register_reader` adds a row): as they are, or in codes on the chance that codes are enough.
    attention : {"exact", "int8"}
        How to store the queries and keys of scaled_dot_product_attention and of fused window attention, from which
        backward computes the probabilities again: in 16 bits, or in codes. Codes put an error on the gradients of q
        and k that grows with the logits: 1 % where the largest is 5, 4 % at 20, 13 % at 80.
    keep_weight_copies : bool
        Keep autocast's low-precision copies of the parameters, as torch does, instead of casting again in
        backward. Needed where an optimizer changes parameters between forward and backward.
    on_conflict : {"raise", "skip"}
        Raise, or step aside, where another pair of saved-tensor hooks is active, which ours would silence.

    Raises
    ------
    TypeError, ValueError
        For a value that is not one of these, and for ``fuse_head`` in lossless mode.
    """

    mode: Mode = "int8"
    fuse: bool = True
    fuse_head: bool = False
    group_size: int = 64
    rounding: Rounding = "nearest"
    seed: int = 0
    min_bytes: int = MIN_BYTES
    skip: Iterable[Skip] = ()
    impl: Impl = "auto"
    unknown: Exactness = "exact"
    attention: Exactness = "exact"
    keep_weight_copies: bool = False
    on_conflict: OnConflict = "raise"

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
        ):
            check_choice(name, value, allowed)
        if self.fuse_head and self.mode == "lossless":
            raise ValueError(
                "fuse_head=True sums in another order, so that mode='lossless' cannot have it: leave one out"
            )
        check_integer("seed", self.seed, 2**64)
        check_integer("min_bytes", self.min_bytes, 2**63)
        object.__setattr__(self, "skip", _skip_tuple(self.skip))


def _skip_tuple(skip: object) -> tuple[Skip, ...]:
    if isinstance(skip, (str, type)) or not isinstance(skip, Iterable):
        raise TypeError(f"skip must be a sequence of module names and types, got {skip!r}; write skip=[{skip!r}]")
    items = tuple(skip)
    for item in items:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, torch.nn.Module)):
            raise TypeError(f"skip takes module names and torch.nn.Module types, got {item!r}")
    return items
