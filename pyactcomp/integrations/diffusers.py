"""diffusers: the models that a script of its examples trains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from diffusers import DiffusionPipeline
from torch.nn import Module

from ..checkpoint import STORES, Store, checkpoint
from ..compress import compress
from ..errors import check_choice


def compress_trained(
    models: DiffusionPipeline | Mapping[str, Any], *, store: Store | None = None, **options: Any
) -> dict[str, Module]:
    """Compress the models of a pipeline that training changes, and leave those that are frozen.

    Call it after ``requires_grad_`` and ``add_adapter``, and before ``accelerator.prepare``.

    Parameters
    ----------
    models : DiffusionPipeline or mapping
        A pipeline, or its models by name, as in ``{"unet": unet, "vae": vae}``.
    store : {"int8", "exact"}, optional
        Checkpoint the blocks of these models too, and store their inputs as :func:`pyactcomp.checkpoint` does. Without,
        the models checkpoint if ``enable_gradient_checkpointing()`` was called.
    **options
        Of :func:`pyactcomp.compress`.

    Returns
    -------
    dict of str to Module
        The compressed models; pass each to :func:`pyactcomp.report` or :func:`pyactcomp.decompress`.

    Raises
    ------
    ValueError
        If no parameter of any model needs a gradient.

    Examples
    --------
    >>> import diffusers, torch
    >>> from pyactcomp.integrations.diffusers import compress_trained
    >>> unet = diffusers.UNet2DModel(sample_size=8, block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1,
    ...     down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
    >>> list(compress_trained({"unet": unet, "teacher": torch.nn.Linear(2, 2).requires_grad_(False)}))
    ['unet']
    """
    if store is not None:
        check_choice("store", store, STORES)
    components = models.components if isinstance(models, DiffusionPipeline) else models
    trained = {
        name: model
        for name, model in components.items()
        if isinstance(model, Module) and any(p.requires_grad for p in model.parameters())
    }
    if not trained:
        raise ValueError(
            f"no model of {', '.join(components) or 'an empty mapping'} has a parameter that needs a gradient: call "
            "compress_trained after requires_grad_ or add_adapter"
        )
    for model in trained.values():
        if store is not None:
            cast("Any", model).enable_gradient_checkpointing(partial(checkpoint, store=store))
        compress(model, **options)
    return trained
