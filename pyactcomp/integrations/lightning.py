"""Lightning, for both packages, ``lightning`` and ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..checkpoint import STORES, Store, use_checkpoint
from ..compress import MODULE_OPTIONS, compress, compressed, decompress
from ..errors import check_choice
from ..live import Watch
from ..report import Report, report
from .watching import watch_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..config import Options


def _callback_classes() -> tuple[type, ...]:
    """Return the installed packages' callback classes: each package's Trainer checks for its own class."""
    packages = [name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name) is not None]
    if not packages:
        raise ModuleNotFoundError("neither lightning nor pytorch_lightning is installed; run: pip install lightning")
    modules = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
    return tuple(importlib.import_module(modules[name]).Callback for name in packages)


class Compression(*_callback_classes()):  # type: ignore[misc]
    """Compresses a LightningModule during fitting, including a loss computed in ``training_step``.

    Parameters
    ----------
    checkpoint : {"int8", "exact"}, optional
        How to store the inputs of checkpointed blocks, as in :func:`pyactcomp.use_checkpoint`; enable checkpointing
        before fitting, as in ``configure_model``. Without, they are stored as ``mode`` says.
    watch : bool or dict
        Watch the memory of each optimizer step, and log the figures by ``log_dict``; a dict has options of
        :func:`pyactcomp.watch`, as in ``{"steps": 10}``.
    **options
        Options of :func:`pyactcomp.compress`. ``fuse_head=True`` needs a transformers language model with the loss
        computed from ``labels`` inside the model; a loss computed from logits in ``training_step`` is compressed
        without this option.

    Attributes
    ----------
    report : Report or None
        Set at the end of fitting: the report of the LightningModule's first forward or, if ``training_step`` calls
        submodules and not ``self(...)``, of the first training step.
    watch : Watch or None
        The watch of the last fitting, with ``watch``.

    Examples
    --------
    >>> import lightning
    >>> from pyactcomp.integrations.lightning import Compression
    >>> callback = Compression(mode="lossless")
    >>> trainer = lightning.Trainer(callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False)
    >>> callback in trainer.callbacks           # trainer.fit(module) compresses it, and decompresses it at the end
    True
    """

    def __init__(
        self, *, checkpoint: Store | None = None, watch: bool | Mapping[str, Any] = False, **options: Unpack[Options]
    ) -> None:
        super().__init__()
        if checkpoint is not None:
            check_choice("checkpoint", checkpoint, STORES)
        self.checkpoint = checkpoint
        self.options = options
        self.report: Report | None = None
        self.watch: Watch | None = None
        self._watch_options = watch_options(watch)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compress the module, and run ``training_step`` (called instead of the module) inside ``compressed``."""
        around: Any = {name: value for name, value in self.options.items() if name not in MODULE_OPTIONS}
        compress(pl_module, **self.options)
        if self.checkpoint is not None:
            try:
                use_checkpoint(pl_module, store=self.checkpoint, offload=self.options.get("offload", False))
            except ValueError:
                decompress(pl_module)
                raise
        self._step = compressed(pl_module, **around)
        pl_module.training_step = self._step(pl_module.training_step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        if self._watch_options is not None:
            optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
            self.watch = Watch(pl_module, optimizer, manual=True, **self._watch_options).start()
            self._watched = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step of the watch where the optimizer has made one, and log the watch's figures."""
        if self.watch is not None and trainer.global_step != self._watched:
            self._watched = trainer.global_step
            self.watch.step()
            pl_module.log_dict(self.watch.scalars())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the report and decompress."""
        of_forward = report(pl_module)
        if not of_forward.tensors:
            whole = report(self._step)
            of_forward = replace(whole, fused=of_forward.fused, left_alone=of_forward.left_alone)
        self.report = of_forward
        self._undo(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Decompress the module after an error in fitting."""
        if "training_step" in vars(pl_module):
            self._undo(pl_module)

    def _undo(self, pl_module: Any) -> None:
        if self.watch is not None:
            self.watch.stop()
        del pl_module.training_step
        decompress(pl_module)
