"""The readers of saved tensors: finds the running operator, and how exactly backward needs each saved operand."""

from .lookup import register_reader

__all__ = ["register_reader"]
