"""``gated_mlp``: a gated MLP in tiles of tokens; no tensor as wide as the MLP exists for all tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ....codec import format as fmt
from ....engine import recompute
from ....errors import check_choice, check_tile
from ....torch_private import graph_is_retained, owns_alone, rerun_stops_after, saves_are_dropped, under_checkpoint
from ...codes import INT8, Codes, one_option
from ...saving import (
    KERNEL_DTYPES,
    Saving,
    begin,
    check_float_tensor,
    differentiable_once,
    recorded,
    saving,
    wanted,
)
from ...tiles import Tile, rows_of
from .gated_unit import ACTIVATIONS, Activation, FusedUnit, Unit
from .projection import FACTORS, TENSORS, Product, Projection


@dataclass(frozen=True, eq=False)
class _Form:
    """What a call is besides its tensors.

    Attributes
    ----------
    widths : tuple of int
        Elements of a row of the input, of the product and of the output.
    rows : int
        Rows of a tile.
    dtype : torch.dtype
        The dtype of the products.
    """

    activation: Activation
    scales: tuple[float, float, float]
    widths: tuple[int, int, int]
    rows: int
    dtype: torch.dtype
    how: Saving

    def products(self, tensors: Sequence[Tensor | None]) -> list[Product]:
        """Return gate, up and down."""
        return [
            Product(part, scale, self.dtype) for part, scale in zip(_of_projections(tensors), self.scales, strict=True)
        ]

    def unit(self, rows: Tensor) -> Unit:
        """Return what computes the gated product."""
        fused = self.activation == "silu" and self.dtype in KERNEL_DTYPES and self.how.runs_kernels(rows)
        return (FusedUnit if fused else Unit)(self.activation, self.how)

    def tiles(self, count: int) -> list[slice]:
        """Return the places of the tiles."""
        return [slice(start, min(start + self.rows, count)) for start in range(0, count, self.rows)]

    def forward(
        self, x: Tensor, products: Sequence[Product], unit: Unit, out: Tensor, keeps: Sequence[bool]
    ) -> list[Tensor]:
        """Write the output for all rows; return the codes of gate, up and x for each tile, where they are kept."""
        kept: list[Tensor] = []
        how = self.how
        for place in self.tiles(len(x)):
            kept += self._forward(x[place].to(self.dtype), products, unit, out[place], keeps, how)
            how = how.second().second().second()
        return kept

    @staticmethod
    def _forward(
        x: Tensor, products: Sequence[Product], unit: Unit, out: Tensor, keeps: Sequence[bool], how: Saving
    ) -> list[Tensor]:
        """Write the output of a tile, whose tensors are freed on return; return the codes that are kept."""
        gate, up, down = products
        product = up.of(x)
        kept = unit.over(gate.of(x), product, (keeps[0], keeps[1]), how)
        if keeps[2]:
            kept.append(how.second().second().pack(x)[0])
        down.of(product, out)
        return kept

    def unwritten(self, x: Tensor, keeps: Sequence[bool]) -> list[Tensor]:
        """Return tensors without memory of the shapes of the codes, to be saved in a run that writes none."""
        bits, group_size = cast(int, self.how.bits), self.how.group_size
        width, middle, _ = self.widths
        widths = [each for each, keep in zip((middle, middle, width), keeps, strict=True) if keep]
        sizes = ((place.stop - place.start) * width for place in self.tiles(len(x)) for width in widths)
        nothing = x.new_empty((), dtype=torch.uint8)
        return [nothing.expand(fmt.packed_nbytes(size, bits, group_size)) for size in sizes]

    def backward(
        self,
        x: Tensor | None,
        kept: Sequence[Tensor],
        keeps: Sequence[bool],
        grad: Tensor,
        products: Sequence[Product],
        unit: Unit,
        grad_x: Tensor | None,
    ) -> None:
        """Write the gradient of x, and sum those of the projections."""
        codes = iter(kept)
        for place in self.tiles(len(grad)):
            of_tile = [next(codes) if keep else None for keep in keeps]
            rows = None if x is None else x[place].to(self.dtype)
            out = None if grad_x is None else grad_x[place]
            self._backward(rows, of_tile, grad[place].to(self.dtype), products, unit, out)

    def _backward(
        self,
        x: Tensor | None,
        codes: Sequence[Tensor | None],
        grad: Tensor,
        products: Sequence[Product],
        unit: Unit,
        grad_x: Tensor | None,
    ) -> None:
        """Add the part of a tile, whose tensors are freed on return."""
        gate, up, down = products
        of_gate, of_up, of_x = codes
        width, middle, _ = self.widths
        if of_x is not None:
            x = self.how.restorer((len(grad), width), self.dtype)(of_x)
        coded = of_gate is not None and of_gate.stride() != (0,)  # else checkpoint's rerun left it to backward
        if coded and of_up is not None:
            factor = self.how.restorer((len(grad), middle), self.dtype)(of_up)
        else:
            factor = up.of(cast(Tensor, x))
        gated = cast(Tensor, of_gate) if coded else gate.of(cast(Tensor, x))
        product, gradients = unit.again(gated, factor, coded)
        if down.sums:
            down.add(product, grad)
        if grad_x is None and not gate.sums and not up.sums:
            return
        # The gradient of the product is written over the product, and those of gate and up over both.
        of_gate, of_up = gradients(down.back(grad, product))
        gate.add(x, of_gate)
        up.add(x, of_up)
        if grad_x is not None:
            result = grad_x if grad_x.dtype is self.dtype else grad_x.new_empty(grad_x.shape, dtype=self.dtype)
            up.back(of_up, gate.back(of_gate, result), add=True)
            if result is not grad_x:
                grad_x.copy_(result)


def _of_projections(values: Sequence[Any]) -> list[Any]:
    """Return the parts of a sequence that belong to gate, up and down."""
    return [values[start : start + TENSORS] for start in range(0, 3 * TENSORS, TENSORS)]


class _GatedMLP(torch.autograd.Function):
    """Saves for each tile the codes of gate, of up unless backward computes up again, and of x if backward reads x.

    If x comes with a recipe, backward computes x and up again. Under torch.utils.checkpoint saved tensors live for one
    block: x itself is saved, and the rerun leaves gate and up to backward if nothing else of the block is saved after
    them, as in a block that ends with the MLP and a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: _Form, *tensors: Tensor | None) -> Tensor:
        needs_gate, needs_up, _ = _of_projections(ctx.needs_input_grad[2:])
        reads_x = any(needs[index] for needs in (needs_gate, needs_up) for index in (0, *range(FACTORS, TENSORS)))
        begin(ctx, x if reads_x and x.dtype is form.dtype else None)
        ctx.form, ctx.shape = form, x.shape
        ctx.dtypes = x.dtype, [None if t is None else t.dtype for t in tensors]
        ctx.whole = whole = under_checkpoint()
        ctx.again = None if whole else recompute.recomputation_of(x)
        ctx.keeps = keeps = True, ctx.again is None, ctx.again is None and reads_x and not whole
        rows = x.detach().reshape(-1, x.shape[-1])
        ctx.unit = form.unit(rows)
        shape = (*x.shape[:-1], form.widths[2])
        saves = len(form.tiles(len(rows))) * sum(keeps) + sum(t is not None for t in (x, *tensors))
        if whole and rerun_stops_after(saves):
            kept, out = form.unwritten(rows, keeps), x.new_full((), math.nan, dtype=form.dtype).expand(shape)
        else:
            written = (False, False, False) if saves_are_dropped() else keeps
            out = x.new_empty(shape, dtype=form.dtype)
            kept = form.forward(rows, form.products(tensors), ctx.unit, out.view(-1, shape[-1]), written)
            kept = kept if written is keeps else form.unwritten(rows, keeps)
        ctx.save_for_backward(x if whole else None, *tensors, *kept)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        form: _Form = ctx.form
        x, *saved = ctx.saved_tensors
        dtype, dtypes = ctx.dtypes
        wants = wanted(ctx)
        with torch.autocast(grad.device.type, enabled=False):
            products = form.products(saved[: 3 * TENSORS])
            for product, needs in zip(products, _of_projections(wants[2:]), strict=True):
                product.begin_sums(needs)
            grad_x = None
            if ctx.again is not None:
                x = ctx.again()
                ctx.again = ctx.again if graph_is_retained() else None  # frees what the recipe reads
            if x is not None and x.dtype is dtype is form.dtype and x.is_contiguous() and owns_alone(x):
                # A recipe, or checkpoint's rerun, made x for this backward alone: the gradient of a tile is written
                # over its rows, which are read before.
                grad_x = x.detach()
            if grad_x is None or not wants[0]:
                grad_x = grad.new_empty(ctx.shape, dtype=dtype) if wants[0] else None
            rows, of_rows = (None if t is None else t.detach().reshape(-1, form.widths[0]) for t in (x, grad_x))
            g = grad.reshape(-1, form.widths[2])
            form.backward(rows, saved[3 * TENSORS :], ctx.keeps, g, products, ctx.unit, of_rows)
            found = [
                each
                for product, of in zip(products, _of_projections(dtypes), strict=True)
                for each in product.gradients(of)
            ]
        return grad_x, None, *found


def _checked(name: str, given: Tensor | Projection, width: int | None, x: Tensor) -> Projection:
    """Return a projection; raise unless its tensors fit one another, and rows of ``width`` elements."""
    projection = given if isinstance(given, Projection) else Projection(given)
    weight, bias, a, b, _ = projection
    for part, tensor in zip(Projection._fields, (weight, bias, a, b), strict=False):
        if tensor is not None or part == "weight":
            check_float_tensor(f"{name}.{part}", tensor)
            if cast(Tensor, tensor).device != x.device:
                raise ValueError(f"gated_mlp expects {name}.{part} on {x.device}, got {cast(Tensor, tensor).device}")
    fits = weight.dim() == 2 and width in (None, weight.shape[1]) and (bias is None or bias.shape == weight.shape[:1])
    if a is not None and b is not None:
        fits = fits and a.dim() == b.dim() == 2 and a.shape[1:] == weight.shape[1:]
        fits = fits and b.shape == (weight.shape[0], a.shape[0])
    elif a is not None or b is not None:
        raise ValueError(f"gated_mlp expects both a and b of {name}, or none, got one of them")
    if not fits:
        shapes = {
            part: tuple(t.shape)
            for part, t in zip(Projection._fields, (weight, bias, a, b), strict=False)
            if t is not None
        }
        raise ValueError(
            f"gated_mlp expects the weight of {name} of [out, {width or 'in'}], a bias of [out], a of [rank, in] and b "
            f"of [out, rank], got {shapes}"
        )
    return projection


@one_option
def gated_mlp(
    x: Tensor,
    gate: Tensor | Projection,
    up: Tensor | Projection,
    down: Tensor | Projection,
    *,
    activation: Activation = "silu",
    tile: Tile = "auto",
    codes: Codes = INT8,
) -> Tensor:
    """Return ``(activation(x @ gate.T) * (x @ up.T)) @ down.T``, computed in tiles of tokens.

    No tensor of [tokens, intermediate] exists, forward or backward, except codes: each tile goes through all products
    before the next one begins. Backward restores gate from codes. It computes ``up`` again if ``x`` comes with a
    recipe, as the output of a norm does, and restores ``up`` otherwise.

    Parameters
    ----------
    x : Tensor, [..., in], floating point
    gate, up : Tensor, [intermediate, in], or Projection
        A weight, or a :class:`Projection` with a bias or a low-rank addition too.
    down : Tensor, [out, intermediate], or Projection
    activation : {"silu", "gelu", "gelu_tanh"}
        ``"gelu_tanh"`` is GELU with ``approximate="tanh"``.
    tile : int, "auto" or None
        Tokens of a tile. ``"auto"``: one tile if a tensor of [tokens, intermediate] takes at most 512 MiB, else tiles
        of about the same size in which one takes about 256 MiB. None: one tile.
    codes : Codes
        How to store gate and, without a recipe for ``x``, ``up`` and ``x``; for each tile by itself.

    Returns
    -------
    Tensor, [..., out]
        In the dtype of the products: autocast's, else that of ``x``.

    Raises
    ------
    TypeError
        If ``x`` or a tensor of a projection is not floating point.
    ValueError
        If shapes, devices or (outside autocast) dtypes do not match, ``tile`` or ``activation`` is none of the above,
        or with ``bits=None``: a matrix product of fewer rows may sum in another order, so a tile's results are not
        torch's to the bit.

    Notes
    -----
    Memory beside ``x``, the output, their gradients and the codes, with t tokens in a tile, an intermediate size of m
    and c bytes an element: forward holds ``2 t m c``; backward ``2 t m c`` with the kernels of SiLU, ``4 t m c``
    otherwise, and the sums of the gradients that are needed. If backward computes ``x`` again, the gradient of ``x`` is
    written over it, a tile at a time. Under torch.utils.checkpoint no codes are stored in a block in which nothing
    saves a tensor after the MLP: the rerun leaves gate and ``up`` to backward.

    Gradients of weights are summed over the tiles in float32 (float64 for float64) and rounded once, as inside one
    product. With ``n`` tokens and exact factors g and x, an element is off by at most
    ``(n + 1) * 2**-24 * sum(|g| * |x|)`` and the one rounding to the weight's dtype. A sum in bfloat16 would be rounded
    at each tile: of 32 tiles of random rows it was off by 0.68 % of the norm, where one product is off by 0.17 %.

    Low-rank additions are computed in the dtype of the products, also if their factors are wider. Differentiable once.

    Examples
    --------
    >>> import torch
    >>> from pyactcomp.functional import gated_mlp
    >>> gate, up, down = torch.randn(128, 64), torch.randn(128, 64), torch.randn(64, 128, requires_grad=True)
    >>> x = torch.randn(100, 64)
    >>> out = gated_mlp(x, gate, up, down, tile=32)
    >>> exact = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    >>> bool(torch.allclose(out, exact, rtol=1e-4, atol=1e-2))
    True
    """
    how = saving(codes)
    check_float_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("gated_mlp expects x of [..., in], got a tensor without dimensions")
    check_choice("activation", activation, ACTIVATIONS)
    check_tile(tile)
    if how.bits is None:
        raise ValueError("gated_mlp takes no bits=None: tiles are not torch's results to the bit; call the products")
    projections = [_checked("gate", gate, x.shape[-1], x), _checked("up", up, x.shape[-1], x)]
    middle = len(projections[0].weight)
    projections.append(_checked("down", down, middle, x))
    if len(projections[1].weight) != middle:
        raise ValueError(f"gated_mlp expects gate and up of one size, got {middle} and {len(projections[1].weight)}")
    dtype = x.dtype
    tensors: list[Tensor | None] = [t for p in projections for t in (p.weight, p.bias, p.a, p.b)]
    if torch.is_autocast_enabled(x.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    elif wrong := [p.weight.dtype for p in projections if p.weight.dtype is not dtype]:
        raise ValueError(f"x and the weights must have one dtype without autocast, got {dtype} and {wrong[0]}")
    count = x.shape[:-1].numel()
    rows = rows_of(tile, count, middle * dtype.itemsize) or max(count, 1)
    scales = projections[0].scale, projections[1].scale, projections[2].scale
    widths = x.shape[-1], middle, len(projections[2].weight)
    form = _Form(activation, scales, widths, rows, dtype, how)
    with torch.autocast(x.device.type, enabled=False):
        if recorded(x, *tensors):
            return cast(Tensor, _GatedMLP.apply(x, form, *tensors))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            flat = x.detach().reshape(-1, x.shape[-1])
            out = x.new_empty((*x.shape[:-1], widths[2]), dtype=dtype)
            target = out.view(-1, widths[2])
            form.forward(flat, form.products(tensors), form.unit(flat), target, (False, False, False))
            return out
