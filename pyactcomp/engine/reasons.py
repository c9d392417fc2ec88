"""Why saved tensors are kept, as reports say it; ``Hooks::reason_to_keep`` (csrc/engine) decides."""

from __future__ import annotations

PARAMETER = "parameter or buffer, alive anyway"
LEAF = "leaf that requires grad, alive anyway"
SMALL = "smaller than min_bytes"
FEW = "fewer than four elements: the error of one would be that of the gradient"
NARROW = "16 bits already"  # and the reason of the reader, which needs no more
SKIPPED = "inside a skipped module"
NESTED = "nested tensor, kept exact"
OTHER_LAYOUT = "copy of a parameter, written to or in another memory layout, kept"
RECAST = "autocast copy of a parameter, cast again in backward"
# Additive attention masks, log-sum-exps, rotary tables, copies of frozen weights, the model's inputs: few, often alive
# anyway, and sensitive to errors. Half a step is small beside a group's range, but a mask's range is the dtype's.
NO_GRAD = "does not require grad: a mask, a statistic, a constant or an input, kept exact"
RECOMPUTED = "recomputed in backward from stored tensors"
SAME_CAST = "another cast of the same tensor is stored"
SHAPE_ALONE = "backward reads only the shape"
HELD = "kept as it is for another reader of the same memory"
LOSSLESS = "lossless: stored as it is"
OVERLAPPING = "elements overlap in memory"
NEGATIVE_VIEW = "lazy negation"

# Reasons under which no memory is held for a tensor: backward recomputes the tensor or reads another stored one.
HOLDS_NOTHING = frozenset({RECAST, RECOMPUTED, SAME_CAST, SHAPE_ALONE})
# Reasons under which a saved tensor costs no memory even without compression.
ALIVE_ANYWAY = frozenset({PARAMETER, LEAF})
