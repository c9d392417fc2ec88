"""accelerate, in a custom training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from ..compress import compress

if TYPE_CHECKING:
    from accelerate import Accelerator
    from typing_extensions import Unpack

    from ..config import Options


def prepare(accelerator: Accelerator, model: Module, *others: Any, **options: Unpack[Options]) -> Any:
    """Compress a model and call ``accelerator.prepare`` with it.

    Parameters
    ----------
    accelerator : Accelerator
    model : Module
        Compressed before accelerate wraps the model: mixed precision replaces the model's forward, and a fused head
        needs the original. Call ``pyactcomp.report`` and ``decompress`` with this model; after wrapping, get the model
        from ``accelerator.unwrap_model``.
    *others
        Optimizers, loaders, schedulers, as for ``accelerator.prepare``.
    **options
        Options of :func:`pyactcomp.compress`. For a loss outside the model see :class:`pyactcomp.compressed`.

    Returns
    -------
    Module or tuple
        As ``accelerator.prepare(model, *others)``.

    Raises
    ------
    ValueError
        If the FSDP plugin has ``activation_checkpointing_offload=True``.

    Examples
    --------
    >>> import torch, accelerate
    >>> from pyactcomp.integrations.accelerate import prepare
    >>> model = torch.nn.Linear(512, 512)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = prepare(accelerate.Accelerator(cpu=True), model, optimizer, mode="lossless")
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing_offload", False):
        raise ValueError(
            "prepare() of pyactcomp and activation_checkpointing_offload=True both replace what autograd saves, and "
            "the hooks of the latter run inside ours and take every tensor first: use one of the two"
        )
    return accelerator.prepare(compress(model, **options), *others)
