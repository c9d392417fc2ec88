"""Launches of the kernels of ``silu_mul``: forward, backward and recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from ....codec.kernels import triton as codec_kernels
from ....codec.layouts import dense, elementwise_layout, layout_of
from ....engine.recompute import Compute, mark_as_packed
from ....readers.observer import observer
from ....torch_private import dispatch_mode_active
from ...elementwise import FLAT_TILE, Elementwise, elementwise
from ...launch import buffer, written_bits
from ...saving import Recomputed, Saving
from . import kernels

# Without codes, 16 elements a thread take 25 instructions an element, 8 take 29. Between matrix products, where clocks
# are lower, the kernel reaches 0.94 of a copy's rate instead of 0.89; without the limit (91 registers a thread) 0.87.
_EXACT_WARPS = 2
_EXACT_REGISTERS = 80


def _owns_memory(x: Tensor) -> bool:
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes


def _silu_mul_exactly(on: Elementwise, *tensors: Tensor) -> None:
    exact = "silu_mul_exact_kernel"
    on.launch(kernels, exact, (), tensors, warps=_EXACT_WARPS, registers=_EXACT_REGISTERS)


PairBackward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def silu_mul(
    gate: Tensor, up: Tensor, up_again: Recomputed | None, inplace: bool, how: Saving
) -> tuple[Tensor, tuple[Tensor, ...], PairBackward, Compute]:
    """Return silu(gate) * up, the tensors to save, the backward (saved gate, up, output's gradient) and the recompute.

    Writing in place is safe: one thread alone reads an element, and writes it afterwards. Under a dispatch mode nothing
    is written in place, since the mode may hold tensors, as selective checkpointing does.

    Bytes moved per bfloat16 element with 8-bit codes: 8.125 forward, 8.125 backward, 4.125 to recompute. If
    ``up_again`` recomputes ``up``: about 1 less, 1 more and 1 more. Without codes: 6, 10 and 6.
    """
    gate = dense(gate)
    on = elementwise(gate)
    up_layout = layout_of(up)
    up = on.arrange(up)
    dtype = gate.dtype
    overwrite = inplace and _owns_memory(up) and not dispatch_mode_active()
    if overwrite:
        increment_version(up)
        out = up.data
    else:
        out = observer().empty_like(gate)
    exact = how.bits is None
    keeps_up = up_again is None
    # The kernels with codes take whole groups; the exact kernels take tiles without groups.
    groups = (how.bits, how.group_size, FLAT_TILE // how.group_size)
    form = () if exact else (*groups, keeps_up)
    operands = (gate, up) if keeps_up else (gate,)
    kept = operands if exact else tuple([buffer(x, how) for x in operands])
    if overwrite and keeps_up and not exact:
        mark_as_packed(kept[1], up, overwritten=True)
    if written_bits(how.bits):
        constants = (*groups, how.stochastic, keeps_up)
        tensors = (gate, up, out, kept[0], kept[-1])
        # The rare paths would take 80 registers. No limit for float32: the ordinary path takes more and would spill.
        registers = codec_kernels.REGISTERS if dtype.itemsize == 2 else None
        scalars = *how.keys, *how.second().keys
        on.launch(kernels, "silu_mul_forward_kernel", constants, tensors, scalars, registers=registers)
    else:
        _silu_mul_exactly(on, gate, up, out)

    def backward(kept_gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        kernel = "silu_mul_exact_backward_kernel" if exact else "silu_mul_backward_kernel"
        given = on.arrange(grad)
        up = up if up_again is None else on.arrange(up)
        # In place, the gradient of gate overwrites up and the gradient of up overwrites the incoming gradient.
        over = inplace and not dispatch_mode_active()
        grad_gate = up if over and up_again is not None else on.empty(dtype)
        grad_up = given if over else on.empty(dtype)
        tensors = (kept_gate, up, given, grad_gate, grad_up)
        on.launch(kernels, kernel, form, tensors)
        # Torch computes the gradient of gate from grad * up: the layout is that of the product.
        of_gate = on.layout if given is grad else elementwise_layout(up_layout, on.layout)
        return on.as_torch(grad_gate, grad, of_gate), on.as_torch(grad_up, grad)

    def compute(*given: Any) -> Tensor:
        *saved, dtype = given
        result = on.empty(dtype)
        sources = saved if up_again is None else (*saved, on.arrange(up_again.peek()))
        if exact:
            _silu_mul_exactly(on, *sources, result)
        else:
            on.launch(kernels, "silu_mul_recompute_kernel", form, (*sources, result))
        return result

    return out, kept, backward, compute


def silu_mul_over(gate: Tensor, up: Tensor, keeps: tuple[bool, bool], how: Saving) -> list[Tensor]:
    """Write silu(gate) * up over ``up``, both contiguous; return the codes of gate and of up, where they are kept.

    Of operands that belong to the caller alone, as the tiles of an MLP do. Up is kept only with gate.
    """
    on = elementwise(gate)
    if not keeps[0]:
        _silu_mul_exactly(on, gate, up, up)
        return []
    kept = [buffer(x, how) for x, keep in zip((gate, up), keeps, strict=True) if keep]
    constants = how.bits, how.group_size, FLAT_TILE // how.group_size, how.stochastic, keeps[1]
    registers = codec_kernels.REGISTERS if gate.dtype.itemsize == 2 else None
    scalars = *how.keys, *how.second().keys
    tensors = (gate, up, up, kept[0], kept[-1])
    on.launch(kernels, "silu_mul_forward_kernel", constants, tensors, scalars, registers=registers)
    return kept


def silu_mul_into(gate: Tensor, up: Tensor, out: Tensor, how: Saving | None) -> None:
    """Write silu(gate) * up to ``out``, given the codes of gate or, without ``how``, gate itself."""
    on = elementwise(up)
    if how is None:
        _silu_mul_exactly(on, gate, up, out)
    else:
        form = how.bits, how.group_size, FLAT_TILE // how.group_size, False
        on.launch(kernels, "silu_mul_recompute_kernel", form, (gate, up, out))


def silu_mul_gradients(gate: Tensor, up: Tensor, grad: Tensor, how: Saving | None) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, written over ``up`` and ``grad``; ``gate`` as in :func:`silu_mul_into`."""
    form = () if how is None else (how.bits, how.group_size, FLAT_TILE // how.group_size, False)
    kernel = "silu_mul_exact_backward_kernel" if how is None else "silu_mul_backward_kernel"
    elementwise(up).launch(kernels, kernel, form, (gate, up, grad, up, grad))
    return up, grad
