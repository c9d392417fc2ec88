"""PyTorch's databases of operators and of modules, with the samples that its own tests draw from them.

Importing them configures the process for PyTorch's tests; what other tests would notice of that is put back.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_FLAG = "__allow_nonbracketed_mutation_flag"


@contextmanager
def _configuration_kept() -> Iterator[None]:
    """Keep hypothesis' profile, the filters of warnings, and that flags of backends may be assigned."""
    # The module that is torch.backends stands before the one whose variable this is.
    variables = torch.backends.flags_frozen.__globals__
    may_assign = variables[_FLAG]
    settings = sys.modules["hypothesis"].settings if "hypothesis" in sys.modules else None
    profile = settings.get_current_profile_name() if settings is not None else ""
    try:
        with warnings.catch_warnings():
            # They import what they find installed, as numba, whose own warnings are no errors of ours.
            warnings.simplefilter("ignore")
            yield
    finally:
        variables[_FLAG] = may_assign
        if settings is not None:
            settings.load_profile(profile)


with _configuration_kept():
    try:
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db as operators
        from torch.testing._internal.common_modules import module_db as modules
        from torch.testing._internal.opinfo import core
    except ModuleNotFoundError as error:
        message = f"PyTorch's databases of samples import {error.name}: pip install --no-deps {error.name}"
        raise ModuleNotFoundError(message, name=error.name) from error

# Whoever draws samples has the stack searched, and the sources of all its frames, for a test of PyTorch's own.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None

__all__ = ["modules", "operators"]
