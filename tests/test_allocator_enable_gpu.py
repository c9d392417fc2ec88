"""enable() and ``pyactcomp run`` on a GPU, without the torch subclass; each case has a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from child_script import run_case

from pyactcomp import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h"),
]


@pytest.mark.parametrize(
    "case", ["statistics", "settings", "out_of_memory", "refusals", "reduce_overhead", "too_late", "twice"]
)
def test_enabled_on_the_plain_route(case: str) -> None:
    run_case("allocator_enable_cases.py", case, PYACTCOMP_ALLOC_CONF="")


def test_run_enables_the_allocator_before_the_first_line(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "x = torch.ones(1000, device='cuda')\n"
        "print(torch.cuda.memory_allocated(), torch.cuda.memory_stats()['max_split_size'])\n"
    )
    command = [sys.executable, "-m", "pyactcomp", "run", "--max-split-size", "64MiB", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, ["4096", str(64 << 20)]), ran.stderr
