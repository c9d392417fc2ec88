"""The packing of one configuration, shared by its forwards: kernels, forms and seeds."""

from __future__ import annotations

import functools
import sys
import warnings
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from ..codec import bind, bind_form
from ..codec.kernels import Kernel
from ..codec.layouts import layout_of
from ..codec.seeds import Seeds
from ..config import Config
from ..errors import ImplementationUnavailableError
from ..readers import rule
from ..readers.forms import (
    AS_CODES,
    BITS,
    CODES,
    ITSELF,
    POSITIVE,
    RELATIVE,
    SCALED,
    Form,
    Reading,
)
from ..readers.rule import Maker, Partner
from ..torch_private import never_traced
from . import saved
from .halves import form_kernel
from .marks import compiled_mark
from .offloading import offloading_of

# Tensors of fewer elements are kept. With so few nothing averages out: where a program interpolates between two
# numbers, their codes moved the gradient by 5 %.
FEWEST = 4
HALF_BYTES = 2

CARRIER: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.float64: torch.float32,
    torch.bool: torch.bool,
}
"""The dtypes to pack, each with the dtype read by the kernel."""


class Packing:
    """Packs tensors as one configuration says: kernels, forms, seeds, and parameter names for errors.

    Attributes
    ----------
    offloads_blocks : bool
        Whether stored bytes leave the device from certain modules alone: see :meth:`.Frame.enter_offloaded`.
    """

    def __init__(self, config: Config, seeds: Seeds | None = None, tape: int = 0) -> None:
        self.config = config
        self.seeds = Seeds(config.seed) if seeds is None else seeds
        self.stochastic = config.rounding == "stochastic"
        self.lossless = config.mode == "lossless"
        self.warned_of_compile = False
        self.root: ref[Module] | None = None
        self.offloading = offloading_of(config.offload, config.min_bytes, tape)
        self.offloads_blocks = False

    @functools.cached_property
    def decisions(self) -> saved.Decisions:
        """What the library remembers of :meth:`form_for`, :meth:`storing` and :meth:`narrow_storing`."""
        return saved.Decisions()

    @never_traced
    def tape(self, device: torch.device) -> object:
        """Return the tape for stored bytes that leave a device, None where none do."""
        return None if self.offloading is None else self.offloading.tape(device)

    @never_traced
    def next_seed(self) -> int:
        """Return the seed of the next tensor to round stochastically."""
        return self.seeds.next()

    @never_traced
    def storing(self, tensor: Tensor, form: Form) -> saved.Storing | None:
        """Return how to store a tensor in a form; booleans always take one bit an element.

        None if the configured implementation does not serve the tensor's device.
        """
        dtype, device, numel = tensor.dtype, tensor.device, tensor.numel()
        try:
            kernel = self._new_kernel(dtype, device, form)
        except ImplementationUnavailableError:
            return None
        carrier = CARRIER[dtype] if form.need == CODES else dtype
        return saved.Storing(dtype, carrier, form, kernel, kernel.packed_nbytes(numel))

    @never_traced
    def narrow_storing(self, tensor: Tensor, dtype: torch.dtype) -> saved.Storing | None:
        """Return how to store the result of a cast from a narrower dtype without loss, or None as :meth:`storing`."""
        try:
            kernel = bind_form(self.config.impl, "cast", tensor.dtype, tensor.device, dtype)
        except ImplementationUnavailableError:
            return None
        return saved.Storing(tensor.dtype, tensor.dtype, ITSELF, kernel, kernel.packed_nbytes(tensor.numel()))

    def _new_kernel(self, dtype: torch.dtype, device: torch.device, form: Form) -> Kernel:
        config = self.config
        if dtype is torch.bool:
            return bind(config.impl, dtype, 1, config.group_size, self.stochastic, False, device)
        if form.need in (RELATIVE, BITS):
            return form_kernel(form, config.impl, dtype, device)
        carrier, positive = CARRIER[dtype], form is POSITIVE
        return bind(config.impl, carrier, config.bits, config.group_size, self.stochastic, positive, device)

    @never_traced
    def form_for(self, tensor: Tensor, reading: Reading, maker: Maker, partner: Partner) -> Form:
        """Return the form in which to store an operand: the rule's, as the configuration and the dtype allow."""
        config = self.config
        form = rule.form(reading, maker, partner, layout_of(tensor), config.group_size)
        if form.need in (CODES, RELATIVE) and tensor.numel() < FEWEST:
            return ITSELF
        if not reading.known and config.unknown == "int8":
            return AS_CODES
        if form is SCALED and config.attention == "int8":
            return AS_CODES
        if form.need == RELATIVE and tensor.itemsize <= HALF_BYTES:
            return ITSELF
        if form.comparison is not None and not form.comparison.is_exact_in(tensor.dtype):
            return ITSELF
        if self.lossless and form.need >= CODES:
            return ITSELF
        return form

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's qualified name, for an error."""
        root = self.root() if self.root is not None else None
        for name, candidate in root.named_parameters() if root is not None else ():
            if candidate is parameter:
                return f"parameter {name!r}"
        return f"a parameter of shape {tuple(parameter.shape)}"

    def warn_of_compiled_graph(self) -> None:
        """Warn, once, if the tensor being packed is saved by a compiled graph; not if the compiler has."""
        root = self.root() if self.root is not None else None
        mark = compiled_mark(type(getattr(root, "_orig_mod", root)))
        if mark is not None and mark.graphs.explained:
            self.warned_of_compile = True
            return
        frame = sys._getframe()
        for _ in range(6):
            caller = frame.f_back
            if caller is None:
                return
            frame = caller
            if "_functorch" in frame.f_code.co_filename:
                self.warned_of_compile = True
                warnings.warn(
                    "a graph compiled by torch.compile runs under pyactcomp's hooks: results are right, but each "
                    "tensor that the graph saves is kept as it is, since activations and masks look alike. Leave the "
                    "modules that hold most activations eager, or let torch.compile choose the tensors to save.",
                    stacklevel=3,
                )
                return
