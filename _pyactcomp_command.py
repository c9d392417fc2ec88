"""The ``pyactcomp`` command. Where the package does not import, the command says why, and what to install.

So the module stands outside the package, whose import takes torch's, and imports nothing of either before.
"""

import platform
import sys
import traceback
from importlib import metadata


def main() -> None:
    """Run the command line, or end with the reason why pyactcomp does not import."""
    try:
        from pyactcomp.cli import main as run
    except Exception as error:  # a missing torch, or one that changed, may raise anything
        sys.exit(_explained(error))
    run()


def _explained(error: Exception) -> str:
    versions = [f"python {platform.python_version()}", *(f"{name} {_version(name)}" for name in ("pyactcomp", "torch"))]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    try:
        [needed] = [each for each in metadata.requires("pyactcomp") or () if each.startswith("torch")]
    except (metadata.PackageNotFoundError, ValueError):
        needed = "torch"
    return (
        f"{', '.join(versions)}\n"
        f"problem: pyactcomp does not import: {type(error).__name__}: {error}{where}\n"
        f"pyactcomp needs {needed}: pip install '{needed}', and then install pyactcomp again"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
