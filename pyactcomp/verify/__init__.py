"""Measures the error of compressed gradients."""

from .gradients import verify
from .verification import Verification

__all__ = ["Verification", "verify"]
