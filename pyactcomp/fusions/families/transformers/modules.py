"""Fused modules of Hugging Face transformers.

Model families repeat the same few modules under different names, so a class is recognised by the formula of ``forward``
(:mod:`.formulas`). A family with another formula is left as is.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.functional import linear as linear_of_torch

from ....engine import recompute
from ....engine.rare import check_version
from ....engine.reruns import trains
from ....engine.saved import library
from ....functional import gelu, silu_mul
from ....functional.activations.gelu.launch import gelu_of
from ....functional.activations.gelu.new_gelu import new_gelu
from ....functional.norms.add_rms_norm import add_rms_norm
from ....functional.norms.launch import norm_of
from ....functional.norms.layer_norm import add_layer_norm
from ....functional.norms.rms_norm import rms_norm_unchecked
from ....torch_private import under_checkpoint
from ...formulas import children_fed, formula, forward_of
from ...fusion import Fused, Fusion, codes_for, fits, fused_class, original_of
from ...products import cast_once, feeds_linears, is_matrix_product
from ...sharded import local_rows, of_rows
from ...state import next_codes
from ...tampering import bypassable, bypassable_as
from ..torch_modules import Dropout, PreNormBlock
from .attention import Projections, rotates
from .tiles import GateUpMLP, activation_of, in_tiles, is_gate_up_mlp


class RMSNorm(Fused):
    """The norm of Llama and its descendants."""

    stands_for = ("rms_norm",)

    weight: Tensor
    variance_epsilon: float
    _copy = False

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        return cast(RMSNorm, module).weight.numel()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise ``hidden_states``."""
        if not torch.compiler.is_compiling():
            codes = library().ordinary_codes(self, hidden_states, True)
            if codes is not None:
                copied = hidden_states.dtype if self._copy else None
                norm = norm_of(hidden_states.shape[-1:], False, self.variance_epsilon, codes, copied)
                made = norm.apply_where_served(hidden_states, self.weight, None, None)
                if made is not None:
                    return made
        own, weight = local_rows(hidden_states, 1, self.weight)
        codes = codes_for(self, own, constant=True)
        if codes is None or own.shape[-1:] != weight.shape:
            return cast(Tensor, super().forward(hidden_states))
        out = rms_norm_unchecked(own, weight, self.variance_epsilon, None, self._copy and codes.bits is not None, codes)
        return out if own is hidden_states else of_rows(out, hidden_states)


class RMSNormForGatedMLP(RMSNorm):
    """The norm before a gated MLP: keeps a copy of the input instead of codes.

    Backward uses the norm's output for the gradients of a layer's largest weights, gate and up, and to recompute
    ``up``. The gradient of a Llama of 16 layers of 512 in float32 is off by 0.69 % with codes for all norms, by 0.49 %
    with copies before the gated MLPs, and by 0.44 % with copies for all norms.
    """

    _copy = True


class NewGELU(Fused):
    """``NewGELUActivation``: the tanh GELU, eight operators in eager code."""

    stands_for = ("gelu",)

    def forward(self, input: Tensor) -> Tensor:
        """Apply GELU."""
        codes = codes_for(self, input)
        return cast(Tensor, super().forward(input)) if codes is None else new_gelu(input, codes=codes)


class GELU(Fused):
    """``GELUActivation`` and ``GELUTanh`` where kernels run, if configured to call torch's function."""

    stands_for = ("gelu",)

    act: Any

    def forward(self, input: Tensor) -> Tensor:
        """Apply GELU."""
        if self.act is nn.functional.gelu and not torch.compiler.is_compiling():
            codes = library().ordinary_codes(self, input, False)
            made = None if codes is None else gelu_of(False, codes).apply_where_served(input)
            if made is not None:
                return made
        codes = codes_for(self, input, kernels=True)
        if codes is not None and self.act is nn.functional.gelu:
            return gelu(input, codes=codes)
        if codes is not None and getattr(self.act, "func", None) is nn.functional.gelu and not self.act.args:
            return gelu(input, **self.act.keywords, codes=codes)
        return cast(Tensor, super().forward(input))


class GatedMLP(Fused):
    """``down_proj(act_fn(gate_proj(x)) * up_proj(x))``: in tiles, or the product fused where the activation is SiLU."""

    gate_proj: Module
    up_proj: Module
    down_proj: Module
    act_fn: Module

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP."""
        codes = codes_for(self, x)
        if codes is None:
            return cast(Tensor, super().forward(x))
        if codes.bits is not None:
            x = cast_once(self, x)
        activation = activation_of(self.act_fn)
        tiled = in_tiles(self, x, codes, activation, self.gate_proj, self.up_proj, self.down_proj)
        if tiled is not None:
            return tiled
        if activation != "silu":
            return cast(Tensor, super().forward(x))
        # Checked before the calls: a hook may remove itself.
        up_by, down_by = is_matrix_product(self.up_proj), is_matrix_product(self.down_proj)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.shape != up.shape:
            return cast(Tensor, self.down_proj(self.act_fn(gate) * up))
        if codes.bits is None:
            return cast(Tensor, self.down_proj(silu_mul(gate, up, codes=codes)))
        # After the calls: a hook of gate_proj or up_proj may have written to x.
        up_again = _linear_recomputation(self.up_proj, x) if up_by else None
        product = silu_mul(gate, up, up_again=up_again, inplace=up_by and down_by, codes=codes)
        del gate, up  # frees gate, of which the codes are stored, before the last product
        return cast(Tensor, self.down_proj(product))


def _linear_recomputation(linear: Any, x: Tensor) -> Callable[[], Tensor] | None:
    """Return a function that recomputes ``linear(x)`` in backward, or None where this is not worth the time.

    Codes of ``up`` are 31 % of the bytes stored for a Llama layer, and the product takes 4 % of the step on an H200.
    Under torch.utils.checkpoint saved tensors live for one block only, in a forward that is itself a recomputation.
    """
    weight, bias = linear.weight, linear.bias
    recompute_x = recompute.recomputation_of(x)
    if recompute_x is None or under_checkpoint():
        return None
    version, device = weight._version, x.device.type
    # Keep the weight of this forward, as autograd does, even if the module gets a new one. Copy the bias: an in-place
    # update of the bias may precede backward.
    same_weight = weight.detach()
    bias_copy = None if bias is None else bias.detach().clone()

    def compute() -> Tensor:
        check_version(same_weight, version)
        with torch.autocast(device, enabled=False):
            x = recompute_x()
            return linear_of_torch(x, same_weight.to(x.dtype), None if bias_copy is None else bias_copy.to(x.dtype))

    return compute


class ResidualNorm(Fused):
    """``LayerNorm(dropout(dense(hidden_states)) + input_tensor)``, one pass after ``dense``."""

    dense: Module
    dropout: Module
    LayerNorm: nn.LayerNorm

    @staticmethod
    def row_length(module: Module) -> int | None:
        """Return the elements of a row."""
        norm = cast(ResidualNorm, module).LayerNorm
        return math.prod(norm.normalized_shape) if isinstance(norm, nn.LayerNorm) else None

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Run the output part of a post-norm block."""
        norm = self.LayerNorm
        codes = codes_for(self, input_tensor) if bypassable_as(norm, nn.LayerNorm) else None
        if codes is None:
            return cast(Tensor, super().forward(hidden_states, input_tensor))
        drop, p = self.dropout, 0.0
        # Checked before the call: a hook may remove itself.
        bypassed = isinstance(drop, Dropout) and not drop.inplace and bypassable(drop)
        hidden = self.dense(hidden_states)
        if not bypassed:
            hidden = drop(hidden)
        elif trains(drop):
            p = cast(Dropout, drop).p
        if hidden.shape != input_tensor.shape or not fits(hidden, norm.normalized_shape, norm.weight, norm.bias):
            return cast(Tensor, norm((drop(hidden) if bypassed else hidden) + input_tensor))
        return add_layer_norm(
            hidden, input_tensor, norm.normalized_shape, norm.weight, norm.bias, norm.eps, p=p, codes=codes
        )


class DecoderLayer(Fused):
    """A Llama block with a gated MLP: each sum and the norm that follows are one pass, in forward and backward."""

    input_layernorm: Module
    self_attn: Callable[..., tuple[Tensor, Any]]
    post_attention_layernorm: Module
    mlp: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the block."""
        codes = codes_for(self, hidden_states)
        first, second = self.input_layernorm, self.post_attention_layernorm
        if (
            codes is None
            or not _is_fused_norm(first)
            or not _is_fused_norm(second)
            or not hidden_states.shape[-1:] == first.weight.shape == second.weight.shape
        ):
            return cast(Tensor, super().forward(hidden_states, *args, **kwargs))
        normal, past = add_rms_norm(hidden_states, None, first.weight, first.variance_epsilon, codes=codes)
        function: Any = original_of(type(self)).forward
        *named, (_, others) = _bound(function, self, hidden_states, *args, **kwargs)
        # Reuse one name, to free each branch after the sum.
        normal, _ = self.self_attn(**{**dict(named[1:]), "hidden_states": normal}, **others)
        codes = next_codes(self)
        normal, past = add_rms_norm(normal, past, second.weight, second.variance_epsilon, codes=codes)
        return past + self.mlp(normal)


def _is_fused_norm(norm: Module) -> TypeGuard[RMSNorm]:
    return isinstance(norm, RMSNorm) and bypassable(norm)


_signature = functools.lru_cache(maxsize=256)(inspect.signature)


def _bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterable[tuple[str, Any]]:
    """Return the parameters of a function with ``**kwargs``, each with the argument of a call."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments.items()


class GPT2Block(PreNormBlock):
    """GPT-2's block."""

    feeds: ClassVar = {"ln_1": "attn", "ln_2": "mlp"}

    @staticmethod
    def linears() -> tuple[type[Module], ...]:
        """Return the classes of GPT-2's projections."""
        return nn.Linear, sys.modules["transformers.pytorch_utils"].Conv1D


class ViTLayer(PreNormBlock):
    """The block of a vision transformer."""

    feeds: ClassVar = {"layernorm_before": "attention", "layernorm_after": "mlp"}


_PRE_NORM: dict[tuple[str, str], type[PreNormBlock]] = {
    ("transformers.models.gpt2.modeling_gpt2", "GPT2Block"): GPT2Block,
    ("transformers.models.vit.modeling_vit", "ViTLayer"): ViTLayer,
}
_BY_FORMULA: dict[str, Callable[[type[Module]], Fusion]] = {
    "self.weight * (hidden_states.to(torch.float32) * torch.rsqrt(hidden_states.to(torch.float32).pow(2)"
    ".mean(-1, keepdim=True) + self.variance_epsilon)).to(hidden_states.dtype)": lambda cls: Fusion(
        fused_class(RMSNorm, cls)
    ),
    "0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))": (
        lambda cls: Fusion(fused_class(NewGELU, cls), exact=True)
    ),
    "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))": lambda cls: Fusion(
        fused_class(GatedMLP, cls), exact=True, bypassed=("act_fn",)
    ),
    "self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)": lambda cls: Fusion(
        fused_class(ResidualNorm, cls), bypassed=("LayerNorm",)
    ),
}


_DECODER_LAYER = """\
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn({arguments})
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states"""


def _is_decoder_layer(forward: ast.FunctionDef) -> bool:
    """Return whether a method is the forward of Llama's block and passes all arguments to the attention."""
    given = forward.args
    names = [each.arg for each in given.args[1:]]
    if names[:1] != ["hidden_states"] or given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg is None:
        return False
    arguments = ", ".join([*(f"{name}={name}" for name in names), f"**{given.kwarg.arg}"])
    body = forward.body[1:] if isinstance(forward.body[0], ast.Expr) else forward.body
    return "\n".join(map(ast.unparse, body)) == _DECODER_LAYER.format(arguments=arguments)


def _fusion(cls: type[Module]) -> Fusion | None:
    defined = forward_of(cls)
    if defined is None or defined.decorator_list:
        return None
    if _is_decoder_layer(defined):
        norms = "input_layernorm", "post_attention_layernorm"
        return Fusion(fused_class(DecoderLayer, cls), bypassed=norms, suits=lambda block: bool(by_place(block)))
    pre_norm = _PRE_NORM.get((cls.__module__, cls.__name__))
    if pre_norm is not None:
        return Fusion(fused_class(pre_norm, cls), suits=pre_norm.suits)
    if is_gate_up_mlp(defined):
        return Fusion(fused_class(GateUpMLP, cls), bypassed=("activation_fn",))
    make = _BY_FORMULA.get(formula(defined) or "")
    if make is not None:
        return make(cls)
    if cls.__module__ == "transformers.activations" and cls.__name__ in ("GELUActivation", "GELUTanh"):
        return Fusion(fused_class(GELU, cls))
    if rotates(cls.forward):
        return Fusion(fused_class(Projections, cls), exact=True)
    return Fusion(fused_class(Projections, cls), suits=feeds_linears) if len(children_fed(defined)) > 1 else None


def by_class(classes: Collection[type[Module]]) -> dict[type[Module], Fusion]:
    """Return the fusions of the known transformers classes among ``classes``."""
    known = ((cls, _fusion(cls)) for cls in classes if cls.__module__.startswith("transformers."))
    return {cls: fusion for cls, fusion in known if fusion is not None}


def by_place(block: Module) -> dict[Module, Fusion]:
    """Return the fusion of the norm before the gated MLP of a Llama block."""
    children = block._modules
    norm, mlp = children.get("post_attention_layernorm"), children.get("mlp")
    # In a block with a norm after the MLP, such as EXAONE 4, this name is the norm after the attention.
    if norm is None or mlp is None or "post_feedforward_layernorm" in children:
        return {}
    norm_class, mlp_class = original_of(type(norm)), original_of(type(mlp))
    known = by_class({norm_class, mlp_class})
    if not {norm_class, mlp_class} <= known.keys() or not issubclass(known[mlp_class].fused, GatedMLP):
        return {}
    is_rms_norm = issubclass(known[norm_class].fused, RMSNorm)
    return {norm: Fusion(fused_class(RMSNormForGatedMLP, norm_class))} if is_rms_norm else {}
