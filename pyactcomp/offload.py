"""The offload of stored bytes to host memory: what it moved, its host memory, and the link.

Switch it on with ``pyactcomp.compress(model, offload=1.0)``; :func:`pyactcomp.compress` has the choices.
"""

from __future__ import annotations

import torch

from .engine.offloading import Rates, all_alive, link_of, pinned_bytes, rates_of, reason_without_link
from .engine.offloading import is_remote as _is_remote
from .errors import ImplementationUnavailableError

__all__ = ["Rates", "is_remote", "link", "pinned_bytes", "statistics", "trim"]


def statistics() -> dict[str, dict[str, float]]:
    """Return what offload has moved in this process so far, for each device the sums over all models.

    Returns
    -------
    dict of str to dict of str to float
        The counts below, by the name of the device.

    Notes
    -----
    Tensors so far; the same names with ``_bytes``, except ``prefetched`` and ``late``, count their bytes:

    - ``packed``: stored.
    - ``sent``: copied to the host.
    - ``left``: freed on the device.
    - ``held``: sent, and not freed in time, because the program held the memory.
    - ``stayed``: of the share that stays, or without room on the host.
    - ``brought``: copied back.
    - ``prefetched``: copied back before backward asked.
    - ``late``: copied back because backward asked.

    Now:

    - ``alive``: tensors on the tape, wherever their bytes are.
    - ``device_bytes``: bytes on the device.
    - ``window_bytes``: most bytes that a forward leaves on the device.
    - ``host_bytes``: bytes on the host.
    - ``host_peak_bytes``: most bytes on the host so far.
    - ``pinned_bytes``: host memory that is pinned, see :func:`pinned_bytes`.
    - ``pins``: calls that pinned memory so far.

    Seconds on the device, of the passes that are over:

    - ``forward_seconds``: forwards.
    - ``forward_waited_seconds``: waits of forwards for copies.
    - ``backward_seconds``: backwards.
    - ``backward_waited_seconds``: waits of backwards for copies.

    Examples
    --------
    >>> import pyactcomp
    >>> pyactcomp.offload.statistics()          # nothing is offloaded yet
    {}
    """
    total: dict[str, dict[str, float]] = {}
    for offloading in all_alive():
        for device, counts in offloading.statistics().items():
            sums = total.setdefault(device, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                sums[name] += count
    return total


def trim() -> int:
    """Give pinned host memory that holds nothing back to the host, and return how many bytes.

    The next step pins anew what it needs, which takes time: call this after training, or before another program needs
    the memory. Deleting or decompressing a model does the same for the model's host memory.

    Examples
    --------
    >>> import pyactcomp
    >>> pyactcomp.offload.trim()
    0
    """
    return sum(offloading.trim() for offloading in all_alive())


def link(device: torch.device | str | int | None = None) -> Rates:
    """Return the rates of copies between a GPU and pinned host memory, in bytes a second.

    The first call for a device measures for about 20 ms, and waits for the copies.

    Parameters
    ----------
    device : torch.device or str or int, optional
        By default the current CUDA device.

    Returns
    -------
    Rates
        ``to_host`` and ``to_device``.

    Raises
    ------
    ImplementationUnavailableError
        If offload cannot work on the device; the error says why.
    """
    return rates_of(_place(device))


def is_remote(device: torch.device | str | int | None = None) -> bool | None:
    """Return whether no CPU of this process is near a GPU, so that copies take longer; None if the system is silent.

    Parameters
    ----------
    device : torch.device or str or int, optional
        By default the current CUDA device.

    Raises
    ------
    ImplementationUnavailableError
        If offload cannot work on the device; the error says why.
    """
    return _is_remote(link_of(_place(device)).pci_address)


def _place(device: torch.device | str | int | None) -> torch.device:
    """Return a device that stored bytes can leave, or raise."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    reason = reason_without_link(place)
    if reason is not None:
        raise ImplementationUnavailableError(f"there is no link to measure: {reason}")
    return place
