"""The bytes that each value costs if saved, for torch's min-cut and its knapsack."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from ..config import Config
from ..readers.forms import BFLOAT16, CODES, RELATIVE, STANDARDIZED, Form
from .joint import Joint, is_elementwise, name_of, nbytes, value
from .uses import Uses

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Costs:
    """Sizes of a joint graph's values as they would be stored.

    The readers of a value are the nodes that run in backward, and the elementwise operators of the forward, which the
    cut may run again.
    """

    def __init__(self, joint: fx.GraphModule, known: Joint, config: Config, uses: Uses) -> None:
        self.joint, self.known, self.config, self.uses = joint, known, config, uses
        self.readers = known.backward | {node.name for node in joint.graph.nodes if is_elementwise(node)}
        self.run_again(())

    def run_again(self, nodes: Collection[fx.Node]) -> None:
        """Count the operands of these nodes of the forward as read by backward too."""
        readers = self.readers | {node.name for node in nodes}
        self.needs = self.uses(self.joint.graph, self.known.tangent, readers)

    def total(self, saved: Collection[fx.Node]) -> int:
        """Return the bytes of saved values, parameters and other inputs that live anyway aside."""
        inputs = self.known.static | self.known.kept_inputs
        return sum(self(n, nbytes(t)) for n in saved if n.name not in inputs and (t := value(n)) is not None)

    def __call__(self, node: fx.Node, size: int) -> int:
        """Return the bytes of a node that takes ``size`` bytes as it is."""
        tensor = value(node)
        if tensor is None or size < self.config.min_bytes:
            return size
        if tensor.dtype is torch.bool:
            return size // 8
        inner = node.op == "placeholder" and node.name in self.known.static | self.known.kept_inputs
        if self.config.mode == "lossless" or tensor.dtype not in FLOATS or inner:
            return size
        if node.name not in self.known.learns or node.name not in self.known.data or node.name not in self.needs:
            return size
        elements, found = size // tensor.element_size(), self.needs[node.name]
        # Torch multiplies a size by 1.1 for each step away from the backward: count wide values as larger, so that of a
        # value and its cast the narrow one is saved.
        wide = 1 + 0.06 * (tensor.element_size() - 2)
        if found.need <= CODES or found.form is STANDARDIZED:
            return int(elements * (1 + 4 / self.config.group_size) * wide)
        if found.need != RELATIVE:
            return size
        # Torch doubles the size of what the forward does not write; where it writes the 16 bits anyway, count half.
        return int(elements * (1 if _is_written_in_halves(node, found.form) else 2) * wide)


def _is_written_in_halves(node: fx.Node, form: Form) -> bool:
    """Return whether the forward writes the 16 bits of a float32 value anyway, as softmax's result for a product."""
    if form is not BFLOAT16:
        return False
    casts = [value(user) for user in node.users if name_of(user) == "convert_element_type"]
    return any(cast is not None and cast.dtype is torch.bfloat16 for cast in casts)
