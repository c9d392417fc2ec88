"""The parser of the allocator's settings: PyTorch's keys and meaning, and an error for everything else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from allocator_cases import assert_typed
from hypothesis import given
from hypothesis import strategies as st

from pyactcomp import allocator
from pyactcomp._core import AllocatorConfig
from pyactcomp.snapshots.candidates import FAMILIES

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
INTERVALS = [1 << i for i in range(16)]  # in MiB: from 1 MiB to 32 GiB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" \t", {}),
        ("growth:malloc", {"growth": "malloc"}),
        ("growth:vmm", {"growth": "vmm"}),
        ("expandable_segments:True", {"growth": "vmm"}),
        ("expandable_segments:False", {"growth": "malloc"}),
        ("max_split_size_mb:512", {"max_split_size": 512 * MIB}),
        ("max_split_size:512MiB", {"max_split_size": 512 * MIB}),
        ("max_split_size:536870913", {"max_split_size": 512 * MIB + 1}),
        ("max_split_size_mb:20", {"max_split_size": 20 * MIB}),
        ("max_non_split_rounding_mb:64", {"max_non_split_rounding": 64 * MIB}),
        ("max_non_split_rounding:64MiB", {"max_non_split_rounding": 64 * MIB}),
        ("large_segment_size_mb:32", {"large_segment_size": 32 * MIB}),
        ("large_segment_size:32MiB", {"large_segment_size": 32 * MIB}),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        ("memory_fraction:0.5", {"memory_fraction": 0.5}),
        ("per_process_memory_fraction:0.5", {"memory_fraction": 0.5}),
        ("initial_pool_size:1.5GiB", {"initial_pool_size": 1536 * MIB}),
        ("initial_pool_size_mb:100", {"initial_pool_size": 100 * MIB}),
        ("graph_capture_record_stream_reuse:True", {"graph_capture_record_stream_reuse": True}),
        ("graph_capture_record_stream_reuse:False", {}),
        ("max_split_size_mb:64,growth:malloc", {"max_split_size": 64 * MIB, "growth": "malloc"}),
        (" max_split_size_mb : 64 , growth : malloc ", {"max_split_size": 64 * MIB, "growth": "malloc"}),
    ],
)
def test_parse_sets_what_is_named_and_nothing_else(text: str, expected: dict[str, object]) -> None:
    assert AllocatorConfig.parse(text) == AllocatorConfig(**expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A number holds for every interval.
        ("8", dict.fromkeys(INTERVALS, 8)),
        ("0", dict.fromkeys(INTERVALS, 0)),
        # The first interval named holds below it too, and ">" from the one after the last named.
        (
            "[256:1,512:2,1024:4,>:8]",
            {i: 1 if i <= 256 else 2 if i == 512 else 4 if i == 1024 else 8 for i in INTERVALS},
        ),
        # What nothing names, between two or above all, is not divided.
        ("[64:8,256:4]", {i: 8 if i <= 64 else 4 if i == 256 else 0 for i in INTERVALS}),
        ("[ 1 : 2 , > : 4 ]", {i: 2 if i == 1 else 4 for i in INTERVALS}),
        # Sizes from 64 GiB on belong to the last interval.
        ("[65536:4]", dict.fromkeys(INTERVALS, 4)),
    ],
)
def test_roundup_divisions_have_pytorchs_meaning(text: str, expected: dict[int, int]) -> None:
    parsed = AllocatorConfig.parse(f"roundup_power2_divisions:{text},growth:malloc")
    assert parsed.roundup_power2_divisions == expected
    assert parsed.growth == "malloc"


def test_parse_keeps_what_the_base_has_and_is_not_named() -> None:
    base = AllocatorConfig(growth="malloc", max_split_size="64MiB", memory_fraction=0.5)
    parsed = AllocatorConfig.parse("max_split_size_mb:128", base)
    assert parsed == AllocatorConfig(growth="malloc", max_split_size="128MiB", memory_fraction=0.5)
    assert base.max_split_size == 64 * MIB


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096 B", 4096),
        ("3KiB", 3 << 10),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("3KB", 3_000),
        ("20 MB", 20_000_000),
        ("0.25GB", 250_000_000),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_bytes_with_binary_or_decimal_units(text: str, bytes_: int) -> None:
    assert AllocatorConfig.parse(f"initial_pool_size:{text}").initial_pool_size == bytes_


@pytest.mark.parametrize("text", ["", "-1", "1.5", "MiB", "12 foo", "1e9", "1 000", "0x10", "1.2.3MiB", "1.MiB", "nan"])
def test_what_is_no_size_is_named_with_the_key(text: str) -> None:
    with pytest.raises(ValueError, match=r"initial_pool_size.*size.*512MiB") as raised:
        AllocatorConfig.parse(f"initial_pool_size:{text}")
    assert f"'{text}'" in str(raised.value)


@pytest.mark.parametrize("text", ["18446744073709551616", "16777216TiB", "99999999999999999999GiB"])
def test_sizes_that_overflow_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"initial_pool_size.*2\^64"):
        AllocatorConfig.parse(f"initial_pool_size:{text}")


@pytest.mark.parametrize("setting", ["large_segment_size", "initial_pool_size"])
@pytest.mark.parametrize("size", [1 << 56, (1 << 56) + 2 * MIB, 1 << 63, (1 << 64) - 2 * MIB])
def test_sizes_beyond_any_device_are_refused(setting: str, size: int) -> None:
    range_ = AllocatorConfig.settings()[setting]["range"]
    assert "below 2^56 bytes" in range_
    with pytest.raises(ValueError, match=f"^{setting} must be {re.escape(range_)}, got {size / 2**30:.2f} GiB$"):
        AllocatorConfig(**{setting: size})
    with pytest.raises(ValueError, match=f"^{setting} must be "):
        AllocatorConfig.parse(f"{setting}:{size}")
    largest = (1 << 56) - 2 * MIB
    assert getattr(AllocatorConfig(**{setting: largest}), setting) == largest


@pytest.mark.parametrize("setting", ["max_split_size", "max_non_split_rounding"])
@pytest.mark.parametrize("size", [(1 << 64) - 1, (1 << 64) - 2, (1 << 64) - MIB, 1 << 63])
def test_text_of_the_largest_sizes_parses_to_them(setting: str, size: int) -> None:
    config = AllocatorConfig(**{setting: size})
    assert AllocatorConfig.parse(str(config)) == config == AllocatorConfig.parse(f"{setting}:{size}")


def test_numbers_too_long_for_python_are_refused_in_our_words() -> None:
    digits = "9" * 5000
    with pytest.raises(ValueError, match=r"initial_pool_size: expected a size below 2\^64 bytes"):
        AllocatorConfig.parse(f"initial_pool_size:{digits}")
    with pytest.raises(ValueError, match=r"initial_pool_size must be at least 0 and below 2\*\*64, got an int"):
        AllocatorConfig(initial_pool_size=10**5000)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("growth:cuda", "growth is 'vmm' or 'malloc', got 'cuda'"),
        ("growth:", "growth is 'vmm' or 'malloc', got ''"),
        ("expandable_segments:yes", "expandable_segments is 'True' or 'False', got 'yes'"),
        ("max_split_size_mb:19", "max_split_size must be at least .*20.00 MiB, got 19.00 MiB"),
        ("max_split_size:1MiB", "max_split_size must be at least"),
        ("max_split_size_mb:32,large_segment_size_mb:64", "max_split_size must be at least .*64.00 MiB"),
        ("max_split_size_mb:1.5", "max_split_size_mb takes a whole number of MiB, got '1.5'"),
        ("max_split_size_mb:17592186044416", "max_split_size_mb takes a whole number of MiB"),
        ("max_split_size_mb:-1", "max_split_size_mb takes a whole number of MiB, got '-1'"),
        ("max_non_split_rounding_mb:1", "max_non_split_rounding must be at least 20 MiB, got 1"),
        ("large_segment_size_mb:10", "large_segment_size must be a multiple of 2 MiB, above 10 MiB"),
        ("large_segment_size_mb:21", "large_segment_size must be a multiple of 2 MiB, above 10 MiB"),
        ("roundup_power2_divisions:3", "power of two, or 0 for no rounding, got '3'"),
        ("roundup_power2_divisions:many", "power of two, or 0 for no rounding, got 'many'"),
        ("roundup_power2_divisions:[256:3]", "power of two, or 0 for no rounding, got '3'"),
        ("roundup_power2_divisions:[300:4]", "power of two in MiB, or is '>' for all larger, got '300'"),
        ("roundup_power2_divisions:[0:4]", "power of two in MiB"),
        ("roundup_power2_divisions:[256:4", "no closing"),
        ("roundup_power2_divisions:[]", "expected MiB:divisions"),
        ("roundup_power2_divisions:[256]", "expected MiB:divisions.*got '256'"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold must be above 0 and below 1"),
        ("garbage_collection_threshold:-0.1", "garbage_collection_threshold must be above 0 and below 1"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold must be above 0 and below 1"),
        ("garbage_collection_threshold:80%", "garbage_collection_threshold takes a number from 0 to 1, got '80%'"),
        ("memory_fraction:1.5", "memory_fraction must be from 0 to 1, got 1.5"),
        ("memory_fraction:inf", "memory_fraction must be from 0 to 1"),
        ("per_process_memory_fraction:half", "per_process_memory_fraction takes a number from 0 to 1, got 'half'"),
        ("graph_capture_record_stream_reuse:1", "graph_capture_record_stream_reuse is 'True' or 'False', got '1'"),
        ("growth", "expected key:value,key:value, got 'growth'"),
        ("growth:vmm,", "expected key:value,key:value, got ''"),
        ("growth=vmm", "expected key:value,key:value, got 'growth=vmm'"),
        ("growth:vmm,growth:vmm", "'growth' is given twice"),
        ("growth:vmm,expandable_segments:True", "'growth' and 'expandable_segments' are the same setting"),
        ("max_split_size_mb:64,max_split_size:64MiB", "'max_split_size_mb' and 'max_split_size' are the same setting"),
        ("memory_fraction:1,per_process_memory_fraction:1", "are the same setting"),
    ],
)
def test_malformed_settings_name_the_key_the_value_and_what_is_accepted(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        AllocatorConfig.parse(text)


def test_an_unknown_key_is_named_with_all_accepted_ones() -> None:
    with pytest.raises(ValueError, match="unknown setting 'max_split'") as raised:
        AllocatorConfig.parse("max_split:1")
    accepted = str(raised.value).split("accepted are ")[1].split(", ")
    assert len(accepted) == len(set(accepted)) > 0
    for key in accepted:
        # Each is known: what is wrong with it is its value.
        with pytest.raises(ValueError, match=key) as wrong:
            AllocatorConfig.parse(f"{key}:?")
        assert "unknown" not in str(wrong.value)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("backend", "leave it out"),
        ("release_lock_on_cudamalloc", "leave it out"),
        ("throw_on_cudamalloc_oom", "leave it out"),
        ("pinned_use_cuda_host_register", "PYTORCH_ALLOC_CONF"),
        ("pinned_num_register_threads", "PYTORCH_ALLOC_CONF"),
        ("pinned_use_background_threads", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_pytorchs_keys_without_a_use_here_say_what_to_do(key: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"PyTorch's setting '{key}'.*{advice}"):
        AllocatorConfig.parse(f"{key}:True")


def _sizes(least: int, step: int = 1) -> st.SearchStrategy[int]:
    # The first of a set, and MiB, are written differently from the rest.
    return st.one_of(
        st.just(least),
        st.integers(least // MIB + 1, 1 << 20).map(lambda mib: mib * MIB // step * step),
        st.integers(least // step + 1, (1 << 50) // step).map(lambda count: count * step),
    )


@given(
    growth=st.sampled_from(["vmm", "malloc"]),
    max_split_size=st.none() | _sizes(20 * MIB),
    max_non_split_rounding=_sizes(20 * MIB),
    roundup=st.lists(st.sampled_from([0, 1, 2, 4, 8, 1 << 31]), min_size=16, max_size=16),
    threshold=st.floats(0, 1, exclude_max=True),
    fraction=st.floats(0, 1),
    initial=_sizes(0),
    reuse=st.booleans(),
)
def test_text_of_settings_parses_to_the_same_settings(
    growth: str,
    max_split_size: int | None,
    max_non_split_rounding: int,
    roundup: list[int],
    threshold: float,
    fraction: float,
    initial: int,
    reuse: bool,
) -> None:
    config = AllocatorConfig(
        growth=growth,
        max_split_size=max_split_size,
        max_non_split_rounding=max_non_split_rounding,
        roundup_power2_divisions=dict(zip(INTERVALS, roundup, strict=True)),
        garbage_collection_threshold=threshold,
        memory_fraction=fraction,
        initial_pool_size=initial,
        graph_capture_record_stream_reuse=reuse,
    )
    assert AllocatorConfig.parse(str(config)) == config


@given(large=_sizes(12 * MIB, step=2 * MIB))
def test_text_of_a_segment_size_parses_to_it(large: int) -> None:
    config = AllocatorConfig(large_segment_size=large)
    assert AllocatorConfig.parse(str(config)) == config


def test_text_of_the_defaults_is_empty() -> None:
    assert str(AllocatorConfig()) == ""
    assert str(AllocatorConfig.parse("growth:malloc,max_split_size:64MiB")) == "growth:malloc,max_split_size_mb:64"


SETTINGS = AllocatorConfig.settings()
SIZES = {name for name, row in SETTINGS.items() if f"{name}_mb" in row["keys"]}


def test_every_setting_is_a_key_a_keyword_and_a_property() -> None:
    assert len(SETTINGS) > 1
    plain = AllocatorConfig()
    for name, row in SETTINGS.items():
        assert row["keys"][0] == name
        assert getattr(plain, name) == row["default"]
        assert AllocatorConfig(**{name: row["default"]}) == plain == plain.replace(**{name: row["default"]})
        assert set(row["families"]) <= set(FAMILIES)
        assert "pyactcomp" in row["families"]


def test_every_setting_is_a_keyword_of_enable_and_typed() -> None:
    assert set(inspect.signature(allocator.enable).parameters) == set(SETTINGS)
    assert_typed(ROOT / "pyactcomp" / "_core.pyi", list(SETTINGS))


def test_settings_are_documented_as_the_table_has_them() -> None:
    expected = ["| setting | default | must be | meaning |", "|---|---|---|---|"]
    for name, row in SETTINGS.items():
        usual = row["default"]
        text = f"{usual / MIB:.0f} MiB" if name in SIZES and usual else "none" if usual is None else f"{usual}"
        expected.append(f"| `{name}` | {0 if isinstance(usual, dict) else text} | {row['range']} | {row['meaning']} |")
    page = (ROOT / "docs" / "allocator_settings.md").read_text()
    assert "\n".join(expected) in page, "docs/allocator_settings.md has another table of settings than config.hpp"


def test_settings_are_taken_by_position_in_the_order_of_the_table() -> None:
    assert AllocatorConfig("malloc", "64MiB") == AllocatorConfig(growth="malloc", max_split_size="64MiB")
    for wrong in (lambda: AllocatorConfig("malloc", growth="malloc"), lambda: AllocatorConfig(*range(20))):
        with pytest.raises(TypeError, match="AllocatorConfig"):
            wrong()


def test_an_unknown_keyword_is_named_with_all_accepted_ones() -> None:
    with pytest.raises(
        TypeError, match=r"AllocatorConfig takes growth, .*graph_capture_record_stream_reuse, got .*'max_split'"
    ):
        AllocatorConfig(max_split=1)  # type: ignore[call-arg]


def test_replace_keeps_the_other_settings_and_the_checks() -> None:
    base = AllocatorConfig(growth="malloc", max_split_size="64MiB", roundup_power2_divisions=4)
    assert base.replace(memory_fraction=0.5) == AllocatorConfig(
        growth="malloc", max_split_size="64MiB", roundup_power2_divisions=4, memory_fraction=0.5
    )
    assert base.replace(max_split_size=None).max_split_size is None
    with pytest.raises(ValueError, match=r"max_split_size must be at least large_segment_size, 128.00 MiB"):
        base.replace(large_segment_size="128MiB")
    with pytest.raises(TypeError, match="memory_fraction must be a number"):
        base.replace(memory_fraction=None)
    with pytest.raises(TypeError, match="graph_capture_record_stream_reuse must be True or False"):
        base.replace(graph_capture_record_stream_reuse=1)
