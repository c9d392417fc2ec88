"""Hugging Face's Trainer, and TRL's trainers based on Trainer."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..compress import MODULE_OPTIONS, compress, compressed, decompress
from ..report import Report, report


class CompressionCallback(TrainerCallback):
    """Compresses the model of a Trainer, or of a TRL trainer, during training.

    Parameters
    ----------
    **options
        Options of :func:`pyactcomp.compress`. ``fuse_head=True`` takes the loss of the *model* in chunks. With
        ``label_smoothing_factor`` or ``compute_loss_func`` the trainer computes the loss from the model's logits, and
        ``fuse_head`` has no effect; :meth:`cover_loss` compresses the tensors saved by this loss.

    Attributes
    ----------
    report : Report or None
        Report of the first training step, set at the end of training; until then call :func:`pyactcomp.report`.

    Raises
    ------
    ValueError
        When the trainer is created or training begins, if the trainer offloads activations or, with ``fuse_head=True``,
        has its own fused head.

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

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.report: Report | None = None
        self._compressed: Module | None = None

    def cover_loss(self, trainer: Trainer) -> None:
        """Compress the tensors ``trainer.compute_loss`` saves outside the model; raise if the trainer offloads."""
        _refuse_offload(trainer.args)
        options = {name: value for name, value in self.options.items() if name not in MODULE_OPTIONS}
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
        self._compress(args, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the report and decompress."""
        if self._compressed is not None:
            self.report = report(self._compressed)
            decompress(self._compressed)
            self._compressed = None

    def _compress(self, args: TrainingArguments, model: Module | None) -> None:
        _refuse_offload(args)
        if model is not None and self._compressed is not model:
            self._compressed = compress(model, **self.options)


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
