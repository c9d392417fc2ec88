"""Why training compresses nothing: one warning a model, and the words of the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from . import reasons
from .marks import compiled_mark
from .record import Recorder
from .saved import PLAIN

NOT_YET = "nothing was recorded yet: run a training step first"
DISABLED = "nothing was recorded yet: PYACTCOMP_DISABLE=1 switches everything off"
NO_GRAD_MODE = "nothing was recorded yet: gradients were disabled in each forward so far, as under torch.no_grad()"
TRANSFORMED = (
    "nothing was recorded yet: torch.func, forward-mode differentiation or disabled hooks keep tensors as they are"
)
NOTHING_SAVED = (
    "nothing was recorded yet: the forward saved no tensor for backward, as where neither a parameter nor the input "
    "requires grad"
)
OTHER_CALLS = (
    "nothing was compressed: a gradient has reached a parameter of this {model}, and its forward has not run since "
    "pyactcomp.compress, which covers the forward alone: other methods and submodules called by the program save their "
    "tensors uncompressed. Put the step into `with pyactcomp.compressed(model):`, or compress the module that is called"
)
OF_FX = (
    ". A torch.fx.GraphModule that is compiled itself runs without our hooks: compress and compile a module around it, "
    "such as torch.nn.Sequential(model)"
)
# What to do about tensors kept for a reason, where something can be done.
_ADVICE = {
    reasons.SMALL: "pass a smaller min_bytes, or run a larger batch",
    reasons.SKIPPED: "see the option skip",
}
_MIB = 2**20

_watching: WeakSet[GradientWithoutForward] = WeakSet()


def stepped_aside(hooks: str) -> str:
    """Return the words for a forward inside other hooks, with ``on_conflict="skip"``."""
    return f"nothing was recorded yet: on_conflict='skip', and other hooks are active around the forward ({hooks})"


def silence_of(recorder: Recorder, lossless: bool) -> str | None:
    """Return why a recorded forward compressed nothing, or None if it did or had nothing to compress."""
    kept: dict[str, tuple[int, int]] = {}
    for tensor in recorder.saved:
        if tensor.kept is None:
            return None
        if tensor.kept not in reasons.ALIVE_ANYWAY | reasons.HOLDS_NOTHING:
            count, nbytes = kept.get(tensor.kept, (0, 0))
            kept[tensor.kept] = count + 1, nbytes + tensor.saved_bytes
    if recorder.hooks_inside is not None and not (lossless and kept):
        return (
            f"nothing was compressed: saved-tensor hooks opened inside the model ({recorder.hooks_inside}) take the "
            "tensors first, and of two pairs only the innermost runs; use one of the two"
        )
    if lossless or not kept:
        return None
    reason, (count, nbytes) = max(kept.items(), key=lambda item: item[1][1])
    advice = f"; {_ADVICE[reason]}" if reason in _ADVICE else ""
    total = sum(each for each, _ in kept.values())
    return (
        f"nothing was compressed: {count} of {total} tensors ({nbytes / _MIB:.2f} MiB) are kept with the reason "
        f"{reason!r}{advice}"
    )


class GradientWithoutForward:
    """Waits for a gradient of a compressed model whose forward has not run, and tells of it, once.

    Parameters
    ----------
    model : Module
        Gets a hook on each parameter that requires grad, until :meth:`stop`.
    tell : method of one argument, of an object that is not kept alive
        Called with the words.
    """

    def __init__(self, model: Module, tell: Callable[[str], object]) -> None:
        self._model, self._tell = ref(model), WeakMethod(tell)
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if type(parameter) in PLAIN and parameter.requires_grad and not is_lazy(parameter)
        ]
        _watching.add(self)

    def __call__(self, parameter: Tensor) -> None:
        """Tell, unless a graph of torch.compile runs in place of the forward: the hook of a parameter."""
        if torch.compiler.is_compiling():  # a graph of the backward, which compiled autograd makes, cannot remove hooks
            return
        self.stop()
        model, tell = self._model(), self._tell()
        if model is None or tell is None or not model.training or os.environ.get("PYACTCOMP_DISABLE") == "1":
            return
        mark = compiled_mark(type(getattr(model, "_orig_mod", model)))
        if mark is None or not mark.graphs.explained:
            of_fx = OF_FX if isinstance(getattr(model, "_orig_mod", model), torch.fx.GraphModule) else ""
            tell(OTHER_CALLS.format(model=type(model).__name__) + of_fx)

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        _watching.discard(self)


def stop_watches() -> None:
    """Stop all watches: ``compressed`` is about to cover every call in a step."""
    for watch in list(_watching):
        watch.stop()
