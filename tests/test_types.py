"""What a type checker learns of the public functions: mypy runs on a program of a user."""

from __future__ import annotations

import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from pyactcomp.config import Config, Options

ROOT = Path(__file__).parents[1]

PROGRAM = """
import torch
from typing_extensions import assert_type

import pyactcomp


class Net(torch.nn.Module):
    pass


model = Net()
model = pyactcomp.compress(model, mode="lossless")
assert_type(model, Net)
assert_type(pyactcomp.compress(Net()), Net)
assert_type(pyactcomp.decompress(model), Net)
pyactcomp.compress(model, mode="int4")  # type: ignore[arg-type]
pyactcomp.compress(model, group=64)  # type: ignore[call-arg]
pyactcomp.verify(model, 1, lambda output: torch.ones(()), mode="int4")  # type: ignore[arg-type]
pyactcomp.verify(model, 1, lambda output: torch.ones(()), group=64)  # type: ignore[call-arg]
"""

ADAPTERS = """
from pyactcomp.integrations.accelerate import prepare
from pyactcomp.integrations.lightning import Compression
from pyactcomp.integrations.transformers import CompressionCallback

CompressionCallback(mode="lossless", skip=["head"])
CompressionCallback(mode="int4")  # type: ignore[arg-type]
CompressionCallback(group=64)  # type: ignore[call-arg]
Compression(fuse_head=1.5)  # type: ignore[arg-type]
"""


def test_options_to_pass_on_are_those_of_the_configuration() -> None:
    typed = {name: each.__forward_arg__ for name, each in Options.__annotations__.items()}
    assert typed == {field.name: field.type for field in fields(Config)}
    assert Options.__required_keys__ == frozenset()
    assert typing.get_type_hints(Options)


@pytest.mark.slow
@pytest.mark.parametrize("program", [PROGRAM, ADAPTERS], ids=["library", "adapters"])
def test_a_type_checker_keeps_the_models_type_and_knows_the_options(program: str, tmp_path: Path) -> None:
    """An ignored error that does not occur is an error too."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    file = tmp_path / "program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
