"""What the library leaves to Python since it happens rarely: errors, warnings, restoring on another stream."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..codec import layouts
from ..codec.kernels import Kernel
from ..codec.layouts import Layout
from ..errors import PyactcompError
from ..readers.forms import ARTANH, AS_CODES, BFLOAT16, GAINED, ITSELF, POSITIVE, PROBABILITY, Form
from ..readers.lookup import CHECKPOINT, CHECKPOINTED, of_no_operator
from ..readers.table import NOT_DROPPED
from ..torch_private import current_raw_stream
from ..torch_private.distributed import local_tensor
from . import reasons
from .saved import NAMES, for_library

NAMES.update({name: value for name, value in vars(reasons).items() if name.isupper()})
NAMES.update(ITSELF=ITSELF, AS_CODES=AS_CODES, GAINED=GAINED, BFLOAT16=BFLOAT16)
NAMES.update(CHECKPOINT=CHECKPOINT, CHECKPOINTED=CHECKPOINTED)
NAMES.update(NOT_DROPPED=NOT_DROPPED, current_raw_stream=current_raw_stream, of_no_operator=of_no_operator)
# Forms for the result of one operator: the rest of the base may be out of their range, or share a group that rounds a
# small positive element to zero.
NAMES.update(OF_ONE_RESULT=frozenset((POSITIVE, PROBABILITY, ARTANH)))


class ModifiedError(RuntimeError):
    """Autograd's own error for a tensor written to after the forward."""


NAMES["MODIFIED_ERROR"] = ModifiedError


def _modified(what: str, version: int, expected: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}, is at version {version}; expected version {expected} instead."
    )


@for_library
def check_version(tensor: Tensor, version: int) -> None:
    """Raise autograd's own error if the tensor's version is no longer ``version``."""
    if tensor._version != version:
        raise ModifiedError(_modified(f"[{tensor.type()} {list(tensor.shape)}]", tensor._version, version))


@for_library
def refuse_modified(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], version: int, expected: int
) -> None:
    """Raise autograd's own error for a tensor, described by all but its memory, that was written to."""
    kind = torch.empty(0, dtype=dtype, device=device).type()
    raise ModifiedError(_modified(f"[{kind} {list(shape)}]", version, expected))


@for_library
def recompute(compute: Callable[..., Tensor], stored: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Recompute the output of a function written in Python."""
    return compute(*stored, dtype)


@for_library
def refuse_unheld_output(error: ModifiedError) -> None:
    """Raise the error of an operand that was written to, where plain torch would have read the output."""
    raise ModifiedError(
        f"{error} pyactcomp recomputes an output from this tensor instead of storing the output: write out of place, "
        "hold on to that output until backward, or name the module in skip."
    )


@for_library
def refuse_changed_parameter(parameter: Tensor, expected: int, dtype: torch.dtype, names: Any) -> None:
    """Raise the error for autocast's copy of a parameter that changed before backward."""
    raise PyactcompError(
        _modified(names.name_of(parameter), parameter._version, expected)
        + f" Autocast's {dtype} copy of the parameter was not kept, and the parameter has changed "
        "between forward and backward: run backward before the optimizer's step, or keep the copies with "
        "keep_weight_copies=True."
    )


@for_library
@functools.cache
def warn_of_differentiated_gradients() -> None:
    """Warn that a gradient used as a value is off; once a process, or again after ``cache_clear()``."""
    warnings.warn(
        "a backward with create_graph=True reads tensors in codes or 16 bits: its gradients are off by up to 1 %. A "
        "loss that reads them as values (forces, gradient penalties, inner steps of meta-learning) is off too, and its "
        "gradients are off by more, the more the smaller the loss is. Compress such a model with mode='lossless', or "
        "skip the modules.",
        stacklevel=2,
    )


_BACKWARD = frozenset({"torch.autograd.graph", "torch.autograd"})


@for_library
def refuse_reader(node: str, form: Form, shape: tuple[int, ...]) -> None:
    """Raise PyactcompError for a node that needs more than a form, if backward itself unpacks.

    Code in a node may look at another node's saved tensors.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_globals.get("__name__") in _BACKWARD:
        raise PyactcompError(
            f"{node} needs a saved tensor of shape {shape} more exactly than in the form it was stored in, "
            f"{form.name}. Please report this; until then pass skip=[...] with the module that runs the operator, or "
            "mode='lossless'."
        )


@for_library
def encode(kernel: Kernel, source: Tensor, out: Tensor, seed: int) -> None:
    """Pack by a kernel in Python."""
    kernel.encode(source, out, seed)


@for_library
def decode(kernel: Kernel, packed: Tensor, out: Tensor) -> None:
    """Restore by a kernel in Python."""
    kernel.decode(packed, out)


@for_library
def refuse_failed_kernel(text: str) -> None:
    """Raise the error of a kernel that failed."""
    raise PyactcompError(f"a kernel of the codec failed: {text}")


@for_library
def refuse_failed_copy(text: str) -> None:
    """Raise the error of a copy between device and host that failed."""
    raise PyactcompError(f"a copy of stored bytes between device and host failed: {text}")


@for_library
def refuse_capture() -> None:
    """Raise the error of a copy that a graph being captured would contain."""
    raise PyactcompError(
        "a CUDA graph is being captured, and offload would copy stored bytes to the host in it: a replay would write "
        "to host memory that other steps use meanwhile. Capture a model compressed without offload, or run this one "
        "without the graph."
    )


@for_library
def refuse_lost_handle(found: Tensor) -> None:
    """Raise the error of a compiled graph's backward that got another tensor than its forward saved."""
    raise PyactcompError(
        f"the backward of a compiled graph got a tensor of shape {tuple(found.shape)}, and not the handle that its "
        "forward saved for a tensor sent to the host: saved-tensor hooks, such as torch.autograd.graph.save_on_cpu, "
        "have copied it. Drop the hooks, or compress without offload"
    )


@for_library
def warn_of_short_host(pinned: int, available: int) -> None:
    """Warn that host memory is too short for the stored bytes; once a configuration."""
    warnings.warn(
        f"offload found no more pinned host memory: {pinned / 2**30:.1f} GiB are pinned, {available / 2**30:.1f} GiB "
        "of the host's memory are available, of which it takes at most 60 %. The other stored bytes stay on the "
        "device. Give the process more host memory (the container's limit, `ulimit -l`), or ask for less with "
        "offload=0.5 or offload='8GiB'.",
        stacklevel=2,
    )


@for_library
def layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    """Return the layout of a stored form."""
    return layouts.layout_with(torch.Size(shape), stride)


@for_library
def owned_tensor(tensor: Tensor) -> Tensor | None:
    """Return the local tensor of a parameter or buffer of another class; None for a lazy module's, without memory."""
    return None if is_lazy(tensor) else local_tensor(tensor)


@for_library
def warn_of_compiled_graph(packing: Any) -> None:
    """Warn of a compiled graph that saves tensors under the hooks, once a configuration."""
    if not packing.warned_of_compile:
        packing.warn_of_compiled_graph()


@for_library
def make_on_another_stream(form: Any, index: int, packing_stream: int) -> Tensor:
    """Restore a shared form on a stream other than the packing stream."""
    current = torch.cuda.current_stream(index)
    if packing_stream == 0:
        packing: Any = torch.cuda.default_stream(index)
    else:
        packing = torch.cuda.ExternalStream(packing_stream, device=index)  # type: ignore[no-untyped-call]
    current.wait_stream(packing)
    made: Tensor = form.make()
    if not form.record_stream(current):
        # Freed inputs return to the packing stream's pool and may still be read.
        packing.wait_stream(current)
    return made
