"""What serves one family of models alone is a folder of functions and a file of modules: the rest runs without them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyactcomp

PACKAGE = Path(pyactcomp.__file__).parent

# Whose functions call those of another.
CALLS = {"norms": {"masks"}}

STEP = """
import torch, pyactcomp
from pyactcomp.fusions import fused_modules
assert pyactcomp.__file__.startswith({root!r}), pyactcomp.__file__
nn = torch.nn
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 8), nn.GELU())
pyactcomp.compress(model, min_bytes=0)
model(torch.randn(2, 3, 8, 8)).sum().backward()
print(*(kind for _, kind in fused_modules(model)))
"""


# Folder of functions -> the file of its modules.
ROOMS = {"convolutional": "resnet", "windows": "swin"}


def test_package_runs_without_the_rooms(tmp_path: Path) -> None:
    """That neither needs the other, the next test says."""
    copy = tmp_path / "pyactcomp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # The libraries in the package are those of these sources.
    shutil.copytree(PACKAGE.parent / "csrc", copy / "csrc", dirs_exist_ok=True)
    for room, family in ROOMS.items():
        shutil.rmtree(copy / "functional" / room)
        # Git leaves what it ignores.
        (copy / "functional" / room / "__pycache__").mkdir(parents=True)
        (copy / "fusions" / "families" / f"{family}.py").unlink()
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + STEP.format(root=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert set(ran.stdout.split()) == {"GELU"}  # BatchNorm2d went with its family


def test_rooms_import_these_of_each_other_alone() -> None:
    rooms = {path.parent.name for path in (PACKAGE / "functional").glob("*/__init__.py")}
    found: dict[str, set[str]] = {}
    for path in (PACKAGE / "functional").glob("*/*.py"):
        others = set(re.findall(r"^\s*from \.\.(\w+)\.\w+ import", path.read_text(), re.MULTILINE)) & rooms
        if others:
            found.setdefault(path.parent.name, set()).update(others)
    assert found == CALLS
