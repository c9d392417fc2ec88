"""The private names of Dynamo's errors and limits; imported only where blocks are compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._dynamo import config, exc


def missing() -> str | None:
    """Return the name that this release of torch does not have, or None."""
    for owner, name in (
        (exc, "TorchDynamoException"),
        (exc, "FailOnRecompileLimitHit"),
        (config, "recompile_limit"),
    ):
        if not hasattr(owner, name):
            return f"torch {torch.__version__} has no {owner.__name__}.{name}"
    return None


def is_refusal(error: Exception) -> bool:
    """Return whether torch.compile raised an error because it cannot compile the called function."""
    refusals = exc.TorchDynamoException, exc.FailOnRecompileLimitHit
    # Raised after the call, which torch 2.13 ran uncompiled.
    return isinstance(error, refusals) or "fullgraph=True found no compiled frames" in str(error)


def recompile_limit() -> int:
    """Return the number of graphs that Dynamo compiles for one function."""
    limit: int = cast(Any, config).recompile_limit
    return limit


def raised_recompile_limit(limit: int) -> AbstractContextManager[object]:
    """Raise the number of graphs for one function inside a ``with`` block."""
    changed: AbstractContextManager[object] = cast(Any, config).patch(recompile_limit=limit)
    return changed
