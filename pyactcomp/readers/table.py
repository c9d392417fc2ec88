"""The table of readers: how exactly backward needs each operand saved by each operator.

The reader of a saved tensor is the operator that saves the tensor. The reader's derivative decides how exact the saved
values must be, so the table names operators and operands as torch's derivative formulas do (``derivatives.yaml``). An
operand is an argument's name, or ``result`` for a tensor that shares memory with no argument. Operators and operands
missing here are exact.

Longer than 400 lines: one table, to be read and searched in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..torch_private.functions import CLAMP_DROPS_BOUNDS
from .forms import (
    ARTANH,
    AS_CODES,
    AS_SHAPE,
    BFLOAT16,
    BITS,
    ITSELF,
    LOG,
    LOG_PROBABILITY,
    POSITIVE,
    PROBABILITY,
    SCALED,
    Comparison,
    Form,
    Reading,
    Use,
)


class _Group:
    """Table entries with one form or use and one reason; each entry is "operator operand operand ..."."""

    def __init__(self, how: Form | Use, why: str, *entries: str) -> None:
        self.how, self.why, self.entries = how, why, entries


_ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
SOLUTIONS = (
    *("linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "_linalg_eigh", "_linalg_svd", "_linalg_solve_ex"),
    *("linalg_cholesky_ex", "linalg_eig", "linalg_householder_product", "linalg_lstsq", "linalg_lu", "linalg_qr"),
    *("linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp", "linalg_pinv", "linalg_solve_triangular"),
    *("cholesky", "cholesky_inverse", "cholesky_solve", "ormqr", "triangular_solve"),
)
"""Solutions of linear equations and decompositions: all operands and results are exact."""

_MULTIPLIED = "the derivative multiplies the incoming gradient by it"
_SQUARED = "the derivative is a low power of it, and the gradient may be zero at the largest elements"
_RATIO = "the derivative divides by it or takes the log or a power of it, so relative precision counts"

_GROUPS = (
    _Group(
        Use.FACTOR,
        "the derivative multiplies the incoming gradient by it, and the gradient may be zero at the largest elements",
        *("mul self other", "addcmul tensor1 tensor2", "lerp self end weight"),
    ),
    _Group(
        Use.ROWS,
        "the derivative divides by the deviation of each row, so errors count relative to the row's own range",
        *("native_layer_norm input", "_fused_rms_norm input"),
    ),
    _Group(
        Use.CHANNELS,
        "the derivative divides by the deviation of each channel, or of some channels of a sample, so errors count "
        "relative to the channel's own range",
        *("native_group_norm input", "native_batch_norm input", "cudnn_batch_norm input", "miopen_batch_norm input"),
        *("_native_batch_norm_legit input", "_native_batch_norm_legit_no_training input"),
        *("_batch_norm_with_update input", "_batch_norm_no_update input"),
    ),
    _Group(
        Use.MATRIX,
        _MULTIPLIED,
        *("mm self mat2", "bmm self mat2", "addmm mat1 mat2", "baddbmm batch1 batch2", "addbmm batch1 batch2"),
        *("mv self vec", "addmv mat vec", "addr vec1 vec2", "dot self tensor", "vdot self other"),
        *("matmul self other", "linear input weight", "mkldnn_linear self weight", "_trilinear i1 i2 i3"),
        *("_grouped_mm self mat2", "conv_tbc self weight", "_sparse_addmm mat2"),
        *("convolution input weight", "_convolution input weight", "convolution_overrideable input weight"),
        *("cudnn_convolution self weight", "cudnn_convolution_transpose self weight"),
        *("mkldnn_convolution self weight", "miopen_convolution self weight"),
        *("miopen_convolution_transpose self weight", "miopen_depthwise_convolution self weight"),
        *("_mps_convolution self weight", "_mps_convolution_transpose self weight"),
        *("_conv_depthwise2d self weight", "conv_depthwise3d self weight", "_slow_conv2d_forward self weight"),
        *("_nnpack_spatial_convolution input weight", "slow_conv3d_forward self weight"),
        *("slow_conv_dilated2d self weight", "slow_conv_dilated3d self weight"),
        *("slow_conv_transpose2d self weight", "slow_conv_transpose3d self weight"),
        *("grid_sampler_2d input", "grid_sampler_3d input", "cudnn_grid_sampler self"),
        *("_grid_sampler_2d_cpu_fallback input", "mkldnn_rnn_layer input", "_cudnn_rnn input"),
    ),
    _Group(AS_CODES, "the derivative is a smooth bounded function of it", "gelu self", "silu self", "mish self"),
    _Group(Use.SQUARE, _SQUARED, "var self", "var_mean self", "std self", "std_mean self"),
    _Group(POSITIVE, "the derivative reads only where it is above zero", "relu result"),
    _Group(
        SCALED,
        "attention recomputes probabilities from it: an absolute error of a score is a relative error of a probability",
        *(f"{attention} query key" for attention in _ATTENTIONS),
    ),
    _Group(
        Use.HEADS,
        "the derivative multiplies the incoming gradient by it, and takes the difference of two such sums over a head",
        *(f"{attention} value result" for attention in _ATTENTIONS),
    ),
    _Group(
        LOG,
        "the derivative takes the exponential of it: at a low loss the gradient is as small as the error of codes",
        *("log_sigmoid_forward self", "binary_cross_entropy_with_logits self", "softplus self"),
        "soft_margin_loss self",
    ),
    _Group(
        LOG_PROBABILITY,
        "the derivative takes the difference between the exponential of it and a target, which may be small",
        *("_log_softmax result", "_sparse_log_softmax result"),
    ),
    _Group(
        PROBABILITY,
        "the derivative takes the difference between it and one, which may be small",
        *("sigmoid result", "binary_cross_entropy self"),
    ),
    _Group(
        PROBABILITY,
        "the derivative is small where it is near zero or one, and a following log or division amplifies both",
        *("_softmax result", "_safe_softmax result", "_masked_softmax result"),
    ),
    _Group(ARTANH, "the derivative takes the difference between its square and one, which may be small", "tanh result"),
    _Group(
        ITSELF,
        "where one share is nearly the whole, the gradients of dividend and divisor, or of log and exponent, cancel",
        *("exp result", "exp2 result", "pow.Scalar exponent result", "div self other", "addcdiv tensor1 tensor2"),
        *("log self", "log2 self", "log10 self"),
    ),
    _Group(
        ITSELF,
        "the derivative is a difference of two products, which cancel where vectors are nearly parallel",
        "linalg_cross",
    ),
    _Group(
        BFLOAT16,
        "a sigmoid that saturates passes a gradient only where its operand is small, beside the largest of a group",
        "glu self",
    ),
    _Group(
        BFLOAT16,
        _RATIO,
        *("sqrt result", "reciprocal result", "tan result", "asinh self", "atan self", "erf self"),
        *("xlogy.Tensor self", "xlogy.Scalar_Other self"),
    ),
    _Group(
        BFLOAT16,
        "the derivative reads its sign, which rounding to 16 bits keeps, and is smooth otherwise",
        *("elu self", "celu self", "_prelu_kernel self", "rrelu_with_noise self", "abs self"),
    ),
    _Group(
        AS_SHAPE,
        "backward reads only the shape",
        *("nll_loss_forward self", "nll_loss2d_forward self", "_adaptive_avg_pool2d self", "avg_pool2d self"),
        *("_adaptive_avg_pool3d self", "avg_pool3d self", "reflection_pad1d self", "reflection_pad2d self"),
        *("reflection_pad3d self", "replication_pad1d self", "replication_pad2d self", "replication_pad3d self"),
        *("max_pool2d_with_indices self", "max_pool3d_with_indices self", "adaptive_max_pool2d self"),
        *("adaptive_max_pool3d self", "fractional_max_pool2d self", "fractional_max_pool3d self"),
        *("masked_select self", "gather self", "take self", "index_add source", "index_copy source", "put source"),
        "_fft_r2c self",
    ),
    _Group(
        ITSELF,
        "backward compares it with another saved value",
        *("amax", "amin", "aminmax", "max", "min", "median", "nanmedian", "maximum", "minimum", "fmax", "fmin"),
        *("scatter_reduce", "index_reduce", "segment_reduce", "clamp.Tensor", "clamp_min.Tensor", "clamp_max.Tensor"),
        *("kthvalue", "cummax", "cummin", "multi_margin_loss", "multilabel_margin_loss_forward"),
    ),
    _Group(
        ITSELF,
        "the derivative jumps or bends where it crosses a bound, and depends on its value besides",
        *("hardswish", "copysign", "nan_to_num", "nansum", "nextafter", "fmod", "remainder", "rrelu_with_noise"),
        "rrelu_with_noise_functional",
    ),
    _Group(
        ITSELF,
        "the derivative depends on its direction, which rounding turns where it is small",
        *("sgn", "angle", "hypot"),
    ),
    _Group(
        ITSELF,
        "the operator saves indices and masks: integers are kept, and booleans take one bit",
        *("embedding", "index", "index_put", "index_select", "index_fill", "scatter", "scatter_add", "where"),
        *("masked_fill", "masked_scatter", "max_unpool2d", "max_unpool3d", "mode", "sort", "topk"),
        *("native_dropout", "_fused_dropout", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
        *("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "_pack_padded_sequence"),
        *("fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask"),
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    ),
    _Group(
        ITSELF,
        "the derivative takes the difference of two saved values, which is small at a small loss",
        *("mse_loss", "smooth_l1_loss", "huber_loss", "dist", "_cdist_forward", "_euclidean_dist", "_pdist_forward"),
        *(
            "elu result",
            "celu result",
            "logsumexp",
            "logaddexp",
            "logaddexp2",
            "logcumsumexp",
            "expm1",
            "log1p",
            "atan2",
            "special_log_ndtr",
        ),
    ),
    _Group(
        ITSELF,
        "the derivative divides by it or grows without bound, so 16 bits are not enough",
        *("prod", "cumprod", "asin", "acos", "acosh", "atanh", "erfinv", "logit", "lgamma", "digamma", "polygamma"),
        *("mvlgamma", "sinh", "cosh", "sinc", "erfc", "igamma", "igammac", "i0", "renorm", "xlogy", "ldexp"),
        *(
            "_standard_gamma",
            "pow.Tensor_Tensor",
            "_sparse_softmax",
            "polar",
            "frexp",
            "special_xlog1py",
        ),
        *("special_entr", "special_i0e", "special_i1", "special_i1e", "special_erfcx", "special_ndtri", "special_zeta"),
    ),
    _Group(
        ITSELF,
        "the derivative is a sine or cosine of it, and an argument without bound has an error without bound",
        *("sin", "cos"),
    ),
    _Group(
        ITSELF,
        "a coordinate for a lookup: a small error reads another place",
        *("grid_sampler_2d grid", "grid_sampler_3d grid", "cudnn_grid_sampler grid"),
    ),
    _Group(
        ITSELF,
        "a statistic, one number for many elements",
        *("rsqrt result", "native_layer_norm result", "native_group_norm result", "_fused_rms_norm result"),
        *("native_batch_norm result", "cudnn_batch_norm result", "std result", "std_mean result"),
    ),
    _Group(
        ITSELF,
        "a solution of linear equations or a decomposition amplifies errors by its condition number",
        *SOLUTIONS,
    ),
    _Group(
        ITSELF,
        "recurrent kernels recompute from the saved gates and states",
        *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "miopen_rnn", "_lstm_mps"),
    ),
    _Group(
        ITSELF,
        "not tested with fewer bits, so it is kept exact",
        *("_ctc_loss", "_cudnn_ctc_loss", "miopen_ctc_loss", "_embedding_bag", "_fused_moving_avg_obs_fq_helper"),
        *("_fake_quantize_learnable_per_channel_affine", "_fake_quantize_learnable_per_tensor_affine"),
        *("_weight_norm_interface", "_sparse_mm_reduce_impl", "_sparse_sparse_matmul", "sparse_sampled_addmm"),
        *("_sparse_sum", "_to_dense", "to_mkldnn", "mkldnn_adaptive_avg_pool2d", "mkldnn_max_pool2d", "complex"),
        *(
            "mkldnn_max_pool3d",
            "max_pool2d",
            "values",
            "values_copy",
            "_nested_from_padded",
            "to_padded_tensor",
            "linalg_vector_norm",
        ),
        *("_nested_get_values", "_nested_get_values_copy", "_nested_tensor_from_tensor_list", "sparse_mask"),
        *("_sparse_coo_tensor_with_dims_and_tensors", "sparse_compressed_tensor"),
    ),
)


def _bits(relation: Any, low: float, high: float, yes: float, no: float) -> tuple[Form, str]:
    return Form(
        "1 bit", BITS, Comparison(relation, low, high, yes, no)
    ), "the derivative reads only on which side of a bound it is"


def _number(value: object, default: float) -> float | None:
    """Return a scalar argument as float, ``default`` if it is None, or None if it is not a real number."""
    if value is None:
        return default
    return float(value) if isinstance(value, (int, float)) else None


_NO_BOUNDS = "its bounds are not plain numbers"
_POWER_CODES = 4
_POWER_RELATIVE = 8


def _power(scalars: Mapping[int, object]) -> tuple[Form | Use, str]:
    exponent = _number(scalars.get(1), math.nan)
    if exponent is None or math.isnan(exponent) or abs(exponent) > _POWER_RELATIVE:
        return ITSELF, "the derivative is a high power of it"
    if exponent == int(exponent) and 0 <= exponent <= _POWER_CODES:
        return Use.SQUARE, _SQUARED
    return BFLOAT16, _RATIO


def _norm(scalars: Mapping[int, object]) -> tuple[Form | Use, str]:
    if scalars.get(1, 2) == 2:
        return Use.SQUARE, _SQUARED
    return ITSELF, "the derivative of this norm compares or divides"


def _between(low: int | None, high: int | None) -> Callable[[Mapping[int, object]], tuple[Form, str]]:
    """Return the decision for a clamp: one bit for "within the bounds"; ``low`` and ``high`` are argument positions."""

    def decide(scalars: Mapping[int, object]) -> tuple[Form, str]:
        given = [None if position is None else scalars.get(position) for position in (low, high)]
        bottom, top = _number(given[0], -math.inf), _number(given[1], math.inf)
        if bottom is None or top is None or bottom > top:
            return ITSELF, _NO_BOUNDS
        if CLAMP_DROPS_BOUNDS:
            infinite = any(
                number is not None and math.isinf(bound) for number, bound in zip(given, (bottom, top), strict=True)
            )
            return (ITSELF, _NO_BOUNDS) if infinite else _strictly_between(bottom, top)
        # NaN stands for "outside": any comparison with NaN is false.
        return _bits("within", bottom, top, bottom if math.isfinite(bottom) else min(top, 0.0), math.nan)

    return decide


def _strictly_between(low: float, high: float) -> tuple[Form, str]:
    """Return the decision for a clamp whose derivative is zero at a bound; an infinite one stands for none."""
    if math.isinf(high) and math.isfinite(low):
        return _bits("above", low, high, math.inf, math.nan)
    if math.isinf(low) and math.isfinite(high):
        return _bits("below", low, high, -math.inf, math.nan)
    # The value in the middle is between the bounds in any dtype in which they are not neighbours.
    if math.isfinite(high - low) and high - low > _NEIGHBOURS * max(abs(low), abs(high)):
        return _bits("between", low, high, low + (high - low) / 2, math.nan)
    return ITSELF, _NO_BOUNDS


# Two bfloat16 are less apart, in parts of the larger.
_NEIGHBOURS = 2**-6


def _hardtanh(scalars: Mapping[int, object]) -> tuple[Form, str]:
    low, high = _number(scalars.get(1), -1.0), _number(scalars.get(2), 1.0)
    if low is None or high is None or not math.isfinite(high - low) or low >= high:
        return ITSELF, _NO_BOUNDS
    return _bits("not outside", low, high, (low + high) / 2, high)


def _threshold(scalars: Mapping[int, object]) -> tuple[Form, str]:
    bound = _number(scalars.get(1), math.nan)
    if bound is None or not math.isfinite(bound):
        return ITSELF, _NO_BOUNDS
    return _bits("not below", bound, math.inf, math.inf, bound)


def _shrink(scalars: Mapping[int, object]) -> tuple[Form, str]:
    bound = _number(scalars.get(1), 0.5)
    if bound is None or not math.isfinite(bound) or bound < 0:
        return ITSELF, _NO_BOUNDS
    return _bits("within", -bound, bound, 0.0, math.inf)


NOT_DROPPED = "mask of a dropout that may not be in training mode, kept: the node does not tell"


def _dropout(scalars: Mapping[int, object]) -> tuple[Form, str]:
    return ITSELF, "a mask takes one bit" if scalars.get(2) is True else NOT_DROPPED


_BY_SCALARS: dict[str, tuple[str, Callable[[Mapping[int, object]], tuple[Form | Use, str]]]] = {
    "pow.Tensor_Scalar": ("self", _power),
    "native_dropout": ("result", _dropout),
    "linalg_vector_norm": ("self", _norm),
    "norm": ("self", _norm),
    "hardtanh": ("self", _hardtanh),
    "clamp": ("self", _between(1, 2)),
    "clamp_min": ("self", _between(1, None)),
    "clamp_max": ("self", _between(None, 1)),
    "threshold": ("self", _threshold),
    "leaky_relu": ("self", lambda _: _bits("above", 0.0, math.inf, 1.0, -1.0)),
    "hardshrink": ("self", _shrink),
    "softshrink": ("self", _shrink),
    "hardsigmoid": ("self", lambda _: _bits("between", -3.0, 3.0, 0.0, 3.0)),
}
"""Operators whose scalar arguments decide the form, by the operand concerned."""

ELEMENTWISE = frozenset({"mul", "div", "addcmul", "addcdiv", "lerp"})
"""Operators whose operand is a statistic or a scale if broadcast over many elements of another operand."""

DECIDING = tuple(
    f"aten::{name}"
    for name in (
        *("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "median", "nanmedian", "mode", "multinomial"),
        *("cummax", "cummin", "searchsorted", "bucketize", "unique_dim", "unique_consecutive", "_unique2", "nonzero"),
        *("gt", "lt", "ge", "le", "eq", "ne", "floor", "ceil", "round", "trunc", "sign", "sgn", "max", "min"),
        *("item", "is_nonzero", "_to_copy"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "mkldnn_max_pool2d"),
        *("mkldnn_max_pool3d", "amax", "amin", "aminmax", "maximum", "minimum", "scatter_reduce", "index_reduce"),
        *("frac", "fmod", "remainder", "hardshrink", "threshold", "bernoulli", "heaviside", "_embedding_bag"),
        *("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine", "quantize_per_tensor"),
        *("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine"),
        *("quantize_per_channel", "quantize_per_tensor_dynamic"),
        # The slope between pixels jumps where a coordinate passes one.
        *("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler"),
    )
)
"""Operators that turn values into decisions: a block that runs one must rerun from exactly the same values.

``item`` and ``is_nonzero`` count if the program calls them, ``_to_copy`` if the target dtype is integer or boolean,
``bernoulli`` with a tensor of probabilities. No operator counts that runs inside another one with a derivative.
"""

CHOOSING = {
    **{f"aten::{name}": (1, math.inf) for name in ("linalg_vector_norm", "norm", "_pdist_forward")},
    "aten::_cdist_forward": (2, math.inf),
}
"""Operators that decide if the argument at a position has a magnitude: that of the largest difference."""

DIVIDING = {
    "aten::div": 1,
    **{
        f"aten::{name}": 0
        for name in ("rsqrt", "sqrt", "reciprocal", "log", "log2", "log10", "log1p", "logit", "pow", "atan2", "xlogy")
    },
}
"""The argument by which an operator, or its derivative, divides: the derivative grows without bound near zero."""

FUNCTIONS: dict[str, str] = {
    "flash_attn.flash_attn_interface.FlashAttnFunc": "flash-attn",
    "flash_attn.flash_attn_interface.FlashAttnQKVPackedFunc": "flash-attn",
    "flash_attn.flash_attn_interface.FlashAttnKVPackedFunc": "flash-attn",
    "flash_attn.flash_attn_interface.FlashAttnVarlenFunc": "flash-attn",
    "flash_attn.flash_attn_interface.FlashAttnVarlenQKVPackedFunc": "flash-attn",
    "flash_attn.flash_attn_interface.FlashAttnVarlenKVPackedFunc": "flash-attn",
    "flash_attn_interface.FlashAttnFunc": "flash-attn 3",
    "flash_attn_interface.FlashAttnVarlenFunc": "flash-attn 3",
    "xformers.ops.fmha._fMHA": "xformers",
    "xformers.ops.swiglu_op._SwiGLUDecomposedFunc": "xformers",
    "xformers.ops.rmsnorm._RMSNormFunction": "xformers",
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction": "Liger-Kernel",
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction": "Liger-Kernel",
    "liger_kernel.ops.swiglu.LigerSiLUMulFunction": "Liger-Kernel",
    "liger_kernel.ops.geglu.LigerGELUMulFunction": "Liger-Kernel",
    "liger_kernel.ops.rope.LigerRopeFunction": "Liger-Kernel",
    "liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction": "Liger-Kernel",
    "liger_kernel.ops.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyFunction": "Liger-Kernel",
    "bitsandbytes.autograd._functions.MatMul8bitLt": "bitsandbytes",
    "bitsandbytes.autograd._functions.MatMul4Bit": "bitsandbytes",
    "transformer_engine.pytorch.module.linear._Linear": "TransformerEngine",
    "transformer_engine.pytorch.module.layernorm_linear._LayerNormLinear": "TransformerEngine",
    "transformer_engine.pytorch.module.layernorm_mlp._LayerNormMLP": "TransformerEngine",
    "transformer_engine.pytorch.module.grouped_linear._GroupedLinear": "TransformerEngine",
    "mamba_ssm.ops.selective_scan_interface.SelectiveScanFn": "mamba-ssm",
    "mamba_ssm.ops.selective_scan_interface.MambaInnerFn": "mamba-ssm",
    "mamba_ssm.ops.triton.ssd_combined.MambaChunkScanCombinedFn": "mamba-ssm",
    "mamba_ssm.ops.triton.ssd_combined.MambaSplitConv1dScanCombinedFn": "mamba-ssm",
    "mamba_ssm.ops.triton.layer_norm.LayerNormFn": "mamba-ssm",
    "causal_conv1d.causal_conv1d_interface.CausalConv1dFn": "causal-conv1d",
    "fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction": "fla",
    "fla.ops.delta_rule.chunk.ChunkDeltaRuleFunction": "fla",
    "fla.ops.gla.chunk.ChunkGLAFunction": "fla",
    "fla.modules.layernorm.LayerNormFunction": "fla",
    "fla.modules.fused_norm_gate.LayerNormGatedFunction": "fla",
    "torch.nn.modules._functions.SyncBatchNorm": "torch's SyncBatchNorm",
    "torch.nn.modules._functions.CrossMapLRN2d": "torch's CrossMapLRN2d",
    "torch._higher_order_ops.flex_attention.FlexAttentionAutogradOp": "torch's flex_attention",
    "torch._functorch._aot_autograd.runtime_wrappers.CompiledFunction": "a compiled graph",
}
"""Autograd functions of other packages, not tested with fewer bits: exact."""

NAMESPACES = {
    "torchvision": "torchvision's operators",
    "torch_scatter": "torch-scatter's operators",
    "torch_sparse": "torch-sparse's operators",
    "torch_cluster": "torch-cluster's operators",
    "torch_spline_conv": "torch-spline-conv's operators",
    "pyg": "pyg-lib's operators",
    "fbgemm": "FBGEMM's operators",
    "torchao": "torchao's operators",
}
"""Operator namespaces of other packages, not tested with fewer bits: exact."""


def _table() -> dict[str, dict[str, Reading]]:
    table: dict[str, dict[str, Reading]] = {}
    for group in _GROUPS:
        for entry in group.entries:
            operator, *operands = entry.split()
            readings = table.setdefault(operator, {})
            for operand in operands:
                readings[operand] = Reading.of(f"aten::{operator}", operand, group.how, group.why)
            if not operands:
                readings.setdefault("", Reading(f"aten::{operator}", "any operand", ITSELF, group.why))
    for operator, (operand, decide) in _BY_SCALARS.items():
        reading = Reading(f"aten::{operator}", operand, ITSELF, "decided by its scalar arguments", by_scalars=decide)
        table.setdefault(operator, {})[operand] = reading
    return table


READERS = _table()
"""Operator name, with the overload where overloads differ, to readings by operand."""

FUNCTION_READERS: dict[str, dict[int, Reading]] = {
    # ZeRO-3 runs it in place of torch.nn.functional.linear. Of both factors mm saves mat2 first, and this the input.
    "deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3": {0: READERS["mm"]["mat2"], 1: READERS["mm"]["self"]},
}
"""Autograd functions of other packages that read what they save as an operator does, by position."""

FACTORS: dict[str, dict[str, int]] = {
    "MmBackward0": {"self": 1, "mat2": 0},
    "AddmmBackward0": {"mat1": 2, "mat2": 1},
    "BmmBackward0": {"self": 1, "mat2": 0},
    "BaddbmmBackward0": {"batch1": 2, "batch2": 1},
    "MvBackward0": {"self": 1, "vec": 0},
    "MulBackward0": {"self": 1, "other": 0},
    "ConvolutionBackward0": {"input": 1, "weight": 0},
}
"""Nodes of products: each saved factor, and the only input, by position, whose gradient reads it."""
