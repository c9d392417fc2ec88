"""Replaces torch's CUDA allocator with pyactcomp's."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Literal

import torch

from .. import _core
from .._core import AllocatorConfig
from ..errors import PyactcompError
from ..torch_private import extensions
from . import plain, runtime_settings, settings
from .build import build_torch_allocator

_active: AllocatorConfig | None = None
_by_variable = False


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
    graph_capture_record_stream_reuse: bool | None = None,
) -> None:
    """Let this process's CUDA tensors live in pyactcomp's allocator.

    Settings left at None come from ``PYACTCOMP_ALLOC_CONF`` in the environment (``"max_split_size_mb:512,growth:vmm"``,
    PyTorch's syntax and keys), or have their defaults. torch's functions then report on and control this allocator:
    ``torch.cuda.memory_stats``, ``empty_cache``, ``_set_allocator_settings`` and the like.

    Parameters
    ----------
    max_split_size : int or str, optional
        Free memory blocks at least this large, in bytes or as in ``"512MiB"``, are not split for smaller requests. At
        least 20 MiB. By default every block may be split.
    growth : {"vmm", "malloc"}, optional
        ``"vmm"``, the default, maps physical pieces into reserved addresses, so that free pieces can be put together;
        ``"malloc"`` calls cudaMalloc and makes PyTorch's decisions.
    max_non_split_rounding : int or str, optional
        How much larger than a request of at least ``max_split_size`` its block may be, in bytes; at least, and by
        default, 20 MiB.
    large_segment_size : int or str, optional
        A multiple of 2 MiB above 10 MiB, in bytes; 20 MiB by default. Under ``"malloc"`` the size of segments for
        requests from 1 to 10 MiB, under ``"vmm"`` the least size of a physical piece for requests above 1 MiB.
    roundup_power2_divisions : int or dict, optional
        Round sizes up to one of this many steps between two powers of two. A dict maps a size in MiB to the steps from
        that size on, and ``">"`` to the steps of all larger sizes.
    garbage_collection_threshold : float, optional
        Give unused memory back, oldest first, once more than this share of the memory limit (``memory_fraction``), or
        of the device's memory without a limit, is reserved.
    memory_fraction : float, optional
        Share of a device's memory for the allocator to reserve at most, 0 to 1.
    initial_pool_size : int or str, optional
        Bytes to reserve for the large pool at a device's first allocation from there.
    graph_capture_record_stream_reuse : bool, optional
        Reuse memory recorded on other streams within the capture of a CUDA graph, once these streams have joined. By
        default the memory is reused after the capture.

    Raises
    ------
    TypeError, ValueError
        If a setting is out of range, or ``PYACTCOMP_ALLOC_CONF`` is malformed; the message names the one at fault.
    PyactcompError
        If the allocator is enabled already, torch is built without CUDA or pyactcomp without its headers, there is no
        device, or the call comes too late (see the notes). Nothing is changed then.

    Warns
    -----
    UserWarning
        If the torch subclass cannot be used, with the reason. Once, at the first allocation, if growth is by ``"vmm"``
        and the device maps no memory: the allocator then grows as under ``"malloc"``.

    Notes
    -----
    The first call under a torch compiles the subclass of torch's allocator, with one line in the log, as ``pyactcomp
    build-allocator`` does: ten seconds, once, with a C++ compiler and CUDA's headers. The subclass
    implements the whole interface of torch's allocators, and can be installed after CUDA was initialised too. Without
    the subclass, the allocator is attached through ``torch.cuda.memory.CUDAPluggableAllocator``. This works only before
    CUDA is initialised, and torch does not forward everything: recording of memory history, out-of-memory observers,
    ``torch.compile(mode="reduce-overhead")``, ``torch.cuda.MemPool()``, ``torch.backends.cudnn.benchmark = True``
    (it calls ``cacheInfo``) and CUDA tensors shared between processes raise there, and running out of memory raises a
    RuntimeError with the text of ``torch.OutOfMemoryError``.

    The allocator stays enabled until the process ends. ``PYACTCOMP_DISABLE=1`` in the environment turns the call into a
    no-op. ``PYACTCOMP_ALLOCATOR=1`` enables the allocator at the first use of CUDA, without a call; a later call with
    equal settings does nothing.

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
            graph_capture_record_stream_reuse=graph_capture_record_stream_reuse,
        )
        activate(given)


def is_enabled() -> bool:
    """Return whether :func:`enable` has replaced torch's allocator.

    Examples
    --------
    >>> from pyactcomp import allocator
    >>> allocator.is_enabled() in (True, False)
    True
    """
    return _active is not None


def library_path() -> str:
    """Return the path of the library with ``pyactcomp_malloc`` and ``pyactcomp_free``.

    Give the path to ``torch.cuda.memory.CUDAPluggableAllocator`` in place of :func:`enable`. As the source of a
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
        return f"torch {torch.__version__} is built without CUDA: install a build with CUDA"
    if not _core.has_cuda_allocator:
        return _NO_RUNTIME
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def activate(config: AllocatorConfig) -> None:
    """Attach the allocator with these settings; see :func:`enable`."""
    if _active is not None:
        if _by_variable and config == _active:
            return
        raise PyactcompError(
            f"the allocator is enabled already{', by PYACTCOMP_ALLOCATOR=1' if _by_variable else ''}, with "
            f"{str(_active) or 'the default settings'}, and stays so as long as the process lives: call enable once"
        )
    reason = unavailable_reason()
    if reason is not None:
        raise PyactcompError(f"the allocator cannot be enabled: {reason}")
    extension, missing = extensions.load_or_build("_torch_allocator", build_torch_allocator)
    if extension is not None:
        _install(extension, config)
    else:
        _attach_pluggable(config, missing)
        _attached(config)


def attach_by_variable(config: AllocatorConfig) -> None:
    """Attach the subclass with these settings, without a look for devices: torch is about to look for them."""
    global _by_variable
    if not _core.has_cuda_allocator:
        raise PyactcompError(_NO_RUNTIME)
    extension, missing = extensions.load_or_build("_torch_allocator", build_torch_allocator)
    if extension is None:
        raise PyactcompError(missing)
    _install(extension, config)
    _by_variable = True


def _install(extension: ModuleType, config: AllocatorConfig) -> None:
    _core.runtime_configure(config)
    extension.install(_core.runtime_capsule())
    _attached(config)


def _attached(config: AllocatorConfig) -> None:
    global _active
    # torch parses settings itself and does not forward them to the allocator.
    runtime_settings.attach(config)
    _active = config


def _attach_pluggable(config: AllocatorConfig, missing: str | None) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise PyactcompError(
            "CUDA is initialised already (torch.cuda.is_initialized()), and torch takes a CUDAPluggableAllocator only "
            "before that: call pyactcomp.allocator.enable before the first use of CUDA, or start the script with "
            f"pyactcomp run. With the torch subclass, enable works at any time, but {missing}"
        )
    _core.runtime_configure(config)
    plain.attach(library_path())
    warnings.warn(
        f"pyactcomp's allocator is attached through torch's CUDAPluggableAllocator, because {missing}. "
        "Until then, running out of memory raises a RuntimeError with the text of torch.OutOfMemoryError, and these "
        f"raise: {', '.join(plain.MISSING)}.",
        stacklevel=4,
    )
