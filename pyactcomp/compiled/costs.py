"""The bytes that each value costs if saved, for torch's min-cut and its knapsack."""

from __future__ import annotations

import torch
from torch import fx

from ..config import Config
from ..readers.forms import CODES, RELATIVE
from .divisors import Behind
from .joint import Joint, value
from .needs import needs

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Costs:
    """Sizes of a joint graph's values as they would be stored.

    Only readers that run in backward anyway count: whether an operator of the forward runs again is for the cut to say.
    """

    def __init__(self, joint: fx.GraphModule, known: Joint, config: Config, behind: Behind) -> None:
        self.known, self.config = known, config
        self.needs = needs(joint.graph, known.tangent, known.data, config, known.backward, behind=behind)

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
        elements, need = size // tensor.element_size(), self.needs[node.name].reading.need
        # Torch's weight grows by 1.1 with each step away from the backward: of a value and its cast, the narrow one.
        wide = 1 + 0.06 * (tensor.element_size() - 2)
        if need <= CODES:
            return int(elements * (1 + 4 / self.config.group_size) * wide)
        return int(elements * 2 * wide) if need == RELATIVE else size
