"""Contract under test: what PyTorch's settings do in a replay is what they do in PyTorch's allocator."""

from __future__ import annotations

import pytest
from allocator_cases import MIB
from replay_cases import Row, events, freed, held, passed

from pyactcomp.snapshots.replay import replay

GROWING = events([row for number in range(12) for row in passed(2 * number + 1, 400 + 40 * number)])


def test_garbage_is_collected_only_under_a_memory_fraction() -> None:
    """``garbage_collect_cached_blocks`` runs only if a fraction below 1 was set."""
    plain = sum(400 + 40 * number for number in range(12)) * MIB
    assert replay(GROWING, "native", "20GiB").peak_reserved == plain
    for fraction in ("", ",per_process_memory_fraction:1.0"):
        config = f"native[garbage_collection_threshold:0.2{fraction}]"
        assert replay(GROWING, config, "20GiB").peak_reserved == plain
    # A fifth of 90 % of 20 GiB is 3686 MiB: above it, each new segment finds the unused ones given back.
    limited = "native[garbage_collection_threshold:0.2,per_process_memory_fraction:0.9]"
    assert replay(GROWING, limited, "20GiB").peak_reserved < plain
    # This package's allocator takes the device's memory for the limit, if none is set.
    ours = "pyactcomp[growth:malloc,garbage_collection_threshold:0.2]"
    assert replay(GROWING, ours, "20GiB").peak_reserved < plain


def test_garbage_below_the_average_age_stays() -> None:
    """Ages are counted in searches for a block, and compared with their average in floating point."""
    # Of two unused blocks, of 100 and 200 MiB, the second became free one search later: half below the average.
    rows = [*held(1, 100), *held(2, 200), *held(3, 300), *freed(1, 100), *freed(3, 300), *held(3, 300), *freed(2, 200)]
    # 600 MiB are reserved, and 540 allowed: the older block is enough.
    config = "native[garbage_collection_threshold:0.15,per_process_memory_fraction:0.9]"
    result = replay(events([*rows, *held(4, 700)]), config, 4000 * MIB)
    assert result.peak_reserved == (200 + 300 + 700) * MIB


def test_ages_of_garbage_count_each_request_once() -> None:
    """Also a request that is searched for again, after memory came from the device."""
    unused = [*freed(4, 400), *freed(1, 100), *held(5, 500), *freed(2, 200), *held(4, 400), *freed(3, 300)]
    rows = [*held(1, 100), *held(2, 200), *held(3, 300), *held(4, 400), *unused]
    # Of 100, 200 and 300 MiB unused, the ages are 2, 1 and 0. Of 1500 MiB reserved, 1404 are allowed: the first two go.
    config = "native[garbage_collection_threshold:0.39,per_process_memory_fraction:0.9]"
    result = replay(events([*rows, *held(6, 700)]), config, 4000 * MIB)
    assert result.peak_reserved == (1500 - 100 - 200 + 700) * MIB


def big_and_small(rounds: int) -> list[Row]:
    """Return rounds that leave a free block of 1 GiB in front of one that stays, and small requests after."""
    rows: list[Row] = []
    for number in range(rounds):
        at = 100 * number
        rows += [*held(at + 1, 400), *held(at + 2, 600), *held(at + 3, 30), *freed(at + 1, 400), *freed(at + 2, 600)]
        small = [at + 10 + place for place in range(8)]
        rows += [row for each in small for row in held(each, 100)]
        rows += [row for each in small for row in freed(each, 100)]
    return rows


def test_expandable_segments_keep_large_free_blocks_whole() -> None:
    """``get_free_block`` gives no block of at least max_split_size to a smaller request, whatever its segment."""
    recording = events(big_and_small(3))
    # The small ones fit where the large ones were, and later large ones too; pages have 20 MiB.
    assert replay(recording, "expandable").peak_reserved == 1100 * MIB  # 1000 and 3 times 30
    # Whole, no 1000 MiB serve anything else: not the small requests, nor one of 400 or 600, which is smaller by more
    # than 20. Large ones find room where the small ones before them were, at the end of the range.
    split = replay(recording, "expandable[max_split_size_mb:128]")
    assert split.peak_reserved == 3900 * MIB  # 3 times 1030, and 800


def test_expandable_segments_give_large_requests_no_block_much_larger() -> None:
    """A request of at least max_split_size takes no block larger by max_non_split_rounding or more."""
    rows = [*held(1, 300), *held(2, 30), *freed(1, 300), *held(3, 200)]
    recording = events(rows)
    assert replay(recording, "expandable").peak_reserved == 340 * MIB
    assert replay(recording, "expandable[max_split_size_mb:128]").peak_reserved == 540 * MIB
    rounded = "expandable[max_split_size_mb:128,max_non_split_rounding_mb:101]"
    assert replay(recording, rounded).peak_reserved == 340 * MIB


@pytest.mark.parametrize("size", [200, 330])
def test_block_kept_whole_serves_where_it_can_grow(size: int) -> None:
    """The end of a range is mapped for whatever request, so a free block there is used without a search."""
    recording = events([*passed(1, 300), *held(2, size)])
    config = "expandable[max_split_size_mb:340]"
    assert replay(recording, config).peak_reserved == max(300, -(-size // 20) * 20) * MIB
    assert replay(recording, "expandable[max_split_size_mb:128]").peak_reserved == max(300, -(-size // 20) * 20) * MIB
