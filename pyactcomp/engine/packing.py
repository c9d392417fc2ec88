"""The packing of one configuration, shared by its forwards: kernels, forms and seeds."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from ..codec import bind
from ..codec.kernels import Kernel
from ..codec.layouts import layout_of
from ..codec.seeds import Seeds
from ..config import Config
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
from ..readers.observer import observer
from ..readers.rule import Maker, Partner
from .halves import form_kernel
from .marks import compiled_mark
from .policy import CARRIER
from .saved import Storing

# So few elements are kept: an error of one of them is the error of the gradient, 5 % for a pair that is interpolated.
FEWEST = 4
HALF_BYTES = 2
# Cached shapes; the cache is cleared when full, since old shapes are useless to a model with new shapes each step.
_MOST_STORINGS = 4096


class Packing:
    """Packs tensors as one configuration says: kernels, forms, seeds, and parameter names for errors."""

    def __init__(self, config: Config, seeds: Seeds | None = None) -> None:
        self.config = config
        self.seeds = Seeds(config.seed) if seeds is None else seeds
        self.stochastic = config.rounding == "stochastic"
        self.lossless = config.mode == "lossless"
        self.warned_of_compile = False
        self.root: ref[Module] | None = None
        self._kernels: dict[tuple[torch.dtype, torch.device, Form], Kernel] = {}
        self._storings: dict[tuple[Hashable, Form], Storing] = {}
        self._layout_key = observer().layout_key

    def storing(self, tensor: Tensor, form: Form) -> Storing:
        """Return how to store a tensor in a form, cached by shape; booleans always take one bit an element.

        Raises
        ------
        ImplementationUnavailableError
            If the configured implementation does not serve the tensor's device.
        """
        key = self._layout_key(tensor), form
        found = self._storings.get(key)
        if found is None:
            if len(self._storings) >= _MOST_STORINGS:
                self._storings.clear()
            found = self._storings[key] = self._new_storing(tensor, form)
        return found

    def _new_storing(self, tensor: Tensor, form: Form) -> Storing:
        dtype, device, numel = tensor.dtype, tensor.device, tensor.numel()
        kernel = self._kernels.get((dtype, device, form))
        if kernel is None:
            kernel = self._kernels[dtype, device, form] = self._new_kernel(dtype, device, form)
        carrier = CARRIER[dtype] if form.need == CODES else dtype
        return Storing.of(layout_of(tensor), dtype, carrier, form, kernel, kernel.packed_nbytes(numel))

    def _new_kernel(self, dtype: torch.dtype, device: torch.device, form: Form) -> Kernel:
        config = self.config
        if dtype is torch.bool:
            return bind(config.impl, dtype, 1, config.group_size, self.stochastic, False, device)
        if form.need in (RELATIVE, BITS):
            return form_kernel(form, config.impl, dtype, device)
        carrier, positive = CARRIER[dtype], form is POSITIVE
        return bind(config.impl, carrier, config.bits, config.group_size, self.stochastic, positive, device)

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
        for _ in range(4):
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
