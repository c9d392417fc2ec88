"""Random training programs under pyactcomp, and what finds and prints the ones that fail."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from programs_check import rounding_to_bfloat16, run
from programs_rows import ROWS
from programs_scope import Statement
from programs_statements import EDITS, MODULES, SILENT_EDITS
from torch import Tensor

from pyactcomp.codec.kernels import Kernel
from pyactcomp.engine import saved
from pyactcomp.engine.frame import Frame
from pyactcomp.engine.packing import Packing

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS, CHUNKS = 320, 8

ROW_KINDS = [f"{kind}: {row}" for kind, (_, rows) in ROWS.items() for row in rows]
ROW_KINDS += [f"edit: {row}" for row in EDITS] + [f"silent edit: {row}" for row in SILENT_EDITS]
ROW_KINDS += [f"module: {maker}" for _, maker in MODULES]
BLOCKS = ["checkpoint(True)", "checkpoint(False)", "autocast", "no_grad", "inference_mode", "late edit"]


def generate(number: int) -> programs.Program:
    return programs.generate(programs.seed_of(0, number))


generate_once = functools.cache(generate)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients_are_those_of_torch(chunk: int) -> None:
    sweep = programs.Sweep()
    for number in range(chunk, PROGRAMS, CHUNKS):
        sweep.add(generate_once(number))
    if sweep.failing:
        pytest.fail(f"{sweep}; the first of them:\n{programs.failure_text(*sweep.failing[0])}", pytrace=False)


def drawn(count: int = PROGRAMS) -> list[programs.Program]:
    return list(map(generate_once, range(count)))


def test_a_seed_gives_one_program() -> None:
    first, second = ([generate(number).text() for number in range(20)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 20


def test_every_kind_of_statement_is_drawn() -> None:
    counts = Counter(kind for program in drawn() for kind in set(program.kinds()))
    assert [kind for kind in [*ROW_KINDS, *BLOCKS] if not counts[kind]] == []


def test_programs_differ_in_how_they_end() -> None:
    plain = [run(program.namespace()) for program in drawn(200)]
    phases = Counter(None if outcome.error is None else outcome.error[0] for outcome in plain)
    assert set(phases) == {None, "forward", "backward"}
    assert phases[None] > 150
    assert any(None in outcome.gradients for outcome in plain), "each is of all leaves"


class TenthMore:
    """A kernel of codes whose restored numbers are a tenth too large."""

    def __init__(self, kernel: Kernel) -> None:
        self.packed_nbytes, self.encode, self._decode = kernel.packed_nbytes, kernel.encode, kernel.decode

    def decode(self, packed: Tensor, out: Tensor) -> None:
        self._decode(packed, out)
        out.mul_(1.1)


def decode_a_tenth_more(patch: pytest.MonkeyPatch) -> None:
    kernel_of = Packing._new_kernel

    def broken(self: Packing, dtype: torch.dtype, *where: Any) -> Kernel:
        kernel = kernel_of(self, dtype, *where)
        return kernel if dtype is torch.bool else TenthMore(kernel)

    patch.setattr(Packing, "_new_kernel", broken)


def ignore_versions(patch: pytest.MonkeyPatch) -> None:
    for name in ("check_version", "refuse_modified"):
        patch.setitem(saved.NAMES, name, lambda *_: None)


def unpacked_by(patch: pytest.MonkeyPatch, broken: Callable[[object], Tensor]) -> None:
    """Let a function unpack in place of the library."""
    patch.setattr(Frame, "pair", lambda frame: (frame.hooks.pack, broken))


def lose_a_bit_of_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    def broken(form: object) -> Tensor:
        tensor = saved.library().unpack(form)
        lost = isinstance(form, saved.Kept) and tensor.dtype is torch.float32
        return torch.nextafter(tensor, tensor.new_zeros(())) if lost else tensor

    unpacked_by(patch, broken)


def raise_for_what_is_packed(patch: pytest.MonkeyPatch) -> None:
    def broken(form: object) -> Tensor:
        if isinstance(form, saved.Region):
            raise RuntimeError("broken")
        return saved.library().unpack(form)

    unpacked_by(patch, broken)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (decode_a_tenth_more, "int8 error"),
        (ignore_versions, "lossless raises nothing, torch RuntimeError in backward"),
        (lose_a_bit_of_what_is_kept, "lossless gradient"),
        (raise_for_what_is_packed, "int8 raises RuntimeError in backward, torch nothing"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_engine_is_found(damage: Callable[[pytest.MonkeyPatch], None], kind: str) -> None:
    for program in drawn(100):
        with pytest.MonkeyPatch.context() as patch:
            damage(patch)
            broken = kinds_of_failures(program)
        if kind in broken and kind not in kinds_of_failures(program):
            return
    pytest.fail(f"none of 100 programs found it: {kind}")


def kinds_of_failures(program: programs.Program) -> list[str]:
    return [kind for kind, _ in programs.check(program) or ()]


def written(*lines: str, inputs: tuple[str, ...] = ("x0 = torch.randn(8, 16).requires_grad_()",)) -> programs.Program:
    """Return a program of statements written out, one loss and a whole backward."""
    backward = (Statement("backward", "losses[0].backward()"),)
    statements = [tuple(Statement("line", line) for line in part) for part in (inputs, lines)]
    return programs.Program(1, "compressed()", {"group_size": 128}, 1, 1, (), *statements, backward)


LOSS = "losses[0] = losses[0] + {}.square().sum()"


def test_a_failing_program_is_made_smaller_and_fails_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_a_tenth_more(monkeypatch)
    program = written(
        "t1 = x0.sin()",
        "t2 = t1 + 1",
        "t3 = t2.cos()",
        "t4 = F.silu(x0 * 2)",
        LOSS.format("t3"),
        LOSS.format("t4"),
    )
    small = programs.shrink(program, "int8 error")
    assert "int8 error" in kinds_of_failures(small)
    assert len(small.forward) == 2
    assert small.options == {}


def test_blocks_are_opened_and_emptied() -> None:
    inner = Statement("line", "t1 = x0.sin()"), Statement("line", "t2 = t1.cos()")
    block = Statement("checkpoint", "def f0(x0):", inner, "    return t2\nt2 = checkpoint(f0, x0, use_reentrant=False)")
    program = written("t3 = t2 * 2", LOSS.format("t3"))
    program = programs.replace(program, forward=(block, *program.forward))
    assert run(program.namespace()).error is None
    texts = [[s.text() for s in candidate.forward] for candidate in programs._smaller(program)]
    assert ["t1 = x0.sin()", "t2 = t1.cos()", "t3 = t2 * 2", LOSS.format("t3")] in texts
    assert [] in texts


def script(program: programs.Program, folder: Path, damage: str = "") -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(damage + program.script())
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False)


def test_the_script_of_a_failure_fails_alone(tmp_path: Path) -> None:
    program = written("t1 = F.silu(x0 * 1.0)", "t2 = F.gelu(t1)", LOSS.format("t2"))
    assert script(program, tmp_path).stdout == "as plain torch\n"
    damage = (
        "from pyactcomp.engine.packing import Packing\n"
        "class Broken:\n"
        "    def __init__(self, kernel):\n"
        "        self.kernel, self.encode, self.packed_nbytes = kernel, kernel.encode, kernel.packed_nbytes\n"
        "    def decode(self, packed, out):\n"
        "        self.kernel.decode(packed, out)\n"
        "        out.mul_(1.5)\n"
        "kernel_of = Packing._new_kernel\n"
        "Packing._new_kernel = lambda self, *of: Broken(kernel_of(self, *of))\n"
    )
    done = script(program, tmp_path, damage)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"int8 error: [\d.]+%, allowed [\d.]+%\n", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("expression", ["F.silu(x0)", "F.gelu(x0.t())", "F.silu(x0[::2])"])
def test_the_yardstick_rounds_what_int8_packs(expression: str) -> None:
    program = written(f"t1 = {expression} + 1", "t2 = F.silu(t1)", LOSS.format("t2")).namespace()
    options: dict[str, Any] = {"mode": "int8", "min_bytes": 1}
    plain, int8 = run(program), run(program, **options)
    with rounding_to_bfloat16():
        rounded = run(program, **options)
    errors = [float((other.gradients[0] - plain.gradients[0]).norm()) for other in (rounded, int8)]
    assert 0 < errors[0] < errors[1]


def test_the_command_prints_scripts_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_for_what_is_packed(monkeypatch)
    assert programs.main(["--seed", "0", "--count", "2", "--modes", "int8"]) == 1
    printed = capsys.readouterr().out
    assert (
        printed.count("main(globals())") == printed.count("# int8 raises RuntimeError in backward, torch nothing: ") > 0
    )
    assert printed.splitlines()[-1].startswith("2 programs, ")
