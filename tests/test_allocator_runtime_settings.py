"""Settings of a running allocator: the texts, numbers and errors of torch's own parser."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyactcomp import _core
from pyactcomp._core import AllocatorConfig, CachingAllocator, SimulatedDevice
from pyactcomp.allocator import runtime_settings

MIB = 1 << 20
INTERVALS = [1 << i for i in range(16)]
RESET_IN_TORCH = "large_segment_size_mb:20,max_non_split_rounding_mb:20"


@pytest.fixture(autouse=True, scope="module")
def _defaults_of_torch() -> object:
    yield
    torch._C._accelerator_setAllocatorSettings(RESET_IN_TORCH)


def torch_takes(text: str) -> bool:
    torch._C._accelerator_setAllocatorSettings(RESET_IN_TORCH)
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, IndexError, RuntimeError):
        return False
    return True


def divisions_in_torch() -> dict[int, int]:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    of = library._ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm
    of.restype, of.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    return {interval: of(interval * MIB) for interval in INTERVALS}


def whole_number_in_c(text: str) -> int:
    """Return what strtoull reads, as std::stoull does."""
    read = ctypes.CDLL(None).strtoull
    read.restype, read.argtypes = ctypes.c_ulonglong, [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int]
    return int(read(text.encode(), None, 10))


def number_in_c(text: str) -> float:
    read = ctypes.CDLL(None).strtod
    read.restype, read.argtypes = ctypes.c_double, [ctypes.c_char_p, ctypes.c_void_p]
    return float(read(text.encode(), None))


def read(text: str, current: AllocatorConfig | None = None, given: AllocatorConfig | None = None) -> AllocatorConfig:
    own, foreign = runtime_settings.split(text)
    assert foreign == []
    return runtime_settings.changed(current or AllocatorConfig(), own, given or AllocatorConfig())


NUMBERS = st.one_of(
    st.integers(0, 1 << 17).map(str),
    st.sampled_from(["20", "512", "+64", "-1", "0", "1", str((1 << 64) - 1), str(1 << 64), "99999999999999999999999"]),
    st.text("0123456789.eExXpPabMBi+-<>_", min_size=1, max_size=6),
    st.floats(0, 1).map(str),
    st.sampled_from(["0x1p-1", "0x.8", ".5", "5.e-1", "1e-1x", "+0.25", "-0.5", "0.75%", "nan", "inf"]),
)
SPACED = st.sampled_from(["", " ", "\t", "\n "])


@given(
    st.sampled_from(["max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb"]),
    NUMBERS,
    SPACED,
    st.sampled_from([":", ",", "["]),
)
def test_sizes_are_read_as_torch_reads_them(key: str, number: str, space: str, separator: str) -> None:
    text = f"{space}{key}{space}{separator}{number}{space}"
    if not torch_takes(text):
        with pytest.raises(ValueError, match=key.removesuffix("_mb")):
            read(text)
        return
    mebibytes = min(whole_number_in_c(number), (1 << 44) - 1)
    if key == "large_segment_size_mb":
        mebibytes = min(mebibytes + mebibytes % 2, (1 << 36) - 2)  # the most that this allocator takes
    assert getattr(read(text), key.removesuffix("_mb")) == mebibytes * MIB


@given(NUMBERS, SPACED)
def test_shares_are_read_as_torch_reads_them(number: str, space: str) -> None:
    text = f"garbage_collection_threshold:{space}{number}"
    if torch_takes(text):
        assert read(text).garbage_collection_threshold == number_in_c(number)
    elif not abs(number_in_c(number)) < sys.float_info.min:  # 0 stands for never here
        with pytest.raises(ValueError, match="garbage_collection_threshold"):
            read(text)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([">", "1", "2", "256", "1024", "32768", "65536", "4x", "3", "0", "x", "-1"]),
            st.sampled_from([":", ":", ","]),
            st.sampled_from(["0", "1", "2", "4", "8MB", "2147483648", "3", "x", "", "-1"]),
        ),
        max_size=4,
    ),
    st.sampled_from(["]", "]", "]", ",]", ""]),
    SPACED,
)
def test_intervals_are_read_as_torch_reads_them(intervals: list[tuple[str, str, str]], end: str, space: str) -> None:
    listed = f",{space}".join(boundary + separator + count for boundary, separator, count in intervals)
    text = f"roundup_power2_divisions:{space}[{listed}{end}"
    if torch_takes(text):
        assert read(text).roundup_power2_divisions == divisions_in_torch()
    else:
        with pytest.raises(ValueError, match="roundup_power2_divisions"):
            read(text)


@given(NUMBERS)
def test_one_number_of_divisions_is_read_as_torch_reads_it(number: str) -> None:
    text = f"roundup_power2_divisions:{number}"
    if torch_takes(text):
        expected = {interval: min(count, 1 << 31) for interval, count in divisions_in_torch().items()}
        assert read(text).roundup_power2_divisions == expected
    elif whole_number_in_c(number) != 0:  # 0 stands for no rounding here
        with pytest.raises(ValueError, match="roundup_power2_divisions"):
            read(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("max_split_size_mb:40,max_split_size_mb:80,", {"max_split_size": 80 * MIB}),
        ("max_split_size_mb:40;expandable", {"max_split_size": 40 * MIB}),
        ("large_segment_size_mb:32", {"large_segment_size": 32 * MIB}),
        ("per_process_memory_fraction:0.5", {"memory_fraction": 0.5}),
        # This allocator's own keys and spellings.
        ("max_split_size:512 MiB,initial_pool_size_mb:4", {"max_split_size": 512 * MIB, "initial_pool_size": 4 * MIB}),
        ("growth:vmm,memory_fraction:0.5", {"memory_fraction": 0.5}),
        ("graph_capture_record_stream_reuse : True", {"graph_capture_record_stream_reuse": True}),
    ],
)
def test_several_entries_are_read_in_their_order(text: str, expected: dict[str, object]) -> None:
    assert read(text) == AllocatorConfig(**expected)


def test_three_settings_return_to_their_first_value_and_no_other_changes() -> None:
    given = AllocatorConfig(
        max_split_size="64MiB", roundup_power2_divisions=4, garbage_collection_threshold=0.5, memory_fraction=0.75
    )
    text = (
        "max_split_size_mb:32,roundup_power2_divisions:8,garbage_collection_threshold:0.25,"
        "max_non_split_rounding_mb:40,per_process_memory_fraction:0.5,large_segment_size_mb:24"
    )
    current = read(text, given, given)
    assert current == AllocatorConfig(
        max_split_size="32MiB",
        roundup_power2_divisions=8,
        garbage_collection_threshold=0.25,
        max_non_split_rounding="40MiB",
        memory_fraction=0.5,
        large_segment_size="24MiB",
    )
    kept = given.replace(max_non_split_rounding="40MiB", memory_fraction=0.5, large_segment_size="24MiB")
    assert read("", current, given) == kept
    assert read("max_split_size_mb:48", current, given) == kept.replace(max_split_size="48MiB")
    # The first value no longer fits the segments: the least one that does.
    large = read("large_segment_size_mb:128", current, given)
    assert large == kept.replace(large_segment_size="128MiB", max_split_size="128MiB")
    assert read("large_segment_size_mb:20", large, given) == kept.replace(large_segment_size="20MiB")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand for an enabled process with one running device of two: ``change`` is torch's entry point."""
    told = SimpleNamespace(torch=[], config=AllocatorConfig(max_split_size="64MiB"))
    told.device = CachingAllocator(
        SimulatedDevice("64MiB"), AllocatorConfig(max_split_size="64MiB", memory_fraction=0.75)
    )
    parse = torch._C._accelerator_setAllocatorSettings

    def torchs(text: str) -> None:
        # The check that a build of torch with CUDA makes.
        if "no_such_key" in text:
            raise ValueError("Unrecognized key 'no_such_key' in CUDA allocator config.")
        parse(text)
        told.torch.append(text)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", torchs)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(_core, "runtime_existing", {0: told.device}.get, raising=False)
    monkeypatch.setattr(_core, "runtime_config", lambda: told.config, raising=False)
    monkeypatch.setattr(_core, "runtime_configure", lambda config: setattr(told, "config", config), raising=False)
    runtime_settings.attach(told.config)
    told.change = torch._C._accelerator_setAllocatorSettings
    return told


def unchanged(running: SimpleNamespace) -> bool:
    first = AllocatorConfig(max_split_size="64MiB")
    return bool(running.config == first and running.device.config == first.replace(memory_fraction=0.75))


def test_settings_reach_devices_and_each_keeps_its_memory_fraction(running: SimpleNamespace) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.change("max_split_size_mb:32")
        assert running.config == AllocatorConfig(max_split_size="32MiB")
        assert running.device.config == AllocatorConfig(max_split_size="32MiB", memory_fraction=0.75)
        running.change("")
        assert unchanged(running)
        running.change("per_process_memory_fraction:0.25")
        assert running.config.memory_fraction == running.device.config.memory_fraction == 0.25


def test_settings_of_host_memory_go_on_to_torch(running: SimpleNamespace) -> None:
    text = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8,pinned_use_background_threads:False"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.change(text)
        running.change("pinned_use_background_threads : True , max_split_size_mb:32,pinned_x:[1:2,3]")
    assert running.torch == [text, "pinned_use_background_threads:True,pinned_x:[1:2,3]"]
    assert running.config == AllocatorConfig(max_split_size="32MiB")


def test_expandable_segments_change_nothing_and_warn_once(running: SimpleNamespace) -> None:
    with pytest.warns(UserWarning, match=r"'expandable_segments' has no effect .* keeps the growth"):
        running.change("expandable_segments:False")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.change("expandable_segments:True")
        running.change("expandable_segments:False")
    assert unchanged(running)
    assert running.torch == ["expandable_segments:False"] * 3
    with pytest.raises(ValueError, match=r"Expected 'True' or 'False'.*'true'"):
        running.change("expandable_segments:true")


@pytest.mark.parametrize("key", sorted(AllocatorConfig.foreign()))
def test_other_keys_without_an_effect_warn_once(key: str, running: SimpleNamespace) -> None:
    value = "native" if key == "backend" else "True"
    with pytest.warns(UserWarning, match=f"'{key}' has no effect on pyactcomp's allocator: "):
        running.change(f"{key}:{value}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.change(f"{key}:{value}")
    assert unchanged(running)
    assert running.torch == ([""] if key == "backend" else [f"{key}:True"]) * 2


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        (
            "no_such_key:1,max_split_size_mb:32",
            ValueError,
            r"Unrecognized key 'no_such_key' in CUDA allocator config\.",
        ),
        ("max_split_size_mb:32,no_such_key", ValueError, "Unrecognized key 'no_such_key'"),
        ("max_split_size_mb:32,pinned_x", RuntimeError, "Index out of bounds in ConfigTokenizer"),
        ("max_split_size_mb:32,pinned_use_background_threads:1", ValueError, "Expected 'True' or 'False'.*'1'"),
        ("max_split_size_mb:32,,", RuntimeError, "Index out of bounds in ConfigTokenizer"),
        ("max_split_size_mb:1", ValueError, "max_split_size must be at least large_segment_size"),
        ("per_process_memory_fraction:1.5,pinned_x:1", ValueError, "memory_fraction must be from 0 to 1, got 1.5"),
        ("graph_capture_record_stream_reuse:true", ValueError, r"is 'True' or 'False', got 'true'"),
        ("growth:malloc", ValueError, "growth cannot change while the allocator runs, and is 'vmm'; got growth:malloc"),
        ("growth:cuda", ValueError, "growth is 'vmm' or 'malloc', got 'cuda'"),
    ],
)
def test_a_text_in_error_changes_nothing_here(
    text: str, error: type[Exception], named: str, running: SimpleNamespace
) -> None:
    with pytest.raises(error, match=named):
        running.change(text)
    assert unchanged(running)


def test_the_growth_of_a_device_without_virtual_memory_stays(running: SimpleNamespace) -> None:
    device = CachingAllocator(SimulatedDevice("64MiB", virtual_memory=False))
    change: Callable[[str], None] = running.change
    pytest.MonkeyPatch().setattr(_core, "runtime_existing", {0: device}.get)
    change("growth:vmm,max_split_size_mb:32")
    assert device.config == AllocatorConfig(growth="malloc", max_split_size="32MiB")


@pytest.mark.parametrize("key", ["max_split_size_mb", "large_segment_size_mb", "roundup_power2_divisions"])
def test_numbers_of_any_length_are_read(key: str) -> None:
    """Python reads no number of more than 4300 digits."""
    setting = key.removesuffix("_mb")
    assert getattr(read(f"{key}:{'0' * 5000}64"), setting) == getattr(AllocatorConfig.parse(f"{key}:64"), setting)
    with pytest.raises(ValueError, match=f"{setting}.*, got '9999") as raised:
        read(f"{key}:{'9' * 5000}")
    assert "4300" not in str(raised.value)


@pytest.mark.parametrize("number", ["9" * 5000, f"1e{'9' * 5000}", "0x1p99999", f"0x1p{'9' * 5000}", "0x" + "f" * 5000])
@pytest.mark.parametrize("key", ["garbage_collection_threshold", "per_process_memory_fraction"])
def test_shares_of_any_length_are_refused_in_our_words(key: str, number: str) -> None:
    setting = "memory_fraction" if key == "per_process_memory_fraction" else key
    with pytest.raises(ValueError, match=f"^({setting}|{key}) "):
        read(f"{key}:{number}")
