"""The names of :mod:`pyactcomp.snapshots.reader`, where programs have imported them from."""

from ..snapshots.reader import DeviceTrace, Frame, Settings, Snapshot, read_snapshot

__all__ = ["DeviceTrace", "Frame", "Settings", "Snapshot", "read_snapshot"]
