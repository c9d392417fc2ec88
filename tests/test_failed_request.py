"""The request that a recorded program died of, as one more allocation."""

from __future__ import annotations

from allocator_cases import MIB
from replay_cases import Row, events

from pyactcomp.snapshots.failed_request import with_failed_request
from pyactcomp.snapshots.replay import replay

BASE = 1 << 46
AWAY = (("free_requested", BASE, 40 * MIB), ("free_completed", BASE, 40 * MIB))
DIED: list[Row] = [("alloc", BASE, 40 * MIB), *AWAY, ("segment_free", BASE, 40 * MIB), ("oom", 0, 100 * MIB)]


def test_failed_request_is_replayed_and_what_was_given_back_for_it_is_no_emptied_cache() -> None:
    changed, notes = with_failed_request(events(DIED))
    result = replay(changed)
    # Nothing is given back before there is need: 40 MiB stay in the cache beside the request.
    assert (result.peak_reserved, result.cache_emptied, result.allocations) == (140 * MIB, 0, 2)
    assert len(notes) == 1
    # Where memory is short it is given back, as the program did it.
    assert (replay(changed, capacity=100 * MIB).oom_at, replay(changed, capacity=98 * MIB).oom_at) == (None, 4)


def test_failed_request_after_which_the_program_went_on_is_left_out_and_named() -> None:
    went_on = [*DIED, ("alloc", BASE, 10 * MIB)]
    changed, notes = with_failed_request(events(went_on))
    assert changed.devices[0].events == events(went_on).devices[0].events
    assert notes == (
        "device 0: memory ran out, first at event 4 (1 in all), and the program went on: the failed requests are "
        "not replayed",
    )
