"""The hooks around one checkpointed block: they store the block's inputs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..readers.lookup import CHECKPOINT, CHECKPOINTED, of_no_operator
from ..torch_private import never_traced
from . import saved
from .frame import Frame
from .packing import Packing


class InputsFrame(Frame):
    """The hooks of one call of a checkpoint function.

    The block's own saved tensors never come here: torch.utils.checkpoint opens hooks of its own for the block. What a
    checkpoint function saves besides, or a block that it runs without checkpointing, is stored as without this frame.

    Attributes
    ----------
    inputs, others : int
        How many inputs of the block, and how many other tensors, were saved under the hooks.
    """

    __slots__ = ("_pack_other", "inputs", "others")

    def __init__(self, packing: Packing, around: Frame | None) -> None:
        self._pack_other: Callable[[Tensor], Any] = saved.Kept if around is None else around.pair()[0]
        self.inputs = self.others = 0
        super().__init__(packing, None, None if around is None else around.recorder)

    def pair(self) -> tuple[Any, Any]:
        """Return the pack and the unpack hook."""
        return self._pack_saved, saved.library().unpack

    @never_traced
    def _pack_saved(self, tensor: Tensor) -> Any:
        """Pack an input of the block here, any other tensor as the hooks around do."""
        if of_no_operator() not in (CHECKPOINT, CHECKPOINTED):
            self.others += 1
            return self._pack_other(tensor)
        self.inputs += 1
        return self.hooks.pack(tensor)
