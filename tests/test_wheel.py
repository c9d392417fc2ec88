"""The wheels of ``make wheel``: they install and work where there is no compiler, and bring their sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import allocator_variable_checks
import pluggable_library
import pytest
import torch

ROOT = Path(__file__).parents[1]
WHEELS = sorted((ROOT / "dist").glob("*.whl"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="dist has no wheel: run make wheel"),
]
# Beside the package: the command, and what PYACTCOMP_ALLOCATOR takes.
TOP = ["_pyactcomp_command.py", "_pyactcomp_startup.py", "pyactcomp.pth"]
SNIPPETS = [
    text
    for text in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if "cuda" not in text
]


@pytest.fixture(scope="module", params=WHEELS, ids=lambda path: path.name)
def wheel(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a fresh environment with the wheel, which sees the torch that is here."""
    folder = tmp_path_factory.mktemp("venv")
    interpreter, packages = allocator_variable_checks.make_environment(folder)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, wheel]
    subprocess.run(install, check=True, env={**os.environ, "PATH": str(folder / "bin")})
    return interpreter


def run(python: Path, folder: Path, *arguments: str, path: str = "", **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX", "CC")}
    environment |= variables
    environment["PATH"] = os.pathsep.join(filter(None, [str(python.parent), path]))
    ran = subprocess.run([python, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_wheel_holds_its_sources_and_native_module(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert {f"pyactcomp/{source}" for source in sources} <= set(names)
    assert sum(name.startswith("pyactcomp/_core.") and name.endswith(".so") for name in names) == 1
    assert not [name for name in names if name.startswith(("tests/", "bench/", "csrc/"))]
    assert [name for name in names if "/" not in name] == TOP


def test_the_wheel_without_cuda_is_one_for_an_index(wheel: Path) -> None:
    if "1cuda" in wheel.name:
        pytest.skip("CUDA's runtime is in it, whose libraries manylinux does not have")
    assert "-manylinux_" in wheel.name
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if ".libs/" in name], "a copy of a system's library"


def test_readme_runs_from_the_wheel_without_a_compiler(python: Path, wheel: Path, tmp_path: Path) -> None:
    where = run(
        python, tmp_path, "-c", "import pyactcomp, pyactcomp._core as c; print(pyactcomp.__file__, c.has_cuda_codec)"
    )
    assert where.startswith(str(python.parents[1]))
    assert where.split()[-1] == str("1cuda" in wheel.name)
    assert SNIPPETS
    for snippet in SNIPPETS:
        run(python, tmp_path, "-c", snippet)


# Beside the functions that torch calls, the same in both wheels; where there is a GPU, it is hidden.
ALLOCATOR = """
import ctypes, sys, torch, pyactcomp
from pyactcomp import _core, allocator
torch.version.cuda = torch.version.cuda or "13.0"
assert _core.has_cuda_allocator
library = ctypes.CDLL(allocator.library_path())
print([name for name in sys.argv[1:] if not hasattr(library, name)])
for call in (allocator.enable, lambda: _core.runtime_device(0)):
    try:
        call()
    except pyactcomp.errors.PyactcompError as error:
        print(error)
try:
    pyactcomp.codec.quantize(torch.ones(64), impl="cuda")
except pyactcomp.errors.ImplementationUnavailableError as error:
    print(error)
"""


def test_the_allocator_is_in_every_wheel_and_lacks_a_gpu_alone(python: Path, wheel: Path, tmp_path: Path) -> None:
    names = pluggable_library.FUNCTIONS
    said = run(python, tmp_path, "-c", ALLOCATOR, *names, CUDA_VISIBLE_DEVICES="").splitlines()
    missing, enabling, starting, codec = said
    assert missing == "[]"
    assert "cannot be enabled: torch finds no CUDA device" in enabling
    # The driver is looked for: there is none, or it has no device.
    assert "no CUDA driver to allocate with" in starting or "cuInit failed" in starting
    assert ("built without nvcc" in codec) == ("1cuda" not in wheel.name)


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="torch has CUDA, and finds no device"
)
@pytest.mark.parametrize("case", [*allocator_variable_checks.CASES, "run"])
def test_the_variable_enables_the_allocator(case: str, python: Path, tmp_path: Path) -> None:
    stand_in = torch.version.cuda is None
    if not stand_in and not list(python.parents[1].glob("lib/python*/site-packages/pyactcomp/_torch_allocator*.so")):
        run(python, tmp_path, "-m", "pyactcomp", "build-allocator", path=os.environ["PATH"])
    if case == "run":
        allocator_variable_checks.check_run(python, stand_in=stand_in)
    else:
        allocator_variable_checks.check(python, case, stand_in=stand_in)


def test_the_observer_is_recompiled_from_the_wheel(python: Path, tmp_path: Path) -> None:
    said = run(python, tmp_path, "-m", "pyactcomp", "build-observer", path=os.environ["PATH"])
    assert "a minute" in said
    code = "from pyactcomp.torch_private import extensions; print(extensions.load('_observer')[1])"
    assert run(python, tmp_path, "-c", code).strip() == "None"
