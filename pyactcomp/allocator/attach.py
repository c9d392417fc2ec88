"""Puts the allocator in the place of torch's."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from .. import _core, torch_private
from .._core import AllocatorConfig
from ..errors import PyactcompError
from . import plain, settings, subclass

_active: AllocatorConfig | None = None


def enable(
    max_split_size: int | str | None = None,
    growth: Literal["vmm", "malloc"] | None = None,
    *,
    max_non_split_rounding: int | str | None = None,
    large_segment_size: int | str | None = None,
    roundup_power2_divisions: int | dict[int | str, int] | None = None,
    garbage_collection_threshold: float | None = None,
    memory_fraction: float | None = None,
    initial_pool_size: int | str | None = None,
) -> None:
    """Let this process's CUDA tensors live in pyactcomp's allocator.

    A setting that is None comes from ``PYACTCOMP_ALLOC_CONF`` in the environment
    (``"max_split_size_mb:512,growth:vmm"``, PyTorch's syntax and keys), or has its default. torch's functions then
    speak of this allocator: ``torch.cuda.memory_stats``, ``empty_cache``, ``_set_allocator_settings`` and the like.

    Parameters
    ----------
    max_split_size : int or str, optional
        Free blocks at least this large, in bytes or as in ``"512MiB"``, are not split for smaller requests. At
        least 20 MiB. By default every block is.
    growth : {"vmm", "malloc"}, optional
        ``"vmm"``, the default, maps physical pieces into reserved addresses, so that free pieces can be put together;
        ``"malloc"`` calls cudaMalloc and takes PyTorch's decisions.
    max_non_split_rounding : int or str, optional
        How much larger than its request a block of at least ``max_split_size`` may be, in bytes; at least, and by
        default, 20 MiB.
    large_segment_size : int or str, optional
        A multiple of 2 MiB above 10 MiB, in bytes; 20 MiB by default. Under ``"malloc"`` the size of segments for
        requests from 1 to 10 MiB, under ``"vmm"`` the least size of a physical piece for requests above 1 MiB.
    roundup_power2_divisions : int or dict, optional
        Sizes are rounded up to one of so many steps between two powers of two. A dict gives the steps of the sizes
        from a number of MiB on; its key ``">"`` stands for all that are larger.
    garbage_collection_threshold : float, optional
        Share of the memory limit from which unused memory is given back by its age. Needs a limit:
        ``memory_fraction``, or ``torch.cuda.set_per_process_memory_fraction``.
    memory_fraction : float, optional
        Share of a device's memory that may be reserved, 0 to 1.
    initial_pool_size : int or str, optional
        Reserved at the first allocation on a device.

    Raises
    ------
    TypeError, ValueError
        If a setting has no such value, or ``PYACTCOMP_ALLOC_CONF`` is malformed, which is then named.
    PyactcompError
        If it is enabled already, if torch is built without CUDA or pyactcomp without its headers, if there is no
        device, or if it is too late (see the notes). Nothing is changed then.

    Warns
    -----
    UserWarning
        If the torch subclass cannot be used, with the reason.

    Notes
    -----
    The subclass, which ``pyactcomp build-allocator`` compiles for the installed torch, implements everything that
    torch asks of an allocator, also after CUDA was initialised. Without it the allocator is attached through
    ``torch.cuda.memory.CUDAPluggableAllocator``, which works only before CUDA is initialised and through which torch
    does not pass on everything: recording of memory history, out-of-memory observers,
    ``torch.compile(mode="reduce-overhead")``, ``torch.cuda.MemPool()``, ``torch.backends.cudnn.benchmark = True``
    (which asks for ``cacheInfo``) and CUDA tensors shared between processes raise there, and running out of memory
    raises a RuntimeError, with the text of ``torch.OutOfMemoryError``.

    There is no way back within a process. ``PYACTCOMP_DISABLE=1`` in the environment turns this into a no-op.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> allocator.enable(max_split_size="512MiB")  # doctest: +SKIP
    """
    if not settings.disabled():
        given = settings.override(
            settings.from_environment(),
            max_split_size=max_split_size,
            growth=growth,
            max_non_split_rounding=max_non_split_rounding,
            large_segment_size=large_segment_size,
            roundup_power2_divisions=roundup_power2_divisions,
            garbage_collection_threshold=garbage_collection_threshold,
            memory_fraction=memory_fraction,
            initial_pool_size=initial_pool_size,
        )
        activate(given)


def is_enabled() -> bool:
    """Return whether :func:`enable` has put the allocator in its place.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> allocator.is_enabled() in (True, False)
    True
    """
    return _active is not None


def library_path() -> str:
    """Return the path of the library with ``pyactcomp_malloc`` and ``pyactcomp_free``.

    For ``torch.cuda.memory.CUDAPluggableAllocator`` in place of :func:`enable`. As the source of a
    ``torch.cuda.MemPool`` take ``pyactcomp_pool_malloc`` and ``pyactcomp_pool_free``: torch caches above them and
    handles a failure itself.

    Raises
    ------
    PyactcompError
        If pyactcomp is built without CUDA's headers.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> allocator.library_path()  # doctest: +SKIP
    '/usr/lib/python3/dist-packages/pyactcomp/_core.cpython-312-x86_64-linux-gnu.so'
    """
    if not _core.has_cuda_allocator:
        raise PyactcompError(_NO_RUNTIME)
    return _core.__file__


_NO_RUNTIME = (
    "pyactcomp is built without CUDA's headers: pip install nvidia-cuda-runtime, or set CUDA_HOME to a CUDA toolkit, "
    "and then install pyactcomp again"
)


def unavailable_reason() -> str | None:
    """Return why the allocator cannot be enabled on this machine, and the remedy, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install one that is built with it"
    if not _core.has_cuda_allocator:
        return _NO_RUNTIME
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def activate(config: AllocatorConfig) -> None:
    """Attach the allocator with these settings; see :func:`enable`."""
    global _active
    if _active is not None:
        raise PyactcompError(
            f"the allocator is enabled already, with {str(_active) or 'the default settings'}, and stays so as long "
            "as the process lives: call enable once"
        )
    reason = unavailable_reason()
    if reason is not None:
        raise PyactcompError(f"the allocator cannot be enabled: {reason}")
    extension, missing = subclass.load()
    if extension is not None:
        _core.runtime_configure(config)
        extension.install(_core.runtime_capsule())
    else:
        _attach_plainly(config, missing)
    # torch parses settings itself and tells no allocator of them.
    torch_private.replace_entry_points({"_accelerator_setAllocatorSettings": _set_allocator_settings})
    _active = config


def _attach_plainly(config: AllocatorConfig, missing: str | None) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise PyactcompError(
            "CUDA is initialised already (torch.cuda.is_initialized()), and torch's plain interface for allocators "
            "admits none after that: call pyactcomp.allocator.enable before the first use of CUDA, or start the script "
            f"with pyactcomp run. With the torch subclass it works at any time, but {missing}"
        )
    _core.runtime_configure(config)
    plain.attach(library_path())
    warnings.warn(
        f"pyactcomp's allocator is attached through torch's plain interface, because {missing}. "
        "Until then, running out of memory raises a RuntimeError with the text of torch.OutOfMemoryError, and these "
        f"raise: {', '.join(plain.MISSING)}.",
        stacklevel=4,
    )


def _set_allocator_settings(text: str) -> None:
    """Change settings of the running allocator, as torch.cuda.memory._set_allocator_settings does of torch's own."""
    running = [_core.runtime_existing(index) for index in range(torch.cuda.device_count())]
    # Each device may have a memory fraction of its own.
    changed = [(device, AllocatorConfig.parse(text, device.config)) for device in running if device is not None]
    _core.runtime_configure(AllocatorConfig.parse(text, _core.runtime_config()))
    for device, config in changed:
        device.configure(config)
