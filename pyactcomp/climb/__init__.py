"""What to do where memory runs out: find the batch that fits, survive the error."""

from .batch_size import BatchSize, Trial, find_batch_size, find_executable_batch_size
from .ladder import Climb, Ladder
from .rungs import Rung

__all__ = ["BatchSize", "Climb", "Ladder", "Rung", "Trial", "find_batch_size", "find_executable_batch_size"]
