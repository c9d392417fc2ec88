"""torchtitan: a policy of activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from ..compress import compress


class Compression(ActivationCheckpointing):
    """Compresses the model where torchtitan would checkpoint it: before ``torch.compile`` of the blocks, and FSDP.

    Attributes
    ----------
    Config
        Its ``options`` are those of :func:`pyactcomp.compress`. Its ``policy`` is the configuration of another policy,
        such as ``FullAC.Config()``, that checkpoints the blocks too.

    Examples
    --------
    >>> from pyactcomp.integrations.torchtitan import Compression
    >>> policy = Compression.Config(options={"mode": "lossless"})      # config.activation_checkpoint = policy
    >>> type(policy.build()).__name__
    'Compression'
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # noqa: D106
        options: dict[str, Any] = field(default_factory=dict)
        policy: ActivationCheckpointing.Config | None = None

    def apply(self, model: Module) -> None:
        """Checkpoint as the other policy does, if there is one, and compress the model."""
        if self.config.policy is not None:
            self.config.policy.build(dump_folder=self.dump_folder).apply(model)
        compress(model, **self.config.options)
