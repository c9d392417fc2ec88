"""Kernels of the forms between codes and the tensor as it is: 16 bits an element, or one bit for a comparison."""

from __future__ import annotations

import torch

from ..codec import bind_form
from ..codec.kernels import Kernel
from ..readers.forms import ARTANH, BFLOAT16, LOG, LOG_PROBABILITY, PROBABILITY, SCALED, Form

_ENCODINGS = {
    BFLOAT16: "bfloat16",
    LOG: "float16",
    LOG_PROBABILITY: "log_probability",
    PROBABILITY: "probability",
    ARTANH: "artanh",
    SCALED: "scaled",
}


def form_kernel(form: Form, impl: str, dtype: torch.dtype, device: torch.device) -> Kernel:
    """Return the kernel of a 16-bit form, or of the answers to a comparison.

    Raises
    ------
    ImplementationUnavailableError
        If the implementation does not serve the device.
    """
    if form.comparison is not None:
        return bind_form(impl, "comparison", dtype, device, comparison=form.comparison)
    return bind_form(impl, _ENCODINGS[form], dtype, device)
