"""Hugging Face's Trainer, and TRL's trainers based on Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.nn import Module
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..checkpoint import STORES, Store, use_checkpoint
from ..climb import Climb, Ladder, Rung
from ..compress import MODULE_OPTIONS, compress, compressed, decompress
from ..errors import check_choice
from ..live import Watch
from ..report import Report, report
from .watching import watch_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..config import Options

# The callback that compressed a model: a training that was interrupted leaves the model compressed.
_compressed_by: WeakKeyDictionary[Module, CompressionCallback] = WeakKeyDictionary()


class CompressionCallback(TrainerCallback):
    """Compresses the model of a Trainer, or of a TRL trainer, during training.

    Parameters
    ----------
    checkpoint : {"int8", "exact"}, optional
        How to store the inputs of checkpointed blocks, as in :func:`pyactcomp.use_checkpoint`; needs
        ``gradient_checkpointing=True`` in the trainer's arguments or another way to checkpoint. Without, they are
        stored as ``mode`` says.
    watch : bool or dict
        Watch the memory of each step; a dict has options of :func:`pyactcomp.watch`, as in ``{"steps": 10}``. The
        figures are in ``trainer.state.log_history``, and go to callbacks that the trainer calls later: list
        ``TensorBoardCallback()`` or ``WandbCallback()`` after this callback, with ``report_to=[]``.
    **options
        Options of :func:`pyactcomp.compress`. ``fuse_head=True`` takes the loss of the *model* in chunks. With
        ``label_smoothing_factor`` or ``compute_loss_func`` the trainer computes the loss from the model's logits, and
        ``fuse_head`` has no effect; :meth:`cover_loss` compresses the tensors saved by this loss.

    Attributes
    ----------
    report : Report or None
        Report of the first training step, set at the end of training; until then call :func:`pyactcomp.report`.
    watch : Watch or None
        The watch of the last training, with ``watch``.

    Raises
    ------
    ValueError
        When the trainer is created or training begins, if the trainer offloads activations or, with ``fuse_head=True``,
        has its own fused head, reads the logits (``SFTTrainer`` of TRL below 1), or has replaced the forward of the
        model (mixed precision; pass the callback to ``Trainer(callbacks=[...])``). With ``checkpoint``, if no module
        checkpoints; the model is then plain again.

    Examples
    --------
    >>> import pyactcomp, transformers
    >>> from pyactcomp.integrations.transformers import CompressionCallback
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=1))
    >>> arguments = transformers.TrainingArguments(use_cpu=True, report_to=[])
    >>> trainer = transformers.Trainer(model, arguments, callbacks=[CompressionCallback(fuse_head=True)])
    >>> len(pyactcomp.report(model).tensors)           # compressed, and nothing is recorded yet: trainer.train()
    0
    """

    def __init__(
        self, *, checkpoint: Store | None = None, watch: bool | Mapping[str, Any] = False, **options: Unpack[Options]
    ) -> None:
        if checkpoint is not None:
            check_choice("checkpoint", checkpoint, STORES)
        self.checkpoint = checkpoint
        self.options = options
        self.report: Report | None = None
        self.watch: Watch | None = None
        self._watch_options = watch_options(watch)

    def cover_loss(self, trainer: Trainer) -> None:
        """Compress the tensors ``trainer.compute_loss`` saves outside the model; raise if the trainer offloads."""
        _refuse_offload(trainer.args)
        options: Any = {name: value for name, value in self.options.items() if name not in MODULE_OPTIONS}
        trainer.compute_loss = compressed(trainer.model, **options)(trainer.compute_loss)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compress the model, if made already: accelerate's mixed precision later replaces the forward needed here."""
        self._compress(args, kwargs.get("model"))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compress a model created after the trainer, or trained a second time."""
        if self.options.get("fuse_head") and any(map(_has_fused_head, kwargs["model"].modules())):
            raise ValueError("fuse_head=True and TRL's fused_lm_head both replace the head: leave fuse_head=True out")
        model = kwargs["model"]
        self._compress(args, model)
        if self.checkpoint is not None:  # the trainer has enabled checkpointing by now
            try:
                use_checkpoint(model, store=self.checkpoint, offload=self.options.get("offload", False))
            except ValueError:
                self._decompress(model)
                raise
        if self._watch_options is not None:
            self.watch = Watch(model, kwargs.get("optimizer"), manual=True, **self._watch_options).start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """End a step of the watch."""
        if self.watch is not None:
            self.watch.step()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the watch's figures to what is logged, and to the trainer's history."""
        if self.watch is not None:
            scalars = self.watch.scalars()
            kwargs["logs"].update(scalars)
            state.log_history[-1].update(scalars)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the report and decompress."""
        model = next((model for model, callback in _compressed_by.items() if callback is self), None)
        if model is not None:
            self.report = report(model)
            self._decompress(model)
        if self.watch is not None:
            self.watch.stop()

    def _decompress(self, model: Module) -> None:
        """Undo ``use_checkpoint`` too."""
        decompress(model)
        del _compressed_by[model]

    def _compress(self, args: TrainingArguments, model: Module | None) -> None:
        _refuse_offload(args)
        if model is None or _compressed_by.get(model) is self:
            return
        if self.options.get("fuse_head"):
            _refuse_head(args, model)
        earlier = _compressed_by.pop(model, None)
        if earlier is not None:  # the callback of a training that was interrupted
            if earlier.watch is not None:
                earlier.watch.stop()
            with suppress(RuntimeError):  # if the program has decompressed the model since
                decompress(model)
        compress(model, **self.options)
        _compressed_by[model] = self


@dataclass
class Climbing:
    """What :func:`climb` returns. ``ladder`` is that of the training that runs, or of the last; None before."""

    ladder: Ladder | None = None

    @property
    def climbs(self) -> list[Climb]:
        """The rungs that were left, in order."""
        return [] if self.ladder is None else self.ladder.climbs


def climb(trainer: Trainer, rungs: Sequence[str | Rung] = ("keep", "int8", "int8+checkpoint")) -> Climbing:
    """Let each training step of a trainer climb a :class:`pyactcomp.Ladder` where memory runs out, and run again.

    A step of the trainer is forward and backward of one micro-batch. The failed one leaves nothing: gradients of
    earlier micro-batches, buffers and generators are put back. The optimizer's own step does not climb.

    Parameters
    ----------
    trainer : Trainer
        Of one process. Its ``training_step`` is replaced on this instance.
    rungs : sequence of str or Rung
        As for :class:`pyactcomp.Ladder`, but none that splits the batch. ``"keep"`` is the model as it is: plain, or as
        a :class:`CompressionCallback` has compressed it. The model stays on the last rung when training ends.

    Returns
    -------
    Climbing

    Raises
    ------
    ValueError
        When training begins, with several processes, sharded parameters, or rungs that split the batch.

    Notes
    -----
    Metrics that a trainer of TRL notes in ``compute_loss`` count a step that fails in backward twice.

    Examples
    --------
    >>> import transformers
    >>> from pyactcomp.integrations.transformers import climb
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=1))
    >>> trainer = transformers.Trainer(model, transformers.TrainingArguments(use_cpu=True, report_to=[]))
    >>> climbing = climb(trainer)
    >>> climbing.climbs                                 # after trainer.train(): what happened
    []
    """
    climbing, run = Climbing(), trainer.training_step

    def training_step(model: Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ladder = climbing.ladder
        if ladder is None or ladder.optimizer is not trainer.optimizer:
            ladder = climbing.ladder = Ladder(trainer.model, trainer.optimizer, rungs)
        # A copy: a trainer may take the labels out of its inputs.
        return ladder.gradients(
            lambda: run(model, dict(inputs) if isinstance(inputs, Mapping) else inputs, *args, **kwargs)
        )

    trainer.training_step = training_step
    return climbing


def _refuse_head(args: TrainingArguments, model: Module) -> None:
    """Raise where ``fuse_head=True`` cannot work: another forward, or a trainer that reads the logits."""
    if "forward" in vars(model):
        raise ValueError(
            "fuse_head=True needs the model's own forward, and accelerate's mixed precision has replaced it: pass the "
            "callback to Trainer(callbacks=[CompressionCallback(fuse_head=True)]) rather than to add_callback; if the "
            "model was trained before, get the forward back by "
            "accelerate.Accelerator().unwrap_model(model, keep_fp32_wrapper=False)"
        )
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(args).__mro__}
    if "trl.SFTConfig" in kinds and int(version("trl").partition(".")[0]) < 1:
        raise ValueError(
            f"fuse_head=True leaves out the logits, and the SFTTrainer of trl {version('trl')} computes their entropy "
            "in each step: install trl>=1, or leave fuse_head=True out"
        )


def _refuse_offload(args: TrainingArguments) -> None:
    """Raise for offloading options: their saved-tensor hooks run inside ours and receive the tensors first."""
    checkpointing = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
    for name, options, key in (
        ("", vars(args), "activation_offloading"),
        ("gradient_checkpointing_kwargs", checkpointing, "offload"),
        ("fsdp_config", args.fsdp_config, "activation_checkpointing_offload"),
    ):
        if isinstance(options, dict) and options.get(key):
            option = f'{name}={{"{key}": True}}' if name else f"{key}=True"
            raise ValueError(
                f"CompressionCallback and {option} both replace what autograd saves, and the hooks of the latter run "
                "inside ours and take every tensor first: use one of the two"
            )


def _has_fused_head(module: Module) -> bool:
    """Return whether ``trl.trainer.utils.add_fused_lm_head`` has replaced the forward of a module."""
    forward = module.__dict__.get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames
