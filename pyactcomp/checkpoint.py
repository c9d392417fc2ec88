"""Checkpointed blocks whose inputs are stored in 8 bits: checkpoint, use_checkpoint."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from types import MethodType, TracebackType
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module

from .config import Config, check_offload
from .engine.frame import frame_of
from .engine.inputs import InputsFrame
from .engine.offloading import refuse_without_link
from .engine.packing import Packing
from .engine.record import name_of_hooks
from .engine.session import close_abandoned, close_frame
from .errors import HookConflictError, check_choice
from .readers.observer import prepare, transformed
from .torch_private import saved_tensor_hooks_enabled, top_saved_tensor_hooks, under_checkpoint

Store = Literal["int8", "exact"]
STORES = ("int8", "exact")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    store: Store = "int8",
    offload: bool | float | str = False,
    use_reentrant: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a function without saving its activations, as torch.utils.checkpoint, and store its inputs in 8 bits.

    Backward restores the inputs and runs ``function`` again, so each checkpointed block holds 8.5 bits an element of
    its input from forward to backward, instead of 16 or 32.

    Parameters
    ----------
    function : callable
        Mostly a module. Takes ``*args`` and the keyword arguments that torch's function does not take itself.
    *args
        Tensors of any shape and dtype, and other values. An input is stored in codes if it is a floating-point tensor
        that requires grad, is no leaf, takes at least 128 KiB, and the function takes no decision from values (a top-k,
        a comparison); other inputs stay as they are. Tensors in keyword arguments and in lists stay too, as in torch.
    store : {"int8", "exact"}
        How to store the inputs. With ``"exact"`` gradients are bitwise those of torch's function: booleans take one
        bit, a float that was cast from a narrower dtype takes that dtype, and the rest stays.
    offload : False, "auto", float or str
        Move the stored inputs to pinned host memory, and back before backward reads them, as in
        :func:`pyactcomp.compress`. All calls with one value share the host memory.
    use_reentrant : bool
        As in torch, where you have to pass it; here ``False`` without.
    **kwargs
        ``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug`` and ``early_stop`` as in torch; any
        other is passed to ``function``, if not reentrant.

    Returns
    -------
    object
        What ``function`` returns.

    Raises
    ------
    TypeError
        If ``function`` cannot be called.
    ValueError
        For another ``store`` or ``offload``, or with ``offload`` a tensor that is not on a GPU.
    HookConflictError
        If other saved-tensor hooks are active, such as ``save_on_cpu``: of two pairs only the innermost runs.

    Notes
    -----
    Inside a model compressed by :func:`pyactcomp.compress` in int8, ``store="int8"`` leaves the inputs to the model's
    own hooks and options, and to its ``offload``, if it has one. Inside another checkpointed function torch saves no
    inputs, so ``store`` has no effect there. A graph of torch.compile that contains the whole call saves the inputs
    itself, in codes only if the model is compressed by :func:`pyactcomp.compress`; compile ``function`` instead.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> block = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
    >>> x = 2 * torch.randn(256, 512, requires_grad=True)
    >>> pyactcomp.checkpoint(block, x).sum().backward()
    """
    check_choice("store", store, STORES)
    check_offload(offload)
    refuse_without_link(offload, (each.device for each in args if isinstance(each, Tensor)))
    if not callable(function):
        raise TypeError(f"checkpoint expects a function or a module, and its arguments after it; got {function!r}")
    run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
    return _run(run, _Storing(store, offload), function, *args, **kwargs)


class _Storing(NamedTuple):
    """How to store the inputs of checkpointed blocks."""

    store: Store
    offload: bool | float | str

    def __repr__(self) -> str:
        return f"store={self.store!r}" + (f", offload={self.offload!r}" if self.offload else "")


def _run(run: Callable[..., Any], how: _Storing, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a checkpoint function inside hooks that store what the function saves of ``args``."""
    frame = None if torch.compiler.is_compiling() else _frame_for(how)
    if frame is None:
        return run(function, *args, **kwargs)
    frame.open(None)
    try:
        out = run(function, *args, **kwargs)
    finally:
        close_frame(frame)
    if not frame.inputs and not frame.others and any(isinstance(each, Tensor) and each.requires_grad for each in args):
        raise HookConflictError(
            f"{how!r} stored nothing: the checkpoint function {getattr(run, '__qualname__', run)} opens "
            "saved-tensor hooks of its own, which take the inputs first, as with offload=True in transformers. Enable "
            "checkpointing without them"
        )
    return out


def _frame_for(how: _Storing) -> InputsFrame | None:
    """Return the hooks to open around a checkpoint function, or None where they have nothing to store."""
    if not torch.is_grad_enabled() or os.environ.get("PYACTCOMP_DISABLE") == "1":
        return None
    prepare()
    # Inside another checkpointed function, torch drops what is saved and reruns the function: so must we.
    if not saved_tensor_hooks_enabled() or transformed() or under_checkpoint():
        return None
    close_abandoned()
    top = top_saved_tensor_hooks()
    around = None if top is None else frame_of(top[0])
    if top is not None and around is None:
        raise HookConflictError(
            f"other saved-tensor hooks are active around this checkpoint ({name_of_hooks(top)}), and of two pairs only "
            "the innermost runs: use one of the two, torch.utils.checkpoint.checkpoint inside these hooks or "
            "pyactcomp.checkpoint without them"
        )
    packing = _packing(how)
    if around is not None and around.packing.lossless == packing.lossless:
        if around.packing.offloading is not None or not how.offload:
            return None
    return InputsFrame(packing, around)


@functools.cache
def _packing(how: _Storing) -> Packing:
    return Packing(Config(mode="int8" if how.store == "int8" else "lossless", fuse=False, offload=how.offload))


class StoredCheckpoint:
    """A module's checkpoint function, called inside hooks that store the inputs.

    Attributes
    ----------
    run : callable
        The function that the module had.
    paused : bool
        Whether to call the function without hooks.
    """

    def __init__(self, run: Callable[..., Any], how: _Storing) -> None:
        self.run = run
        self.how = how
        self.paused = False

    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function that the module had."""
        if self.paused:
            return self.run(function, *args, **kwargs)
        return _run(self.run, self.how, function, *args, **kwargs)


# An attribute of a module that holds the function which checkpoints, and the attribute that says whether it is called.
# transformers and diffusers have the first; torch's CheckpointWrapper (torchtitan, accelerate) the second.
_PLACES = (("_gradient_checkpointing_func", "gradient_checkpointing"), ("checkpoint_fn", None))


def _places(model: Module) -> Iterator[tuple[Module, str, Callable[..., Any]]]:
    """Yield the modules that checkpoint, the attribute's name, and the function."""
    for module in model.modules():
        for name, switch in _PLACES:
            function = vars(module).get(name)
            if callable(function) and (switch is None or getattr(module, switch, False)):
                yield module, name, function


def stored_checkpoints(model: Module) -> Iterator[StoredCheckpoint]:
    """Yield what :func:`use_checkpoint` has put into the modules of a model."""
    for _, _, function in _places(model):
        if isinstance(function, StoredCheckpoint):
            yield function


class _RunsAgain:
    """The forward of a block that :func:`checkpoint_blocks` checkpoints."""

    def __init__(self, block: Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the block's class, and again in backward."""
        forward = MethodType(type(self.block).forward, self.block)
        if not (self.block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return _EXACT(functools.partial(forward, **kwargs), *args)


_EXACT = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


def checkpoint_blocks(blocks: Iterable[Module]) -> None:
    """Let blocks run again in backward; :func:`drop_checkpoints` undoes it.

    A block that has a switch for it, as those of transformers, uses the switch: then the block leaves its cache of keys
    and values alone, which a second run would extend. Any other block gets a forward of its own.
    """
    for block in blocks:
        if isinstance(getattr(type(block), "gradient_checkpointing", None), bool):
            vars(block).update(gradient_checkpointing=True, _gradient_checkpointing_func=_EXACT)
        else:
            vars(block)["forward"] = _RunsAgain(block)


def drop_checkpoints(model: Module) -> None:
    """Undo :func:`use_checkpoint` and :func:`checkpoint_blocks` in all modules of a model."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _RunsAgain):
            del vars(module)["forward"]
        for name, _ in _PLACES:
            function = vars(module).get(name)
            while isinstance(function, StoredCheckpoint):
                function = function.run
                setattr(module, name, function)
            if function is _EXACT:
                del vars(module)["_gradient_checkpointing_func"], vars(module)["gradient_checkpointing"]


class CheckpointHandle(contextlib.AbstractContextManager["CheckpointHandle"]):
    """What :func:`use_checkpoint` returns: undoes it by :meth:`remove`, or at the end of a ``with`` block.

    Attributes
    ----------
    modules : int
        How many modules store the inputs of blocks.
    """

    def __init__(self, places: list[tuple[Module, str, StoredCheckpoint, Callable[..., Any]]]) -> None:
        self._places = [(ref(module), name, ours, before) for module, name, ours, before in places]
        self.modules = len(places)

    def remove(self) -> None:
        """Give the modules back the functions that they had; a function set since then stays."""
        for reference, name, ours, before in self._places:
            module = reference()
            if module is not None and vars(module).get(name) is ours:
                setattr(module, name, before)
        self._places.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def use_checkpoint(model: Module, store: Store = "int8", offload: bool | float | str = False) -> CheckpointHandle:
    """Store the inputs of a model's checkpointed blocks in 8 bits; call it once checkpointing is enabled.

    Serves every model whose blocks transformers, diffusers or torch's ``checkpoint_wrapper`` checkpoint, and so
    LLaMA-Factory, TRL, accelerate's FSDP and torchtitan. The function with which a module checkpoints, and the keywords
    bound to it, stay in use.

    Parameters
    ----------
    model : Module
        Changed in place, before or after :func:`pyactcomp.compress`, or without it.
    store : {"int8", "exact"}
        As in :func:`checkpoint`. A second call with other values replaces the first.
    offload : False, "auto", float or str
        As in :func:`checkpoint`.

    Returns
    -------
    CheckpointHandle
        ``handle.remove()`` undoes the call; so does :func:`pyactcomp.decompress`.

    Raises
    ------
    TypeError, ValueError
        If the model is not a Module, for another ``store`` or ``offload``, with ``offload`` a model that is not on a
        GPU, or if no module checkpoints; the model is unchanged.

    Notes
    -----
    If a module calls a function that opens saved-tensor hooks around torch's checkpoint, as transformers does with
    ``offload=True``, the forward raises :class:`HookConflictError`. A function that saves the inputs itself, such as
    Unsloth's, goes on doing so. A block of transformers checkpoints inside its own forward: after ``block.compile()``
    the graph saves the inputs, in codes only under :func:`pyactcomp.compress`.

    Examples
    --------
    >>> import pyactcomp, torch
    >>> from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    >>> model = torch.nn.Sequential(*(checkpoint_wrapper(torch.nn.Linear(256, 256)) for _ in range(4)))
    >>> pyactcomp.use_checkpoint(model).modules
    4
    """
    if not isinstance(model, Module):
        raise TypeError(f"use_checkpoint expects a torch.nn.Module, got {type(model).__name__}")
    check_choice("store", store, STORES)
    check_offload(offload)
    refuse_without_link(offload, (parameter.device for parameter in model.parameters()))
    found = list(_places(model))
    if not found:
        raise ValueError(
            f"use_checkpoint found no module of this {type(model).__name__} that checkpoints: call "
            "model.gradient_checkpointing_enable() first (enable_gradient_checkpointing() in diffusers), wrap blocks "
            "by torch's checkpoint_wrapper, or call pyactcomp.checkpoint(block, x) where the model runs its blocks"
        )
    by_function: dict[int, StoredCheckpoint] = {}
    places = []
    for module, name, function in found:
        run = function.run if isinstance(function, StoredCheckpoint) else function
        ours = by_function.setdefault(id(run), StoredCheckpoint(run, _Storing(store, offload)))
        places.append((module, name, ours, function))
    for module, name, ours, _ in places:
        setattr(module, name, ours)
    return CheckpointHandle(places)
