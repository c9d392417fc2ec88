"""Estimates the memory of training a model without a GPU: peaks, their tensors, and batches that fit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import Module

from ..errors import PyactcompError
from .gpus import Gpu, gpu_named
from .largest import largest_batch, longest_seq
from .optimizers import maker
from .process import Child
from .result import ALLOCATORS, MODES, Estimate, ModeEstimate, Question
from .sending import send

__all__ = ["ALLOCATORS", "MODES", "Estimate", "ModeEstimate", "estimate"]

DTYPES = ("float32", "bfloat16", "float16")
_USUAL = ("plain", "int8", "int8+checkpoint")


def estimate(
    model: str | Callable[..., Any],
    *,
    batch: int = 8,
    seq: int | None = None,
    optimizer: str = "adamw",
    dtype: str | None = None,
    autocast: str | None = None,
    modes: Sequence[str] | None = None,
    gpu: str = "h100",
    largest: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Estimate:
    """Estimate the memory of training a model, without a GPU, weights or a download.

    Three steps of training run in a child process on tensors that have a CUDA device and an address, and no memory.
    Their allocations are replayed through PyTorch's allocator and this package's.

    Parameters
    ----------
    model : str or callable
        ``"llama"`` or another model type of transformers; the path of a ``config.json`` or of its folder;
        ``"timm:resnet50"``; ``"module:function"`` or ``"file.py:function"``; or the function itself, defined at the top
        of a module. The function takes ``batch``, and ``seq`` if there are sequences, and returns ``(model, batch)``,
        or ``(model, batch, loss)`` where the model does not return its loss: a function of the output (and the batch).
    batch : int
        Samples of one step.
    seq : int, optional
        Tokens of a sequence; by default 1024, or as many as the model has positions.
    optimizer : str
        ``adamw``, ``adamw:fused``, ``adamw:foreach``, ``adamw8bit``, ``sgd``, ... .
    dtype : {"float32", "bfloat16", "float16"}, optional
        Of the weights; by default as the model is built.
    autocast : {"bfloat16", "float16"}, optional
        Of the regions of :class:`torch.autocast`; by default none.
    modes : sequence of str, optional
        Of ``plain``, ``lossless``, ``int8``, ``checkpoint``, ``int8+checkpoint``; ``int8+head`` and
        ``int8+head+checkpoint`` are :func:`pyactcomp.compress` with ``fuse_head=True``. ``+offload`` after a mode with
        ``lossless`` or ``int8`` is its ``offload=1.0``: all stored bytes leave the GPU. ``offload="auto"`` takes a part
        of that, by waits that only a GPU shows. By default ``plain``, ``int8`` and ``int8+checkpoint``, without those
        that the model does not support.
    gpu : str
        ``h100``, ``h200``, ``a100-40``, ``a100-80``, ``4090``, ``3090``, ``l4``, ``t4``, or a size such as ``24GiB``.
    largest : bool
        Whether to look for the largest batch and the longest sequence that fit, by a few more runs of each mode.
    progress : callable, optional
        Called with the name of each stage as it begins.

    Returns
    -------
    Estimate

    Raises
    ------
    PyactcompError
        If an argument has no meaning, the model is not found, or it cannot run without values; the error says where.
    ImplementationUnavailableError
        If the library of phantom tensors can neither be loaded nor compiled.

    Examples
    --------
    >>> import pyactcomp
    >>> found = pyactcomp.estimate("bert", batch=8, seq=128, modes=["plain"], gpu="24GiB")  # doctest: +SKIP
    >>> found["plain"].fits["pyactcomp"]  # doctest: +SKIP
    True
    """
    from .recorded import estimated  # the replay needs the native module, which compression does not

    if isinstance(model, Module):
        raise PyactcompError(
            f"model is a name or a function that builds the model; got a {type(model).__name__}, which pyactcomp.plan "
            "takes"
        )
    if isinstance(modes, str) or (modes is not None and not modes):
        raise PyactcompError(f"modes is a list of {', '.join(MODES)}; got {modes!r}")
    for mode in modes or ():
        if mode not in MODES:
            raise PyactcompError(f"mode is one of {', '.join(MODES)}; got {mode!r}")
    card = gpu_named(gpu)
    question = question_of(model, batch, seq, optimizer, dtype, autocast, card)
    tell = progress or (lambda _: None)
    tell("loading the model")
    found: dict[str, ModeEstimate] = {}
    notes = []
    with Child(question) as child:

        def run(mode: str, size: int, length: int | None) -> ModeEstimate:
            return estimated(child.record(mode, size, length), mode, card)

        # Before the searches, so a mode that the model does not support ends the call soon.
        for mode in modes or _USUAL:
            tell(mode)
            try:
                found[mode] = run(mode, batch, seq)
            except PyactcompError as error:
                if modes is not None or not found:
                    raise
                notes.append(f"{mode} is left out: {str(error).splitlines()[0]}")
        if largest:
            for mode, one in found.items():
                tell(f"{mode}: the largest batch")
                one = largest_batch(one, partial(run, mode), card)
                if one.seq is not None:
                    tell(f"{mode}: the longest sequence")
                    one = longest_seq(one, partial(run, mode), card)
                found[mode] = one
    return Estimate(str(question.model), card.name, card.memory, tuple(found.values()), tuple(notes))


def question_of(
    model: str | Callable[..., Any] | Module,
    batch: Any,
    seq: int | None,
    optimizer: str,
    dtype: str | None,
    autocast: str | None,
    gpu: Gpu,
    loss: Callable[..., Any] | None = None,
) -> Question:
    """Return what a child process is asked about a training, or raise :class:`PyactcompError`.

    A Module goes to the child with ``batch`` and ``loss``; otherwise ``batch`` is a number.
    """
    if isinstance(model, Module):
        for name, value in (("seq", seq), ("dtype", dtype)):
            if value is not None:
                raise PyactcompError(f"a model has its own {name}: leave out {name}={value!r}")
        _check(1, None, autocast=autocast, optimizer=optimizer)
        return Question(send(model, batch, loss), 1, None, optimizer, None, autocast, gpu)
    if loss is not None:
        raise PyactcompError("loss is for a Module: a function that builds the model returns (model, batch, loss)")
    _check(batch, seq, dtype=dtype, autocast=autocast, optimizer=optimizer)
    return Question(model if isinstance(model, str) else _place_of(model), batch, seq, optimizer, dtype, autocast, gpu)


def _check(
    batch: object,
    seq: object,
    *,
    dtype: str | None = None,
    autocast: str | None,
    optimizer: str,
) -> None:
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise PyactcompError(f"{name} is a whole number of at least 1; got {value!r}")
    for name, value, accepted in (("dtype", dtype, DTYPES), ("autocast", autocast, DTYPES[1:])):
        if value is not None and value not in accepted:
            raise PyactcompError(f"{name} is one of {', '.join(accepted)}; got {value!r}")
    maker(optimizer)


def _place_of(function: Callable[..., Any]) -> str:
    """Return where the child process finds a function."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if not name.isidentifier() or not module:
        raise PyactcompError(
            f"model is a name or a function at the top of a module, which another process can import; got {function!r}"
        )
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            raise PyactcompError(f"the function {name} is typed into a session: put it into a file")
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"
