"""Memory snapshots of PyTorch, without a GPU: read, explained, compared, replayed under other settings, and tuned."""

from .comparison import compare, compare_ranks
from .explain import explain
from .reader import read_snapshot
from .replay import replay
from .tune import tune

__all__ = ["compare", "compare_ranks", "explain", "read_snapshot", "replay", "tune"]
