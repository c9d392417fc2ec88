"""Each example runs on the CPU as it stands, in seconds, and says what it promises."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

# The example -> what it needs, and what its output must have.
RUNS = {
    "plain_loop": ("torch", r"relative error"),
    "trainer": ("transformers", r"Head \(1\)"),
    "lightning_module": ("lightning", r"step 7: loss"),
    "timm_classifier": ("timm", r"ResidualBlock"),
    "long_context": ("torch", r"pyactcomp: .* reserved"),
    "out_of_memory": ("torch", r"native: .* out of memory at event"),
}
REPORTING = {"plain_loop", "trainer", "lightning_module", "timm_classifier"}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in RUNS if f"({name}.py)" not in listed] == []


@pytest.mark.parametrize("name", RUNS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    needs, expected = RUNS[name]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    folder = tmp_path / "empty"
    folder.mkdir()
    ran = forked.run(EXAMPLES / f"{name}.py", folder, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.search(expected, ran.stdout), ran.stdout
    assert list(folder.iterdir()) == [], "an example leaves files behind"
    if name in REPORTING:
        # The report's last column but one of the total: unique bytes over stored bytes.
        total = re.search(r"^total .*$", ran.stdout, re.MULTILINE)
        assert total is not None, ran.stdout
        assert float(total.group().split()[-2]) > 1.5, total.group()
