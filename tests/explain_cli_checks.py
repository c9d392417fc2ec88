"""The command ``explain`` as its tests call it. Import after typer and rich are known to be there."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from pyactcomp.cli.commands import app


def run(*arguments: object) -> Result:
    # Wide enough that no table is folded.
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["explain", *map(str, arguments)])


def said(ran: Result) -> str:
    """Return an error without its box."""
    return " ".join(ran.output.replace("│", " ").split())
