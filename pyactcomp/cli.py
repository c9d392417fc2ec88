"""The entry point of the ``pyactcomp`` command; the commands need the ``cli`` extra, this module does not."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from . import commands
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pyactcomp"):
            raise
        sys.exit(f"the command line needs {error.name}, which is not installed; run: pip install 'pyactcomp[cli]'")
    commands.app(prog_name="pyactcomp")
