"""Importing PyTorch's databases leaves this process as it was, and no warning of what they import is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import warnings
import torch
warnings.simplefilter("error")
filters = list(warnings.filters)
import torch_databases, numba.cuda
assert len(torch_databases.operators) > 100
assert warnings.filters == filters
"""


def test_a_warning_of_what_they_import_is_no_error(tmp_path: Path) -> None:
    package = tmp_path / "numba"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cuda.py").write_text(
        "import warnings\nwarnings.warn('old', DeprecationWarning)\nis_available = lambda: False\n"
    )
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
