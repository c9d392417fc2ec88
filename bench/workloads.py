"""The models that the training suites measure: random weights, random inputs, the loss inside the module."""

from __future__ import annotations

from .tuned import TUNED
from .untuned import UNTUNED

WORKLOADS = {**TUNED, **UNTUNED}
