"""A pytest plugin: tests of this process use the observer in the file OBSERVER, and not the one beside the package."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch  # noqa: F401 - the observer needs its libraries

_NAME = "pyactcomp._observer"
_spec = importlib.util.spec_from_file_location(_NAME, os.environ["OBSERVER"])
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules[_NAME] = _module
