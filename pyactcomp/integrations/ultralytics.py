"""Ultralytics: callbacks of a YOLO, RTDETR or another of its models."""

from __future__ import annotations

from typing import Any

from ultralytics.engine.model import Model
from ultralytics.utils.torch_utils import unwrap_model

from ..compress import compress, decompress
from ..report import Report, report


class Compression:
    """Compresses the model that ``model.train()`` trains, its loss included, and decompresses it at the end.

    Training on several GPUs begins new processes, to which Ultralytics hands none of the callbacks: use one GPU.

    Parameters
    ----------
    model : ultralytics.YOLO or another Model
    **options
        Of :func:`pyactcomp.compress`.

    Attributes
    ----------
    report : Report or None
        Of the first training step, set at the end of training.

    Examples
    --------
    >>> from ultralytics import YOLO
    >>> from pyactcomp.integrations.ultralytics import Compression
    >>> model = YOLO("yolov8n.yaml")
    >>> compression = Compression(model, mode="int8")      # and then model.train(data=...)
    """

    def __init__(self, model: Model, **options: Any) -> None:
        self.options = options
        self.report: Report | None = None
        self._model: Any = None
        model.add_callback("on_train_start", self._start)
        model.add_callback("on_train_end", self._end)
        model.add_callback("teardown", self._end)

    def _start(self, trainer: Any) -> None:
        self._model = unwrap_model(trainer.model)
        compress(self._model, **self.options)

    def _end(self, trainer: Any) -> None:
        if self._model is not None:  # the second of the two, or an error before training
            self.report = report(self._model)
            decompress(self._model)
            self._model = None
