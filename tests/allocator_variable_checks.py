"""Runs the cases of allocator_variable_cases.py in an environment with pyactcomp.pth, installed or copied."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = HERE.parent / "pyactcomp.pth"

# Case -> the environment, beside PYACTCOMP_ALLOCATOR=1.
CASES: dict[str, dict[str, str]] = {
    "first_use": {},
    "fork": {"PYACTCOMP_ALLOC_CONF": "max_split_size_mb:64"},
    "spawn": {"PYACTCOMP_ALLOC_CONF": "growth:malloc"},
    "launched": {},
    "no_devices_are_visible": {},
    "first_device_is_visible": {},
    "history": {},
    "threads": {},
    "default_device": {},
    "pinned_first": {},
    "enabled_by_the_program_too": {"PYACTCOMP_ALLOC_CONF": "max_split_size_mb:64"},
    "enabled_by_the_program_before": {},
    "wrong_value": {"PYACTCOMP_ALLOCATOR": "vmm"},
    "malformed_settings": {"PYACTCOMP_ALLOC_CONF": "growth:?"},
    "no_subclass": {},
    "no_package": {},
    "a_warning_as_an_error": {"PYACTCOMP_ALLOCATOR": "yes"},
    "off": {"PYACTCOMP_DISABLE": "1"},
}


def make_environment(folder: Path) -> tuple[Path, Path]:
    """Make an environment that sees this one's packages, and return its interpreter and site-packages.

    Only the folders are seen: .pth files in them, one of which may be this checkout's, are not read.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "torch.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    shutil.copy(HERE / "cuda_stand_in.py", packages)
    # After pyactcomp.pth: files are read by name.
    line = "import os; os.environ.get('PAC_STAND_IN') and __import__('cuda_stand_in')\n"
    (packages / "stand_in.pth").write_text(line)
    return folder / "bin" / "python", packages


def with_the_checkout(folder: Path) -> tuple[Path, Path]:
    """Make an environment that sees this checkout too, and has its .pth file."""
    python, packages = make_environment(folder)
    (packages / "checkout.pth").write_text(f"{HERE.parent}\n")
    shutil.copy(FILE, packages)
    return python, packages


def run(python: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these variables, and no others of pyactcomp's."""
    unset = ("PYTHONPATH", "PYACTCOMP_ALLOCATOR", "PYACTCOMP_ALLOC_CONF", "PYACTCOMP_DISABLE")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    command = [python, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def check(python: Path, case: str, *, stand_in: bool, **variables: str) -> None:
    """Run a case; fail with its output unless the case passes."""
    variables = {"PYACTCOMP_ALLOCATOR": "1", "PAC_STAND_IN": "1" if stand_in else ""} | CASES[case] | variables
    done = run(python, HERE / "allocator_variable_cases.py", case, **variables)
    assert done.returncode == 0, done.stdout + done.stderr


def check_run(python: Path, *, stand_in: bool) -> None:
    """Children of ``pyactcomp run`` get the allocator with the settings of the command."""
    command = ["-m", "pyactcomp", "run", "--growth", "malloc", HERE / "allocator_variable_cases.py", "spawn_under_run"]
    done = run(python, *command, PAC_STAND_IN="1" if stand_in else "")
    assert done.returncode == 0, done.stdout + done.stderr
