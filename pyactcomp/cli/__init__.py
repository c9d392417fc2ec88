"""Entry point of the command line; names a package that is missing after an installation without dependencies."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or name the missing package."""
    try:
        from . import commands
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pyactcomp"):
            raise
        sys.exit(f"the command line needs {error.name}, which is not installed; run: pip install {error.name}")
    program = None
    try:
        commands.app(prog_name="pyactcomp")
    except commands.Program as given:
        program = given
    if program is not None:  # outside the handler, so an error of the program is not chained to this exception
        program.execute()
