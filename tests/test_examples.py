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
    "three_billion_in_24gib": ("transformers", r"(?s)float32 .*\nint8 .*\ncheckpoint .* runs twice"),
    "out_of_memory": ("torch", r"native: .* out of memory at event"),
}
LADDER = re.compile(r"^(\S+)((?: +[\d.]+){5})", re.MULTILINE)
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
        # The report's last column but one of the total: stored bytes over unique bytes.
        total = re.search(r"^total .*$", ran.stdout, re.MULTILINE)
        assert total is not None, ran.stdout
        assert float(total.group().split()[-2]) < 1 / 1.5, total.group()
    if name == "three_billion_in_24gib":
        rows = {row[1]: [float(figure) for figure in row[2].split()] for row in LADDER.finditer(ran.stdout)}
        for *parts, total in rows.values():
            assert sum(parts) == pytest.approx(total, abs=0.005 * (len(parts) + 1))  # each is rounded to hundredths
        assert rows["float32"][:3] == pytest.approx([2 * each for each in rows["bf16"][:3]], abs=0.02)
        assert rows["int8"][3] < 0.35 * rows["bf16"][3]
        assert rows["update-in-backward"][1] < 0.5 * rows["int8"][1]
        assert rows["checkpoint"][3] < rows["int8"][3]
