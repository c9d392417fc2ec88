"""Memory snapshots of PyTorch, without a GPU: read, explained, replayed under other settings, and tuned."""

from .explain import explain
from .reader import read_snapshot
from .replay import replay
from .tune import tune

__all__ = ["explain", "read_snapshot", "replay", "tune"]
