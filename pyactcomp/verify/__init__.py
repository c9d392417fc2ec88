"""Measures the error of compressed gradients."""

from .gradients import Verification, verify

__all__ = ["Verification", "verify"]
