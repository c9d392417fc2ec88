"""Plans which blocks of a model keep, compress, offload or run again under a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from ..errors import PyactcompError
from ..estimate import question_of
from ..estimate.gpus import Gpu, device_of, gpu_of, reason_without_offload, room_of, with_measured_link
from ..estimate.process import Child
from ..layout import CHOICES, OFFLOAD
from ..sizes import budget_of
from .planner import Planner
from .result import Plan

__all__ = ["CHOICES", "Plan", "plan"]


def plan(
    model: str | Callable[..., Any] | Module,
    batch: Any = 8,
    *,
    budget: int | str,
    seq: int | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    dtype: str | None = None,
    autocast: str | None = None,
    gpu: str | None = None,
    choices: Sequence[str] | None = None,
    fuse_head: bool = False,
    seconds: Mapping[str, float] | None = None,
    progress: Callable[[str], object] | None = None,
) -> Plan:
    """Find what each block of a model does, so that a training step stays within a budget and takes the least time.

    A child process measures each choice, and then the plan, by training steps on tensors without memory, as
    :func:`pyactcomp.estimate` does; where the plan misses the budget, the next one is found with the difference.

    Parameters
    ----------
    model : Module, str or callable
        A model, not compressed and not checkpointed, which stays as it is; or the name or function of one, as
        :func:`pyactcomp.estimate` takes it.
    batch : object
        The largest batch of the training. For a Module the batch itself, on any device: a tensor, a dict of keyword
        arguments, or a tuple of arguments; otherwise the number of samples.
    budget : int or str
        The most bytes that tensors may take at once, as ``torch.cuda.max_memory_allocated`` counts them: a number, or
        a text like ``"20GiB"``. ``"auto"``: what is free on the GPU that the model is on, or all of ``gpu`` but CUDA's
        own memory. Allocators reserve more; the plan says how much.
    seq, dtype : optional
        As for :func:`pyactcomp.estimate`; not for a Module, which has its own.
    loss : callable, optional
        For a Module that does not return its loss: a function of the output, or of the output and the batch, at the top
        of a module.
    optimizer, autocast, gpu
        As for :func:`pyactcomp.estimate`. By default the GPU that the model is on, or else an H100.
    choices : sequence of str, optional
        What blocks may do: ``keep``, ``lossless``, ``int8``, ``checkpoint``, ``int8+checkpoint``, ``lossless+offload``,
        ``int8+offload``. By default those that ``seconds`` has, or else all; a Module that is not on a GPU, with no
        ``gpu`` named, can offload nothing.
    fuse_head : bool
        As for :func:`pyactcomp.compress`, in plans that compress to 8 bits.
    seconds : dict of str to float, optional
        What you measured: the seconds of a step in which all blocks do the same, by choice, for ``keep`` and each other
        choice. Without it the seconds are estimated from the GPU's data sheet, by which compression is never faster,
        and from the link's rate: measured on the model's GPU, else that of its generation of PCIe.
    progress : callable, optional
        Called with the name of each stage as it begins.

    Returns
    -------
    Plan
        For :func:`pyactcomp.compress`.

    Raises
    ------
    ValueError
        If ``budget`` is no size above 0.
    PyactcompError
        If no plan is within the budget, of those whose pinned memory the host of the model's GPU has: the error names
        the smallest budget that has one. And where :func:`pyactcomp.estimate` raises.

    Examples
    --------
    >>> import pyactcomp
    >>> plan = pyactcomp.plan(model, batch, budget="20GiB", optimizer="adamw:fused")  # doctest: +SKIP
    >>> print(plan)  # doctest: +SKIP
    >>> pyactcomp.compress(model, plan=plan)  # doctest: +SKIP
    """
    reason = None if gpu is not None else reason_without_offload(model)
    if choices is None:
        choices = tuple(seconds or (each for each in CHOICES if reason is None or not each.endswith(OFFLOAD)))
    wrong = [each for each in choices if each not in CHOICES]
    if isinstance(choices, str) or not choices or wrong:
        raise PyactcompError(f"choices is a list of {', '.join(CHOICES)}; got {choices!r}")
    offloads = any(each.endswith(OFFLOAD) for each in choices)
    if offloads and reason is not None:
        raise PyactcompError(f"no block can offload: {reason}. Name the GPU by gpu=, or move the model to it first")
    if seconds is not None:
        named = {"keep", *choices}
        if set(seconds) != named or not all(0 < each < float("inf") for each in seconds.values()):
            raise PyactcompError(f"seconds gives numbers above 0 for {', '.join(sorted(named))}; got {dict(seconds)!r}")
    limit = budget_of(budget)
    card = gpu_of(gpu, model)
    limit = _free(card, model) if limit is None else limit
    host = None
    if offloads and gpu is None:
        card, host = with_measured_link(card, model), room_of(model)
    question = question_of(model, batch, seq, optimizer, dtype, autocast, card, loss)
    with Child(question) as child:
        tell = progress or (lambda _: None)
        return Planner(child, question, tuple(choices), fuse_head, tell, seconds, host).within(limit)


def _free(card: Gpu, model: object) -> int:
    """Return the bytes that tensors may take: on the GPU that a model is on, or else on an empty one."""
    device = device_of(model)
    if device is None:
        return card.memory - card.context
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
