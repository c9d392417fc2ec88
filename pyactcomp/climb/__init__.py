"""What to do where memory runs out: find the batch that fits, survive the error."""

from .batch_size import BatchSize, Trial, find_batch_size, find_executable_batch_size

__all__ = ["BatchSize", "Trial", "find_batch_size", "find_executable_batch_size"]
