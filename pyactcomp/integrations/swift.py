"""ms-swift: a callback for ``--callbacks``."""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map

from .transformers import CompressionCallback


def register(name: str = "pyactcomp", **options: Any) -> None:
    """Give the callback a name for ``--callbacks``; call it in a file for ``--external_plugins``.

    Parameters
    ----------
    name : str
    **options
        Of :class:`~pyactcomp.integrations.transformers.CompressionCallback`.

    Examples
    --------
    A file ``plugin.py`` with these two lines, for ``swift sft --external_plugins plugin.py --callbacks pyactcomp``:

    >>> from pyactcomp.integrations.swift import register
    >>> register(mode="int8")
    """
    callbacks_map[name] = lambda args, trainer: CompressionCallback(**options)
