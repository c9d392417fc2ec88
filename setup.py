"""Builds pyactcomp._core with CMake and ninja, and the libraries for torch; everything else is in pyproject.toml.

The libraries for torch are built where this interpreter has a torch; otherwise their first use builds them.

``PAC_CUDA=AUTO|ON|OFF`` in the environment decides about the CUDA kernels; AUTO builds them where nvcc is found. A
wheel with ``ON`` has the build number ``1cuda``, which pip prefers to a wheel without one. The allocator is in both: it
needs cuda.h alone, of ``CUDA_HOME``, of /usr/local/cuda or of NVIDIA's packages.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent

# In a process of its own: it imports this tree's package, with the module that was just built beside it. What a command
# has compiled of the same sources is kept: the editable installation and both wheels have the same libraries.
BUILD_FOR_TORCH = """
import hashlib, pathlib, shutil, sys
name, root, output, package = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
sys.path.insert(0, str(root))
try:
    import pyactcomp
    pyactcomp.__path__.append(str(output))
    from pyactcomp.torch_private import extensions
    from pyactcomp.allocator.build import build_torch_allocator
    source = root / "csrc"
    command = " ".join(extensions.compile_command(name, source))
    kept = root / "build" / "torch_libraries" / hashlib.sha256(command.encode()).hexdigest()[:12]
    found = list(kept.glob(f"{extensions.folder_of(name, source)}/{name}.*"))
    if found:
        [module] = found
    elif name == "_torch_allocator":
        module = build_torch_allocator(kept, source=source)
    else:
        module = extensions.build(name, kept, source=source)
    folder = package / "torch_libraries" / module.parent.name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(module, folder / module.name)
except Exception as error:
    sys.exit(str(error))
"""


def _tool(name: str) -> str:
    """Return the program next to this interpreter (from pip), else the one on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _cuda_packages() -> list[str]:
    """Return the folders of NVIDIA's packages that this interpreter sees, some of which hold CUDA's headers."""
    spec = importlib.util.find_spec("nvidia")
    locations = (spec and spec.submodule_search_locations) or ()
    return [str(folder) for location in locations for folder in sorted(Path(location).glob("*"))]


def _seeing_torch() -> dict[str, str]:
    """Return an environment in which this interpreter sees the torch that the package will run with.

    pip's build isolation hides it by these two variables.
    """
    hiding = () if importlib.util.find_spec("torch") else ("PYTHONPATH", "PYTHONNOUSERSITE")
    return {name: value for name, value in os.environ.items() if name not in hiding}


# The address of the repository, which the forge's workflows set; elsewhere empty.
HOME = os.environ.get("PYACTCOMP_REPOSITORY", "").rstrip("/")
PAGES = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}


def _readme() -> str:
    """Return the README; an index has none of the files that it links to, so links lead to the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if HOME:
        text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{HOME}/raw/main/", text)
        text = re.sub(r"(?<=\]\()(?!https?:|#)", f"{HOME}/blob/main/", text)
    return text


class CMakeBuild(build_ext):
    """Configures and builds in ``build/<interpreter>-<cuda>``, which later builds reuse.

    A build that finds nvcc by itself has the folder of one that was told to: their objects are the same.
    """

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cuda = os.environ.get("PAC_CUDA", "AUTO")
        kernels = {"AUTO": "on" if os.environ.get("CUDACXX") or shutil.which("nvcc") else "off"}.get(cuda, cuda.lower())
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-{kernels}"
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
            f"-DPAC_CUDA_PACKAGES={';'.join(_cuda_packages())}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run([_tool("cmake"), "--build", str(build)], check=True)
        # An editable install copies back only the extensions that setuptools knows, so there it goes where it stays.
        package = ROOT / "pyactcomp" if self.editable_mode else output

        def build_for_torch(name: str) -> str:
            library = [sys.executable, "-c", BUILD_FOR_TORCH, name, str(ROOT), str(output), str(package)]
            done = subprocess.run(library, stderr=subprocess.PIPE, text=True, env=_seeing_torch())
            return done.stderr.strip() if done.returncode != 0 else ""

        # Each takes half a minute of one core and a gigabyte.
        names = ("_observer", "_phantom", "_torch_allocator")
        with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
            for name, failed in zip(names, pool.map(build_for_torch, names), strict=True):
                if failed:
                    self.warn(f"pyactcomp.{name} was not built, and its first use will try: {failed}")


class BuildWithSources(build_py):
    """Puts ``csrc`` into the wheel: the libraries for torch are compiled from it for any later release of torch.

    ``pyactcomp.pth`` goes to the root of the wheel, from where it is installed into site-packages; an editable install
    builds a wheel too, which has no files of ``build_lib``.
    """

    def run(self) -> None:
        super().run()
        root = Path(self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib)
        root.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "pyactcomp.pth", root)
        if not self.editable_mode:
            shutil.copytree(ROOT / "csrc", root / "pyactcomp" / "csrc", dirs_exist_ok=True)


setup(
    long_description=_readme(),
    long_description_content_type="text/markdown",
    project_urls={name: HOME + page for name, page in PAGES.items()} if HOME else {},
    ext_modules=[Extension("pyactcomp._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildWithSources},
    options={"bdist_wheel": {"build_number": "1cuda"}} if os.environ.get("PAC_CUDA") == "ON" else {},
)
