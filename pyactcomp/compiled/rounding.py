"""Float32 values that the forward reads in 16 bits: packing reads their bfloat16, half of the bytes.

Under autocast a norm computes in float32, and its result is cast for a product. Written for the packing kernel alone,
the normalized rows take 4 bytes an element to write and 4 to read, 0.9 % of a step of GPT-2 medium's sizes. Rounded,
an element is off by 2**-8 of it at most, as is the product's operand.
"""

from __future__ import annotations

import torch
from torch import fx

from .joint import CASTS, VIEWS, Joint, name_of, value

# Views, and operators that move elements, as the roll of a shifted window.
_MOVES = (VIEWS - CASTS) | {"index", "gather", "index_select", "roll", "flip"}


def is_read_in_halves(node: fx.Node, known: Joint) -> bool:
    """Return whether all that the forward computes from a value are products, cast to 16 bits in the end.

    Normalized rows may have a bias too. Another sum may be a difference: where a mean is subtracted, of data or from a
    buffer, the rounding of a large operand counts beside the deviation.
    """
    tensor = value(node)
    if tensor is None or tensor.dtype is not torch.float32:
        return False
    cast, normalized = False, _is_normalized(node, known)
    waiting, seen = [node], {node}
    while waiting:
        read = waiting.pop()
        for user in read.users:
            name, result = name_of(user), value(user)
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if result is not None and name in CASTS:
                if result.dtype not in (torch.bfloat16, torch.float16):
                    return False
                cast = True
            elif name in _MOVES | {"mul"} or (normalized and name == "add" and _is_of_one_value(user, known)):
                waiting.append(user)
            else:
                return False
    return cast


def _is_normalized(node: fx.Node, known: Joint) -> bool:
    """Return whether a value is a product with one factor for each row, which depends on the data."""
    result = value(node)
    if name_of(node) != "mul" or result is None or not result.dim() or result.shape[-1] == 1:
        return False
    factors = [value(operand) for operand in node.all_input_nodes if operand.name in known.data]
    return any(factor is not None and factor.dim() and factor.shape[-1] == 1 for factor in factors)


def _is_of_one_value(node: fx.Node, known: Joint) -> bool:
    """Return whether a sum has one operand that depends on more than parameters."""
    return sum(operand.name in known.data for operand in node.all_input_nodes) == 1
