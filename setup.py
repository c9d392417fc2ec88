"""Builds pyactcomp._core with CMake and ninja, and the torch subclass; everything else is in pyproject.toml.

``PAC_CUDA=AUTO|ON|OFF`` in the environment decides about the CUDA kernels; AUTO builds them where nvcc is found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

# In a process of its own: it imports this tree's package, with the module that was just built beside it.
BUILD_SUBCLASS = """
import pathlib, sys
root, output, package = map(pathlib.Path, sys.argv[1:])
sys.path.insert(0, str(root))
try:
    import pyactcomp
    pyactcomp.__path__.append(str(output))
    from pyactcomp.allocator.build import build_torch_allocator
    build_torch_allocator(package, source=root / "csrc")
except Exception as error:
    sys.exit(str(error))
"""


def _tool(name: str) -> str:
    """Return the program next to this interpreter (from pip), else the one on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


class CMakeBuild(build_ext):
    """Configures and builds in ``build/<interpreter>-<cuda>``, which later builds reuse."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cuda = os.environ.get("PAC_CUDA", "AUTO")
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-{cuda.lower()}"
        ninja = _tool("ninja")
        configure = [
            _tool("cmake"),
            f"-S{ROOT}",
            f"-B{build}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPAC_CUDA={cuda}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run([_tool("cmake"), "--build", str(build)], check=True)
        # An editable install copies back only the extensions that setuptools knows, so there it goes where it stays.
        package = ROOT / "pyactcomp" if self.editable_mode else output
        subclass = [sys.executable, "-c", BUILD_SUBCLASS, str(ROOT), str(output), str(package)]
        done = subprocess.run(subclass, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            self.warn(f"pyactcomp._torch_allocator was not built, everything else works: {done.stderr.strip()}")


setup(
    ext_modules=[Extension("pyactcomp._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
