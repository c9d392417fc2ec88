"""The names of :mod:`pyactcomp.snapshots.reader` under this module's older name."""

from ..snapshots.reader import DeviceTrace, Frame, Settings, Snapshot, read_snapshot

__all__ = ["DeviceTrace", "Frame", "Settings", "Snapshot", "read_snapshot"]
