"""The rule: which form a saved tensor takes, from its reader, its maker, its reader's other operand and its layout.

Eight bits are for operands of layers. Codes have one absolute error for a whole group of elements. That does no harm to
the input of a layer, whose gradient sums over many elements; it does where a small element gets a large gradient, as in
losses and in algebra between activations. So an operand takes codes only if it is a layer's by construction, and 16
bits or more everywhere else.

The hooks of an eager forward find the maker and the partner in C++: ``maker_of`` in ``csrc/observer/nodes.hpp`` says
how far it follows the graph. Compiled graphs read them from the graph. Both use the tables below.
"""

from __future__ import annotations

import enum
import functools
import math
import re

from ..codec.layouts import Layout, spans_rows
from .forms import AS_CODES, BFLOAT16, GAINED, ITSELF, SCALED, Form, Reading, Use


class Maker(enum.IntEnum):
    """What made an operand; views, casts, copies and multiples by a number aside."""

    OTHER = 0
    LAYER = 1  # a product with a parameter, a norm, a lookup, attention
    RESIDUAL = 2  # a sum of layers' results
    GATE = 3  # an activation of a layer's result; a sigmoid, tanh or softmax of anything
    RECTIFIED = 4  # a ReLU of a layer's result
    LOGARITHM = 5  # also a sum or difference with one
    EXPONENTIAL = 6
    MASKED = 7  # elements were replaced by a number, or a constant tensor was added
    GAINED = 8  # a norm with a weight, a product with a parameter of several numbers; a bias aside


LAYERS = frozenset((Maker.LAYER, Maker.RESIDUAL, Maker.GATE, Maker.RECTIFIED, Maker.GAINED))
GATES = frozenset((Maker.GATE, Maker.RECTIFIED))


class Partner(enum.IntEnum):
    """What the running operator multiplies an operand by."""

    NOTHING = 0  # or a tensor without a gradient
    ITSELF = 1  # also a multiple of the same operator's result
    GAIN = 2  # a parameter with one number for many elements, as of a norm or of a layer scale
    PARAMETER = 3  # a leaf; also a view or a cast of one, or ``1 + leaf``
    STATISTIC = 4  # an activation with one number for many elements
    GATE = 5
    LAYER = 6
    LOGARITHM = 7
    OTHER = 8


class Kind(enum.IntEnum):
    """What an operator does, as far as the maker of its result depends on it."""

    OTHER = 0
    VIEW = 1
    MOVES = 2  # the result holds elements of the first operand
    SCALES = 3  # a product or quotient: a multiple if the second operand is a number, a gate, or a gain
    SUM = 4
    DIFFERENCE = 5
    PRODUCT = 6  # a layer if one factor is a parameter or a softmax
    BIASED_PRODUCT = 7  # the first operand is added
    ACTIVATES = 8  # a layer's result stays one
    RECTIFIES = 9
    LAYER = 10
    BOUNDS = 11
    SOFTMAX = 12
    LOGARITHM = 13
    EXPONENTIAL = 14
    MASKS = 15
    INVERTS_ROOT = 16  # a product with it is a norm's result


_KINDS = {
    Kind.VIEW: "t transpose view unsafe_view reshape_alias permute unsqueeze squeeze expand alias slice select split "
    "unbind as_strided",
    Kind.MOVES: "to_copy clone copy split_with_sizes index index_select gather cat stack roll repeat unfold flip neg "
    "weight_norm_interface constant_pad_nd upsample_nearest2d upsample_bilinear2d avg_pool2d max_pool2d_with_indices",
    Kind.SCALES: "mul div",
    Kind.SUM: "add",
    Kind.DIFFERENCE: "sub",
    Kind.PRODUCT: "mm bmm grouped_mm convolution mkldnn_convolution cudnn_convolution",
    Kind.BIASED_PRODUCT: "addmm baddbmm",
    Kind.ACTIVATES: "silu gelu mish elu leaky_relu softplus native_dropout hardswish hardsigmoid",
    Kind.RECTIFIES: "relu",
    Kind.LAYER: "native_layer_norm native_batch_norm cudnn_batch_norm native_group_norm fused_rms_norm embedding "
    "scaled_dot_product_flash_attention_for_cpu scaled_dot_product_flash_attention "
    "scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention",
    Kind.INVERTS_ROOT: "rsqrt",
    Kind.BOUNDS: "sigmoid tanh",
    Kind.SOFTMAX: "softmax safe_softmax",
    Kind.LOGARITHM: "log_softmax log log2 log10 logsumexp logcumsumexp logaddexp digamma lgamma",
    Kind.EXPONENTIAL: "exp exp2 expm1 sinh cosh cumprod reciprocal",
    Kind.MASKS: "masked_fill where index_fill",
}
KINDS = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""What operators do, by name without leading underscores; of all others nothing is known."""

FUNCTION_KINDS = {
    f"pyactcomp.functional.{name}": kind
    for kind, names in {
        Kind.LAYER: "norms.add_rms_norm._AddRmsNorm norms.rms_norm._RmsNorm "
        "norms.layer_norm._LayerNorm convolutional.batch_norm._BatchNorm "
        "windows.window_attention._WindowAttention activations.gated.silu_mul._SiluMul "
        "activations.gated.gated_mlp._GatedMLP",
        Kind.MOVES: "attention.rope._Rope windows.take_rows._TakeRows convolutional.max_pool._MaxPool",
        Kind.ACTIVATES: "activations.gelu.gelu._Gelu activations.gelu.new_gelu._NewGelu",
        Kind.SUM: "windows.residual_add._ResidualAdd",
    }.items()
    for name in names.split()
} | {
    "deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3": Kind.LAYER,
    "torch.nn.modules._functions.BackwardHookFunction": Kind.MOVES,
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction": Kind.MOVES,
}
"""What autograd functions in Python do, by class; of all others nothing is known but by ``register_reader``."""

_NODE = re.compile(r"(\w+?)Backward\d*")
_BY_NODE = {name.replace("_", ""): kind for name, kind in KINDS.items()}
_OWN_NODES = {
    f"torch::autograd::CppNode<pac::functions::{name}>": kind
    for kind, names in ((Kind.ACTIVATES, "Dropout Gelu"), (Kind.LAYER, "Norm BatchNorm"))
    for name in names.split()
}
"""What this package's autograd functions in C++ do (csrc/functions)."""


@functools.lru_cache(maxsize=4096)
def kind_of_node(name: str) -> Kind:
    """Return what the operator of an autograd node does, by the node's name."""
    match = _NODE.fullmatch(name)
    return _OWN_NODES.get(name, Kind.OTHER) if match is None else _BY_NODE.get(match[1].lower(), Kind.OTHER)


# Batches of vectors, or of sequences of vectors, have at most three dimensions. Images have more, and so have the
# queries and keys of attention written out, [batch, heads, tokens, width].
_VECTORS = 3
_SHORT = 16
SCATTERED = 4
"""A norm over fewer elements keeps its input. Two elements are often nearly equal, and the norm divides by their
difference: one pair of normal elements in a hundred differs by less than a hundredth of itself, and bfloat16, which
rounds 1 in 512, moves the gradient of such a pair by a fifth."""
_UNEVEN = (Maker.LOGARITHM, Maker.EXPONENTIAL)


def form(reading: Reading, maker: Maker, partner: Partner, layout: Layout, group_size: int) -> Form:
    """Return the form in which an operand is exact enough for its reader.

    Parameters
    ----------
    reading : Reading
        How the running operator reads the operand, from the table.
    maker : Maker
    partner : Partner
    layout : Layout
        Of the operand: codes of a group share a scale, so a group should lie within one row.
    group_size : int
    """
    use, (shape, stride, _) = reading.use, layout
    numel, last = math.prod(shape), shape[-1] if shape else 1
    # Less than one group: codes save next to nothing, and no sum averages out their errors.
    few = numel < group_size
    # Groups are runs of memory: each lies within one row only if rows are contiguous and whole groups long.
    groups_lie_in_rows = not few and not spans_rows(last, group_size) and stride[-1] == 1
    many_dims = len(shape) > _VECTORS
    if use is None:
        return BFLOAT16 if few and reading.form is AS_CODES and reading.known else reading.form
    if use is Use.MATRIX:
        # A column of a ReLU's results may be all zeros: codes would give the other factor a gradient there that should
        # be zero. In rows of under 16 elements a group spans many rows, which may differ by orders of magnitude.
        layer = maker in LAYERS and maker is not Maker.RECTIFIED and partner is not Partner.ITSELF
        has_parameter = partner in (Partner.NOTHING, Partner.GAIN, Partner.PARAMETER)
        takes_codes = (layer or has_parameter) and (last >= _SHORT or many_dims)
    elif use is Use.FACTOR:
        layer = maker in LAYERS
        # Beside a logarithm, the gradients of a probability and of its score cancel.
        if maker is Maker.LOGARITHM or (partner is Partner.LOGARITHM and not layer):
            return ITSELF
        gated = maker in GATES and partner is Partner.OTHER
        unproven = partner in (Partner.ITSELF, Partner.LOGARITHM, Partner.OTHER)
        takes_codes = layer and (groups_lie_in_rows or many_dims) and (gated or not unproven)
    elif use is Use.SQUARE:
        takes_codes = maker in (Maker.RESIDUAL, Maker.RECTIFIED)
    elif use is Use.HEADS:
        # Sums over fewer elements than a group do not average the errors of codes, and their differences are small.
        return SCALED if few or last < group_size else AS_CODES
    elif use is Use.CHANNELS:
        # The stride of a channel tells whether groups lie within channels, which may be orders of magnitude apart.
        takes_codes = len(shape) > 2 and stride[1] == math.prod(shape[2:]) and stride[1] % group_size == 0
        # A statistic of a group norm may be of one channel of one sample, of a batch norm it is of all samples.
        statistics = shape[1] * (shape[0] if "group_norm" in reading.operator else 1)
        if not takes_codes and (few or numel < SCATTERED * statistics):
            return ITSELF
    else:
        if use is Use.INPUT and maker in (Maker.MASKED, *_UNEVEN):
            return ITSELF
        if use is Use.ROWS and (few or last < SCATTERED):
            return ITSELF
        takes_codes = groups_lie_in_rows or (use is Use.INPUT and many_dims)
    if not takes_codes or few:
        return BFLOAT16
    # A few gains may be a hundred times the others: codes of a group would round all columns in steps of the largest.
    return GAINED if maker is Maker.GAINED and use in (Use.MATRIX, Use.FACTOR) else AS_CODES
