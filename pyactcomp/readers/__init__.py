"""The readers of saved tensors: which operator runs, and how exactly it needs each operand in backward."""

from .lookup import register_reader

__all__ = ["register_reader"]
