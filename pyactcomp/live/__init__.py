"""The memory of a running program: a breakdown, a monitor, and tensors that grow from step to step."""

from .breakdown import Memory, memory
from .leaks import Leak, Leaks
from .monitor import Watch, watch
from .records import Sample, Step

__all__ = ["Leak", "Leaks", "Memory", "Sample", "Step", "Watch", "memory", "watch"]
