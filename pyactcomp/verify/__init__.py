"""Measures what compression does to the gradients of a model."""

from .gradients import Verification, verify

__all__ = ["Verification", "verify"]
