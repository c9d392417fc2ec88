"""Attaches the allocator as torch initialises CUDA; pyactcomp.pth calls :func:`wait` if PYACTCOMP_ALLOCATOR is set.

Every Python process that inherits the variable runs this module. So the module stands outside the package, whose import
takes torch's, and imports only what Python has loaded at its start.
"""

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Functions of torch._C that initialise CUDA, and that torch looks up there at each call. torch.cuda._lazy_init, behind
# nearly every use of CUDA, calls the first. The others hand the allocator a recording or an observer before that, and
# another allocator attached later would not have them.
INITIALISING = (
    "_cuda_init",
    "_cuda_record_memory_history",
    "_cuda_record_memory_history_legacy",
    "_cuda_attach_out_of_memory_observer",
)

# torch's functions and ours in their place, by name.
_replaced: "dict[str, tuple[Callable[..., Any], Callable[..., Any]]]" = {}
# Reentrant: a call of torch's while this thread attaches goes on to torch.
_attaching = _thread.RLock()
_done = False


class TorchWatcher:
    """A finder of modules that finds none: Python tells it when torch.cuda is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Prepare torch._C, which torch imports before torch.cuda."""
        if name == "torch.cuda":
            _prepare()


def wait() -> None:
    """Attach the allocator when torch initialises CUDA, imported already or later."""
    sys.meta_path.insert(0, TorchWatcher)
    if "torch.cuda" in sys.modules:
        _prepare()


def _prepare() -> None:
    torch_c = sys.modules.get("torch._C")
    for name in INITIALISING:
        function = getattr(torch_c, name, None)  # a torch without CUDA has none
        if function is not None and name not in _replaced:
            _replaced[name] = function, _after_attaching(function)
            setattr(torch_c, name, _replaced[name][1])


def _after_attaching(function: "Callable[..., Any]") -> "Callable[..., Any]":
    def call(*args: object, **kwargs: object) -> object:
        _attach()
        return function(*args, **kwargs)

    return call


def _attach() -> None:
    """Attach once, before CUDA is initialised: torch's own allocator then never has memory. Calls no driver."""
    global _done
    with _attaching:
        if _done:
            return
        _done = True
        try:
            from pyactcomp.allocator import variable

            problem = variable.attach()
        except Exception as error:  # torch's allocator serves, whatever is wrong with pyactcomp
            problem = f"{type(error).__name__}: {error}"
        torch_c = sys.modules["torch._C"]
        for name, (function, replacement) in _replaced.items():
            if getattr(torch_c, name) is replacement:
                setattr(torch_c, name, function)
    if problem is not None:
        import warnings

        # The line behind _cuda_init and _lazy_init that used CUDA first.
        warnings.warn(f"pyactcomp's allocator is not attached, torch's own serves: {problem}", stacklevel=4)
