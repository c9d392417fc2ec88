"""Runs files of cases in a process of their own: whether Triton interprets is settled when it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROCESSES = min(4, os.cpu_count() or 1)
"""Of a file whose kernels are compiled: the compiler takes minutes of one core for the norms alone."""


def run_cases(*files: str, interpret: bool) -> None:
    """Run the tests of files beside this one, and fail with their output if they do."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        *([] if interpret else ["-n", str(PROCESSES)]),
        *(str(Path(__file__).parent / file) for file in files),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
