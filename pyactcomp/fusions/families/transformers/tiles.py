"""Gated MLPs in tiles of tokens: where, and with which matrix products and activation."""

from __future__ import annotations

import ast
import functools
import sys
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F

from ....engine.marks import FUSING
from ....engine.reruns import as_in_first_run
from ....functional import Projection, gated_mlp
from ....functional.activations.gated.gated_unit import Activation
from ....functional.saving import Saving
from ....functional.tiles import rows_of
from ....torch_private import dispatch_mode_active
from ...formulas import formula, forward_of
from ...fusion import Fused, codes_for, linear_dtype, original_of
from ...products import is_matrix_product
from ...state import FusionState
from ...tampering import bypassable_as

_SILU = ("nn.functional.silu(input)", "F.silu(input, inplace=self.inplace)")
_CALLS_ACT = "self.act(input)"
_GATE_UP = """\
up_states = self.gate_up_proj(hidden_states)
gate, up_states = up_states.chunk(2, dim=-1)
up_states = up_states * self.activation_fn(gate)
return self.down_proj(up_states)"""


def activation_of(activation: Module) -> Activation | None:
    """Return which activation a child is, or None if it is another one or was changed by other code."""
    cls = original_of(type(activation))
    if not bypassable_as(activation, cls):
        return None
    computes = formula(forward_of(cls))
    if computes in _SILU:
        return "silu"
    function: Any = getattr(activation, "act", None) if computes == _CALLS_ACT else None
    if function is F.gelu:
        return "gelu"
    if not isinstance(function, functools.partial) or function.func is not F.gelu or function.args:
        return None
    approximate = function.keywords.get("approximate", "none")
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate) if len(function.keywords) <= 1 else None  # type: ignore[return-value]


def _projection(linear: Module) -> Projection | None:
    """Return a child as a matrix product, or None unless it is a bare Linear, or PEFT's LoRA of one."""
    if is_matrix_product(linear):
        bare = cast(nn.Linear, linear)
        return Projection(bare.weight, bare.bias)
    peft = sys.modules.get("peft.tuners.lora.layer")
    if peft is None or not bypassable_as(linear, peft.Linear):
        return None
    lora: Any = linear
    active = [name for name in lora.active_adapters if name in lora.lora_A]
    if lora.disable_adapters or lora.merged or len(active) != 1 or not is_matrix_product(lora.base_layer):
        return None
    (name,) = active
    a, b, dropout = lora.lora_A[name], lora.lora_B[name], lora.lora_dropout[name]
    variant = getattr(lora, "lora_variant", getattr(lora, "use_dora", {})).get(name)
    if variant or not is_matrix_product(a) or not is_matrix_product(b) or not bypassable_as(dropout, nn.Identity):
        return None
    if a.bias is not None or b.bias is not None:
        return None
    return Projection(lora.base_layer.weight, lora.base_layer.bias, a.weight, b.weight, float(lora.scaling[name]))


def _nobody_holds(module: Module) -> bool:
    """Return whether no dispatch mode is active, which may hold the tensors that a tile overwrites."""
    return not dispatch_mode_active()


def _of_one_dtype(x: Tensor, *projections: Projection) -> bool:
    """Return whether torch multiplies these: else the own forward raises torch's error."""
    device = all(p.weight.device == x.device for p in projections)
    base = (t for p in projections for t in (p.weight, p.bias) if t is not None)
    return device and (linear_dtype(x) is not None or all(t.dtype is x.dtype for t in base))


def in_tiles(
    module: Module, x: Tensor, codes: Saving, activation: Activation | None, gate: Any, up: Any, down: Any
) -> Tensor | None:
    """Return the output of a gated MLP in tiles of tokens, or None where the MLP calls its children.

    That is the case with few tokens (:func:`.rows_of`), in lossless mode, with ``keep_weight_copies``, with another
    activation, under a dispatch mode, as of selective checkpointing, and if a child is no bare matrix product. ``up``
    is None if ``gate`` holds both, one after the other.
    """
    state: FusionState | None = FUSING.get(module)
    assert state is not None  # only a fused forward asks
    config = state.config
    if codes.bits is None or config.tile is None or config.keep_weight_copies or activation is None:
        return None
    width = getattr(down, "in_features", None)
    if not isinstance(width, int) or x.dim() == 0:
        return None
    rows = rows_of(config.tile, x.shape[:-1].numel(), width * (linear_dtype(x) or x.dtype).itemsize)
    if rows is None or not as_in_first_run(_nobody_holds, module):
        return None
    found = [None if each is None else _projection(each) for each in (gate, up, down)]
    if up is None and found[0] is not None:
        found[:2] = _halves(found[0])
    if any(each is None for each in found):
        return None
    first, second, last = cast("list[Projection]", found)
    fits = first.weight.shape == second.weight.shape == (last.weight.shape[1], x.shape[-1])
    if not fits or not _of_one_dtype(x, first, second, last):
        return None
    return gated_mlp(x, first, second, last, activation=activation, tile=rows, codes=codes)


def _halves(both: Projection) -> tuple[Projection, Projection]:
    """Return gate and up, of which a product holds the one's outputs before the other's."""
    weight, bias, a, b, scale = both
    weights = weight.chunk(2)
    biases = (None, None) if bias is None else bias.chunk(2)
    factors = (None, None) if b is None else b.chunk(2)
    first, second = (Projection(weights[i], biases[i], a, factors[i], scale) for i in range(2))
    return first, second


class GateUpMLP(Fused):
    """``down_proj(up * activation_fn(gate))`` with gate and up from one Linear, in tiles; else as its class does."""

    gate_up_proj: Module
    down_proj: Module
    activation_fn: Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the MLP."""
        codes = codes_for(self, hidden_states)
        if codes is not None:
            activation = activation_of(self.activation_fn)
            tiled = in_tiles(self, hidden_states, codes, activation, self.gate_up_proj, None, self.down_proj)
            if tiled is not None:
                return tiled
        return cast(Tensor, super().forward(hidden_states))


def is_gate_up_mlp(forward: ast.FunctionDef) -> bool:
    """Return whether a method is the forward of Phi-3's MLP."""
    body = [part for part in forward.body if not isinstance(part, ast.Expr)]
    return "\n".join(map(ast.unparse, body)) == _GATE_UP
