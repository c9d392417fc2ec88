"""Contract under test: the allocator core keeps every promise over a strict device, and a model that knows the answers.

The programs are in ``tests/cpp``; each failure names the ``--seed`` and the operation that repeat it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Twelve seeds in a row have every setting of the programs, under both growths.
SEEDS = range(12)


def tool(name: str) -> str:
    """The program next to this interpreter (from pip), else the one on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} to build tests/cpp")
    return found


def build(sanitize: str, tmp_path: Path) -> Path:
    """Build the programs with sanitizers, in a folder that later runs reuse, and return it."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to build tests/cpp")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    command = [compiler, f"-fsanitize={sanitize}", str(probe), "-o", str(tmp_path / "probe")]
    for step in (command, [str(tmp_path / "probe")]):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            pytest.skip(f"needs a compiler and a kernel with -fsanitize={sanitize}: {reason}")

    folder = ROOT / "build" / f"checks-{sanitize.replace(',', '-')}"
    ninja = tool("ninja")
    cmake = tool("cmake")
    source = ROOT / "tests/cpp"
    settings = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_CXX_COMPILER={compiler}", f"-DSANITIZE={sanitize}"]
    for command in ([cmake, f"-S{source}", f"-B{folder}", "-GNinja", *settings], [cmake, "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(program: Path, **options: int) -> None:
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([str(program), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{program.name} {' '.join(words)}:\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_core_is_right_under_the_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    folder = build("address,undefined", tmp_path)
    run(folder / "simulated_device_test")
    run(folder / "segment_source_test")
    run(folder / "segment_order_test")
    run(folder / "resume_test")
    run(folder / "host_arena_test")
    # `make soak` runs a hundred million.
    for seed in SEEDS:
        run(folder / "allocator_stress", seed=seed, operations=30_000 // len(SEEDS) + 1, every=1)
    for seed in SEEDS:
        run(folder / "allocator_stress", seed=len(SEEDS) + seed, operations=300_000 // len(SEEDS) + 1, every=1000)


@pytest.mark.slow
def test_core_has_no_races_under_the_thread_sanitizer(tmp_path: Path) -> None:
    folder = build("thread", tmp_path)
    for seed in (0, 1):  # one of each growth
        run(folder / "allocator_stress", seed=seed, operations=100_000, threads=4)
