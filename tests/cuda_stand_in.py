"""A torch without CUDA initialises "CUDA": torch's own Python code, over stand-ins for functions of torch._C.

The environments of test_allocator_variable.py import this file as Python starts, if PAC_STAND_IN is set. The stand-ins
come into torch._C before torch.cuda is imported, as if torch had been built with CUDA; ``events`` tells of their calls.
"""

import importlib.machinery
import os
import sys
import types
from pathlib import Path

# "install": our allocator became torch's; "count": CUDA counted devices, which starts a driver; "init", "history",
# "observer": torch initialised CUDA.
events: list[str] = []
# Of CUDA's initialisation: the devices that it was shown, and whether a driver was loaded before.
visible: list[str | None] = []
drivers_before: list[bool] = []
_forked_after_cuda = False


def _initialise(event: str) -> None:
    if not drivers_before:
        visible.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        drivers_before.append("libcuda.so" in Path("/proc/self/maps").read_text())
        os.register_at_fork(after_in_child=_forked)
    events.append(event)


def _count() -> int:
    if not drivers_before:
        events.append("count")
    return 1


def _forked() -> None:
    global _forked_after_cuda
    _forked_after_cuda = True


class _Stage:
    """Told of the import of torch.cuda before pyactcomp is: inserted later into sys.meta_path, at the front."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name != "torch.cuda":
            return
        sys.modules["torch"].version.cuda = "13.0"
        functions = {
            "_cuda_init": lambda: _initialise("init"),
            "_cuda_record_memory_history": lambda *_: _initialise("history"),
            "_cuda_attach_out_of_memory_observer": lambda _: _initialise("observer"),
            "_cuda_isInBadFork": lambda: _forked_after_cuda,
            "_cuda_getDeviceCount": _count,
            "_cuda_getArchFlags": lambda: None,
            "_cudart": types.SimpleNamespace(),
        }
        for each, function in functions.items():
            setattr(sys.modules["torch._C"], each, function)


class _Subclass(types.ModuleType):
    """In place of the module that torch's headers are needed for."""

    @property
    def BUILT_FOR(self) -> str:
        return sys.modules["torch"].__version__

    def install(self, capsule: object) -> None:
        events.append("install")


sys.meta_path.insert(0, _Stage)
_subclass = _Subclass("pyactcomp._torch_allocator")
_subclass.__spec__ = importlib.machinery.ModuleSpec("pyactcomp._torch_allocator", None)
sys.modules["pyactcomp._torch_allocator"] = _subclass
