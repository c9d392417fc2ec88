"""Switches compression on and off: compress, decompress, compressed.

Longer than 400 lines: the signatures and docstrings, which an editor shows, spell out every option.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from . import codec, fusions
from .checkpoint import StoredCheckpoint, checkpoint_blocks, drop_checkpoints, stored_checkpoints
from .compiled import marks
from .compiled.blocks import called, reason_unavailable, repeating_blocks
from .config import MIN_BYTES, Config, Exactness, Former, Mode, Skip, Tile, warn_of_former
from .engine.classes import give_class
from .engine.marks import FUSING
from .engine.offloading import refuse_without_link
from .engine.session import Session, close_abandoned
from .engine.silence import stop_watches
from .errors import ImplementationUnavailableError, PyactcompError
from .fusions import FusionState, unfuse
from .layout import Layout
from .model_hooks import add_hooks, keep_exact, offer_norms, offload_alone, remove_hooks, session_of, sessions
from .readers.observer import prepare

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("pyactcomp")
ModelT = TypeVar("ModelT", bound=Module)

MODULE_OPTIONS = ("fuse", "fuse_head", "tile", "compile_blocks")
"""The options of compress that compressed does not have."""

# Compressed models of this process, to detect a module inside an already compressed model.
_roots: WeakSet[Module] = WeakSet()


_Forms = list[tuple[Module, type[Module], FusionState | None]]


def _forms(model: Module) -> _Forms:
    return [(module, type(module), FUSING.get(module)) for module in model.modules()]


def _give_back(model: Module, forms: _Forms) -> None:
    """Give modules the classes that they had, and the states of fusing."""
    marks.unmark(model)
    unfuse(model)
    for module, cls, state in forms:
        give_class(module, cls)
        if state is not None:
            FUSING.set(module, state)


def compressed_model(model: Module) -> Module:
    """Return the one compressed model that a wrapper holds, or the compressed wrapper of a model; else the model."""
    inside = [module for module, _ in sessions(model)]
    around = [] if inside else [root for root in _roots if model in marks.unwrapped(root)]
    found = inside or around
    return found[0] if len(found) == 1 else model


@contextlib.contextmanager
def fused_by(model: Module, config: Config) -> Iterator[None]:
    """Fuse and mark the modules of a model by another configuration inside a ``with`` block."""
    before = _forms(model)
    marks.unmark(model)
    unfuse(model)
    try:
        skipped = _skipped_modules(model, config)
        fusions.fuse(model, config, skipped)
        marks.mark(model, config, skipped)
        yield
    finally:
        _give_back(model, before)


@contextlib.contextmanager
def paused(model: Module) -> Iterator[None]:
    """Switch off the compression of a model and of all its modules inside a ``with`` block."""
    classes = [(module, type(module)) for module in model.modules()]
    states: list[Session | FusionState | StoredCheckpoint] = [session for _, session in sessions(model)]
    states += stored_checkpoints(model)
    fusion_states = (FUSING.get(module) for module in model.modules())
    states += {id(state): state for state in fusion_states if state is not None}.values()
    before = [state.paused for state in states]
    for state in states:
        state.paused = True
    marks.pause(model)
    try:
        yield
    finally:
        for module, cls in classes:
            give_class(module, cls)
        for state, value in zip(states, before, strict=True):
            state.paused = value


def _skipped_modules(model: Module, config: Config) -> list[Module]:
    named = dict(model.named_modules())
    skipped: list[Module] = []
    for item in config.skip:
        if isinstance(item, str):
            if item not in named:
                raise ValueError(f"skip names no module of this model: {item!r}; see model.named_modules()")
            skipped.append(named[item])
        else:
            found = [module for module in named.values() if isinstance(module, item)]
            if not found:
                raise ValueError(f"skip names a type of which the model has no module: {item.__name__}")
            skipped.extend(found)
    return list(dict.fromkeys(module for each in skipped for module in called(each)))


def _check_model(model: object) -> None:
    """Raise TypeError for anything but a module that runs Python."""
    if isinstance(model, type) and issubclass(model, Module):
        raise TypeError(
            f"compress expects a module, got the class {model.__name__}: pass an object, {model.__name__}(...)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"compress got a {type(model).__name__}, and TorchScript runs no hooks of Python: compress and train the "
            "module from which it was made, and script it for inference"
        )
    if not isinstance(model, Module):
        raise TypeError(f"compress expects a torch.nn.Module, got {type(model).__name__}")


def _check_implementation(model: Module, config: Config) -> None:
    """Raise now, rather than in the first forward, if the implementation cannot run on the model's device."""
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is not None and device.type != "meta":
        # Also imports the kernels: the profiler of torch misreads the names of modules imported in a profiled step.
        with contextlib.suppress(*([ImplementationUnavailableError] if config.impl == "auto" else [])):
            codec.resolve(config.impl, device)


def _check_blocks(model: Module, config: Config, skipped: list[Module]) -> Config:
    """Return the configuration, without ``compile_blocks`` if this torch cannot; raise if no block repeats."""
    if not config.compile_blocks:
        return config
    if not repeating_blocks(model, skipped):
        raise ValueError(
            f"compile_blocks=True found no block to compile in this {type(model).__name__}: at least two modules "
            "side by side in one parent, with children of their own, of one class and with equal parameters and "
            "buffers, and not skipped. Drop compile_blocks=True, and compile modules by torch.compile"
        )
    reason = reason_unavailable()
    if reason is not None:
        warnings.warn(f"compile_blocks=True compiles nothing: {reason}", stacklevel=3)
        return replace(config, compile_blocks=False)
    return config


def _check_not_shared(model: Module) -> None:
    """Raise if another compressed model has a module of this one: a module has one configuration."""
    named = {module: name for name, module in model.named_modules()}
    if _shared_with(named) is not None:
        gc.collect()  # a deleted model may be in a cycle
    found = _shared_with(named)
    if found is None:
        return
    root, module = found
    if module is model:
        raise PyactcompError("this module is part of a model that is compressed already; decompress that first")
    raise PyactcompError(
        f"module {named[module]!r} ({type(module).__name__}) of this {type(model).__name__} is also part of a "
        f"{type(root).__name__} that is compressed already, and a module takes one configuration: compress one module "
        "that holds both models, or call pyactcomp.decompress on the other model first"
    )


def _shared_with(modules: Collection[Module]) -> tuple[Module, Module] | None:
    """Return a compressed model with one of ``modules``, and the module; None without one."""
    for root in list(_roots):
        for module in root.modules():
            if module in modules:
                return root, module
    return None


def compress(
    model: ModelT,
    *,
    mode: Mode = "int8",
    fuse: bool = True,
    fuse_head: bool = False,
    tile: Tile = "auto",
    group_size: int = 64,
    min_bytes: int = MIN_BYTES,
    skip: Iterable[Skip] = (),
    attention: Exactness = "exact",
    keep_weight_copies: bool = False,
    compile_blocks: bool = False,
    offload: bool | float | str = False,
    plan: Layout | None = None,
    **former: Unpack[Former],
) -> ModelT:
    """Compress the tensors saved by autograd in the forward of ``model``, to 8 bits or without loss.

    Cheap outputs are recomputed in backward instead of stored.

    Parameters
    ----------
    model : Module
        Changed in place: gets hooks, and modules with a fused form change class. Pass the outermost module of your
        training step: everything in its forward in training mode is covered, but not a loss computed outside (see
        :func:`compressed`).
    mode : {"int8", "lossless"}
        ``"int8"`` stores operands of layers in 8-bit codes, and other tensors in 16 bits or as they are.
        ``"lossless"`` stores every floating-point tensor as it is: gradients are the same to the bit.
        Both store duplicates once, recompute outputs of cheap operators in backward, and pack booleans to bits.
    fuse : bool
        Run modules with a fused function through the function; in lossless mode only if the results are bitwise equal.
    fuse_head : bool
        Compute the loss of a language model from the last hidden states in chunks, so the logits of a whole batch
        never exist: of a Hugging Face model given ``labels``, or of a model whose forward takes targets and calls
        ``torch.nn.functional.cross_entropy``. In training such a model returns None for the logits.
    tile : int, "auto" or None
        Tokens that a gated MLP of transformers (``down(silu(gate(x)) * up(x))``, or with GELU) takes at a time, so that
        the temporaries of its backward do not grow with the sequence. ``"auto"`` makes tiles where a tensor as wide as
        the MLP would take more than 512 MiB, of which each tile takes about 256. A number holds for the chunks of
        ``fuse_head`` too. None: all tokens at once. Also without effect in lossless mode, with ``keep_weight_copies``,
        and in graphs of torch.compile.
    group_size : {64, 128, 256}
        Number of elements with a common minimum and step, which take 0.5, 0.25 or 0.125 bits an element.
    min_bytes : int
        Size in bytes below which a tensor is kept as it is.
    skip : sequence of str or module types
        Modules to leave uncompressed with all their submodules, by qualified name or by type.
    attention : {"exact", "int8"}
        How to store the queries and keys of scaled_dot_product_attention and of fused window attention: in 16 bits, or
        in codes. Backward recomputes the probabilities from them, so with codes the error of the gradients of q and k
        grows with the logits: 1 % if the largest is 5, 4 % at 20, 13 % at 80.
    keep_weight_copies : bool
        Keep autocast's low-precision copies of the parameters, as torch does, instead of casting again in
        backward. Needed if an optimizer changes parameters between forward and backward.
    compile_blocks : bool
        Compile the blocks that repeat in the model, each by itself, with torch.compile; equal blocks share one
        compilation. The rest of the model runs as without.
    offload : False, "auto", float or str
        Move stored bytes to pinned host memory during forward, and back before backward reads them: as many as the
        measured link has time for, a share of the bytes from 0 to 1, or all that fits a size of host memory such as
        ``"12GiB"``. The model must be on a GPU.
    plan : Plan, optional
        From :func:`pyactcomp.plan`: what each block does, in place of ``mode``, ``fuse_head``, ``compile_blocks`` and
        ``offload``. ``skip`` leaves more modules as they are.
    impl, rounding, seed, on_conflict, unknown
        For this release alone; the warning says what to do instead.

    Returns
    -------
    Module
        ``model``, of the type that it had.

    Raises
    ------
    TypeError, ValueError
        If the model is not a Module, or an option is unknown or has a wrong value, or with ``compile_blocks`` no block
        repeats, or with ``offload``, also of a plan, the model is not on a GPU. After this or any other exception the
        model is unchanged.
    PyactcompError
        If the model, a module inside or a model around it is already compressed, the model shares a module with a
        compressed model, or ``impl`` cannot run.

    Notes
    -----
    Replace or patch modules before this call, not after: fused modules rely on their neighbours at the time of the
    call.

    Never compressed are parameters, buffers, autocast's copies of parameters, integers, floating-point tensors that do
    not require grad, tensors smaller than ``min_bytes``, and operands needed exactly by their operator.
    :func:`report` gives the reason for each tensor. In evaluation mode the hooks do nothing.
    ``PYACTCOMP_DISABLE=1`` in the environment switches everything off. The logger ``pyactcomp`` gets one line at INFO.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = pyactcomp.compress(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()))
    >>> model(torch.randn(256, 512)).sum().backward()
    """
    _check_model(model)
    warn_of_former("compress", former)
    rerun: list[Module] = []
    leaving: list[Module] = []
    if plan is not None:
        if not isinstance(plan, Layout):
            raise TypeError(f"plan must be what pyactcomp.plan returns, got {type(plan).__name__}")
        if mode != "int8" or fuse_head or compile_blocks or offload:
            raise ValueError("plan= decides mode and fuse_head, without compile_blocks and offload: leave these out")
        rerun = plan.checkpointed(model)
        mode, fuse_head, skip = plan.mode or mode, plan.fuse_head, [*skip, *plan.kept()]
        leaving = [model.get_submodule(name) for name in plan.offloaded()]
        offload = 1.0 if leaving else False
    config = Config(
        mode=mode,
        fuse=fuse,
        fuse_head=fuse_head,
        tile=tile,
        group_size=group_size,
        min_bytes=min_bytes,
        skip=skip,
        attention=attention,
        keep_weight_copies=keep_weight_copies,
        compile_blocks=compile_blocks,
        offload=offload,
        **former,
    )
    prepare()
    if any(sessions(model)):
        raise PyactcompError("this model, or a module in it, is compressed already; call pyactcomp.decompress first")
    _check_not_shared(model)
    if plan is not None and plan.mode is None:
        checkpoint_blocks(rerun)
        _roots.add(model)
        _log.info(
            "nothing is compressed in %s: its plan stays within the budget without; %d blocks run again in backward",
            type(model).__name__,
            len(rerun),
        )
        return model
    skipped = _skipped_modules(model, config)
    _check_implementation(model, config)
    refuse_without_link(config.offload, (parameter.device for parameter in model.parameters()))
    config = _check_blocks(model, config, skipped)
    before = _forms(model)
    try:
        marks.unmark(model)
        unfuse(model)  # this module may be left over from a deleted compressed model, or be part of a copy
        fusion_state = fusions.fuse(model, config, skipped)
        session = Session(config, fusion_state.seeds, offloads_blocks=bool(leaving))
        add_hooks(model, session)
        keep_exact(session, skipped)
        offload_alone(session, leaving)
        offer_norms(session, model)
        # Graphs do not know their blocks, so nothing leaves them.
        in_graphs = replace(config, offload=False) if leaving else config
        session.serve(marks.mark(model, in_graphs, skipped).tape)
        session.watch_gradients(model)
        checkpoint_blocks(rerun)
    except BaseException:
        for _, begun in sessions(model):
            begun.stop_watching()
        remove_hooks(model)
        _give_back(model, before)
        raise
    _roots.add(model)
    _log.info(
        "compressed %s: mode=%s, %d modules fused, %d left as they are; report(model) names them",
        type(model).__name__,
        config.mode,
        len(fusions.fused_modules(model)),
        len(fusions.left_alone(model)),
    )
    return model


def decompress(model: ModelT) -> ModelT:
    """Undo :func:`compress`, and :func:`use_checkpoint` on the same model.

    Parameters
    ----------
    model : Module
        Compressed by :func:`compress`, or a copy of such a model.

    Returns
    -------
    Module
        ``model``, without any hook of pyactcomp. Graphs recorded before keep working.

    Raises
    ------
    PyactcompError
        If the model is not compressed.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = pyactcomp.decompress(pyactcomp.compress(torch.nn.Linear(2, 2)))
    """
    if model not in _roots:  # a root without its hooks was compressed too: programs clear hooks
        session_of(model)
    close_abandoned()  # of a forward that KeyboardInterrupt ended
    for _, session in sessions(model):
        session.drop_all()  # of the forward that makes this call
        session.stop_watching()
    marks.unmark(model)
    unfuse(model)
    remove_hooks(model)
    drop_checkpoints(model)
    _roots.discard(model)
    return model


class Compressed(contextlib.ContextDecorator):
    """The context manager returned by :func:`compressed`, for a model and a configuration without fusion."""

    def __init__(self, model: Module | None, config: Config) -> None:
        if model is not None:
            _check_implementation(model, config)
        self.model = model
        self.session = Session(config)
        self._exact = _skipped_modules(model, config) if model is not None else []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Compressed:
        stop_watches()
        try:
            self.session.open(self.model)
        except PyactcompError:
            self.session.close()
            raise
        self._handles = keep_exact(self.session, self._exact)
        if self.model is not None:
            self._handles += offer_norms(self.session, self.model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.session.close()


def compressed(
    model: Module | None = None,
    *,
    mode: Mode = "int8",
    group_size: int = 64,
    min_bytes: int = MIN_BYTES,
    skip: Iterable[Skip] = (),
    attention: Exactness = "exact",
    keep_weight_copies: bool = False,
    offload: bool | float | str = False,
    **former: Unpack[Former],
) -> Compressed:
    """Compress the tensors saved by autograd inside a ``with`` block, including a loss outside the model.

    Parameters
    ----------
    model : Module, optional
        The model whose parameters and buffers must never be compressed; also names parameters in errors. Without a
        model, parameters are recognised as leaves with ``requires_grad`` or by the type ``Parameter``.
    mode, group_size, min_bytes, skip, attention, keep_weight_copies, offload
        As in :func:`compress`; ``skip`` needs ``model``. The block changes no modules, so only :func:`compress` has
        ``fuse``, ``fuse_head``, ``tile`` and ``compile_blocks``.

    Raises
    ------
    TypeError, ValueError
        For an option with a wrong value.
    HookConflictError
        On entering, if other saved-tensor hooks are active.

    Examples
    --------
    >>> import torch, pyactcomp
    >>> model = torch.nn.Linear(512, 512)
    >>> with pyactcomp.compressed(model) as c:
    ...     loss = model(torch.randn(256, 512)).log_softmax(1).mean()
    >>> loss.backward()
    >>> r = pyactcomp.report(c)
    >>> r.unique_bytes, r.stored_bytes       # log_softmax's result takes 16 bits, the input of the model is kept
    (1048576, 786432)
    """
    if model is not None and not isinstance(model, Module):
        raise TypeError(f"compressed expects a torch.nn.Module or nothing, got {type(model).__name__}")
    warn_of_former("compressed", former)
    config = Config(
        mode=mode,
        fuse=False,
        group_size=group_size,
        min_bytes=min_bytes,
        skip=skip,
        attention=attention,
        keep_weight_copies=keep_weight_copies,
        offload=offload,
        **former,
    )
    if model is not None:
        refuse_without_link(offload, (parameter.device for parameter in model.parameters()))
    if model is None and config.skip:
        raise ValueError("skip names modules of a model: call compressed(model, skip=...)")
    prepare()
    return Compressed(model, config)
