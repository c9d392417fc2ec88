"""The entry point of the ``pyactcomp`` command; the commands need the ``cli`` extra, this module does not."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or name the package that it needs."""
    try:
        from . import commands
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pyactcomp"):
            raise
        sys.exit(f"the command line needs {error.name}, which is not installed; run: pip install 'pyactcomp[cli]'")
    program = None
    try:
        commands.app(prog_name="pyactcomp")
    except commands.Program as given:
        program = given
    if program is not None:  # outside of the handler, so that no error of the program's seems to follow from it
        program.execute()
