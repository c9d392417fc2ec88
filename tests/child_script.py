"""Runs a file of cases, beside this one, in processes of their own: torch's allocator can be changed once in each."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Compiling models takes the longest. A case that hangs says where, and ends before it is killed.
LONGEST_S = 150


def run_case(file: str, case: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the function ``case`` of ``file`` with string arguments; fail with its output unless it returns."""
    command = [sys.executable, str(HERE / file), case, *arguments]
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    assert done.returncode == 0, f"{case}{arguments} exited with {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def main(cases: dict[str, object]) -> None:
    """What a file of cases ends with: ``main(globals())``."""
    case = cases[sys.argv[1]]
    assert callable(case)
    faulthandler.dump_traceback_later(LONGEST_S - 20, exit=True)
    case(*sys.argv[2:])
