"""Contract under test: a memory block shared with another process is the same memory there, stays where it is while it
is shared, and leaves neither a mapping nor a descriptor behind. Simulated devices stand for processes; a fake driver
shares descriptors between real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from allocator_cases import KIB, MIB, make, physical, read_text, reserved, write_text
from child_script import run_case
from hypothesis import example, given
from hypothesis import strategies as st

from pyactcomp import PyactcompError, _core
from pyactcomp.allocator import CachingAllocator, SimulatedDevice

CASES = "allocator_sharing_cases.py"


def text_of(allocator: CachingAllocator, address: int) -> bytes:
    shared = allocator.share(address)
    assert shared is not None
    return shared[0]


class Receiver:
    """Another process: a device, and what it opened."""

    def __init__(self) -> None:
        self.device = SimulatedDevice("8GiB")
        self.importer = _core.Importer(self.device)

    def open(self, allocator: CachingAllocator, address: int) -> tuple[Any, int]:
        shared = allocator.share(address)
        assert shared is not None
        block = self.importer.open(shared[0])
        assert block is not None
        return block, block.address + shared[1]


def assert_same_memory(owner: SimulatedDevice, address: int, receiver: SimulatedDevice, there: int, size: int) -> None:
    """The same physical bytes lie under both ranges."""
    mine, theirs = physical(owner, address, size), physical(receiver, there, size)
    assert [piece[1:] for piece in mine] == [piece[1:] for piece in theirs]
    at = 0
    for _, begin, end in mine:
        assert owner.shared_memory(address + at) == receiver.shared_memory(there + at) != 0
        at += end - begin


@pytest.mark.parametrize("size", [512, MIB, 20 * MIB, 64 * MIB, 200 * MIB])
def test_a_block_is_the_same_memory_in_the_receiver(size: int) -> None:
    allocator, device = make("vmm")
    other = allocator.allocate(3 * MIB if size > MIB else 8 * KIB)
    address = allocator.allocate(size)
    receiver = Receiver()
    block, there = receiver.open(allocator, address)
    assert_same_memory(device, address, receiver.device, there, size)
    allocator.check_invariants()
    block.close()
    assert receiver.importer.mapped == 0
    allocator.free(address)
    allocator.free(other)
    assert device.open_exports == 0


def test_blocks_of_one_segment_lie_as_far_apart_in_the_receiver_and_each_handle_is_imported_once() -> None:
    allocator, _ = make("vmm")
    addresses = [allocator.allocate(size * MIB) for size in (5, 7, 100, 3, 90)]
    receiver = Receiver()
    opened = [receiver.open(allocator, address) for address in reversed(addresses)][::-1]
    again = receiver.open(allocator, addresses[2])
    assert again[1] == opened[2][1]
    assert [there - opened[0][1] for _, there in opened] == [address - addresses[0] for address in addresses]
    assert receiver.importer.mapped == reserved(allocator)
    assert receiver.device.calls()["import"] == receiver.device.calls()["map"]
    # One handle after another loses its last user.
    maps = receiver.device.calls()["map"]
    for block, _ in opened:
        block.close()
    assert receiver.importer.mapped >= 100 * MIB  # opened twice
    again[0].close()
    assert receiver.importer.mapped == 0
    calls = receiver.device.calls()
    assert calls["unmap"] == calls["destroy"] == maps
    assert calls["unreserve"] == calls["reserve"] == 1
    with pytest.raises(ValueError, match="closed before"):
        _ = again[0].address


def test_receivers_are_independent() -> None:
    allocator, device = make("vmm")
    address = allocator.allocate(30 * MIB)
    receivers = [Receiver(), Receiver()]
    opened = [receiver.open(allocator, address) for receiver in receivers]
    for receiver, (_, there) in zip(receivers, opened, strict=True):
        assert_same_memory(device, address, receiver.device, there, 30 * MIB)
    opened[0][0].close()
    assert (receivers[0].importer.mapped, receivers[1].importer.mapped) == (0, 32 * MIB - 2 * MIB)
    opened[1][0].close()


def test_the_device_is_synchronised_before_memory_is_unmapped() -> None:
    allocator, _ = make("vmm")
    address = allocator.allocate(30 * MIB)
    receiver = Receiver()
    first, _ = receiver.open(allocator, address)
    second, _ = receiver.open(allocator, address)
    first.close()
    assert receiver.device.calls()["synchronize"] == 0  # still used
    second.close()
    assert receiver.device.calls()["synchronize"] == 1


def test_shared_memory_neither_moves_nor_is_given_back() -> None:
    allocator, device = make("vmm", "400MiB")
    shared = allocator.allocate(2 * MIB)
    text = text_of(allocator, shared)
    around = [allocator.allocate(30 * MIB) for _ in range(6)]
    before = physical(device, shared, 2 * MIB)
    for address in around:
        allocator.free(address)
    allocator.empty_cache()
    large = allocator.allocate(300 * MIB)  # takes all free handles
    assert physical(device, shared, 2 * MIB) == before
    assert device.open_exports == 1
    receiver = Receiver()
    block = receiver.importer.open(text)
    assert block is not None
    allocator.check_invariants()
    block.close()
    allocator.free(shared)
    allocator.free(large)
    assert device.open_exports == 0
    assert allocator.allocate(380 * MIB)  # now it may move
    allocator.check_invariants()


def test_a_freed_and_refilled_block_is_shared_anew() -> None:
    allocator, device = make("vmm")
    receiver = Receiver()
    texts = []
    for _ in range(3):
        address = allocator.allocate(20 * MIB)
        block, there = receiver.open(allocator, address)
        assert_same_memory(device, address, receiver.device, there, 20 * MIB)
        texts.append(text_of(allocator, address))
        block.close()
        allocator.free(address)
    assert device.calls()["export"] == 3
    assert len(set(texts)) == 3
    # The descriptor closed with the block.
    with pytest.raises(RuntimeError, match="is not open"):
        receiver.importer.open(texts[0])


def test_sharing_again_opens_no_descriptor() -> None:
    allocator, device = make("vmm")
    address = allocator.allocate(20 * MIB)
    assert text_of(allocator, address) == text_of(allocator, address)
    assert device.calls()["export"] == 1


def test_memory_lives_while_a_receiver_has_it_open() -> None:
    allocator, device = make("vmm")
    receiver = Receiver()
    block, there = receiver.open(allocator, allocator.allocate(20 * MIB))
    del allocator  # its process ends
    assert (device.reserved, device.open_exports, device.kept_by_importers) == (0, 0, 20 * MIB)
    assert receiver.device.shared_memory(there)
    block.close()
    assert device.kept_by_importers == 0


@pytest.mark.parametrize("growth", ["vmm", "malloc"])
def test_memory_that_receivers_gave_back_serves_before_the_allocator_grows(growth: str) -> None:
    allocator, _ = make(growth)
    returned = [allocator.allocate(100 * MIB) for _ in range(2)]
    calls = []

    def collect(_: int) -> bool:
        calls.append(len(returned))
        while returned:
            allocator.free(returned.pop())
        return True

    allocator.set_growth_callback(collect)
    before = reserved(allocator)
    again = [allocator.allocate(100 * MIB) for _ in range(2)]
    assert (calls, reserved(allocator)) == ([2], before)  # not where the cache serves
    allocator.allocate(100 * MIB)
    assert (calls, reserved(allocator)) == ([2, 0], before * 3 // 2)
    assert len(again) == 2
    allocator.check_invariants()


def test_other_memory_has_no_handles_to_share() -> None:
    allocator, _ = make("malloc")
    assert allocator.share(allocator.allocate(MIB)) is None
    allocator, _ = make("vmm")
    address = allocator.allocate(MIB)
    with pytest.raises(ValueError, match="never allocated"):
        allocator.share(address + 512)


def test_private_pools_and_restored_checkpoints_end_their_sharing() -> None:
    allocator, device = make("vmm")
    pool = (0, 1)
    allocator.begin_allocate_to_pool(pool)
    first = allocator.allocate(20 * MIB)
    state = allocator.checkpoint(pool)
    second = allocator.allocate(40 * MIB)
    allocator.end_allocate_to_pool(pool)
    for address in (first, second):
        text_of(allocator, address)
    assert device.open_exports == 2
    allocator.restore(state)
    assert device.open_exports == 0  # restored blocks are new ones
    allocator.check_invariants()


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_a_refused_export_leaves_nothing(skip: int) -> None:
    allocator, device = make("vmm")
    address = allocator.allocate(180 * MIB)  # three handles
    device.fail("export", 1, skip)
    with pytest.raises(PyactcompError, match="export: fails"):
        allocator.share(address)
    assert device.open_exports == 0
    allocator.check_invariants()
    text_of(allocator, address)
    assert device.open_exports == 3


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.parametrize("call", ["import", "map"])
def test_a_refused_import_leaves_nothing(call: str, skip: int) -> None:
    allocator, device = make("vmm")
    address = allocator.allocate(180 * MIB)
    receiver = Receiver()
    receiver.device.fail(call, 1, skip)
    with pytest.raises(PyactcompError, match=f"{call}: fails"):
        receiver.open(allocator, address)
    assert receiver.importer.mapped == 0
    calls = receiver.device.calls()
    assert calls["unreserve"] == calls["reserve"]
    assert calls["destroy"] == calls["import"] - (call == "import")
    block, there = receiver.open(allocator, address)
    assert_same_memory(device, address, receiver.device, there, 180 * MIB)
    block.close()


def test_a_refused_import_keeps_handles_that_others_use() -> None:
    allocator, device = make("vmm")
    first, second = allocator.allocate(10 * MIB), allocator.allocate(80 * MIB)  # share the first handle
    receiver = Receiver()
    block, there = receiver.open(allocator, first)
    receiver.device.fail("import")
    with pytest.raises(PyactcompError, match="import: fails"):
        receiver.open(allocator, second)
    assert_same_memory(device, first, receiver.device, there, 10 * MIB)
    assert receiver.importer.mapped == 20 * MIB
    block.close()
    assert receiver.importer.mapped == 0


def test_few_addresses_are_enough() -> None:
    allocator, device = make("vmm")
    address = allocator.allocate(100 * MIB)
    receiver = Receiver()
    receiver.device.fail("reserve")  # the whole segment, twice the device's memory
    block, there = receiver.open(allocator, address)
    assert_same_memory(device, address, receiver.device, there, 100 * MIB)
    block.close()
    receiver.device.fail("reserve", 2)
    with pytest.raises(PyactcompError, match="reserve: fails"):
        receiver.open(allocator, address)


def test_a_text_may_have_any_prefix() -> None:
    allocator, _ = make("vmm")
    text = text_of(allocator, allocator.allocate(100 * MIB))
    receiver = Receiver()
    for prefix in (b"\x02e", b"\xf0p", text):
        block = receiver.importer.open(prefix + text)
        assert block is not None
        block.close()


def sample() -> bytes:
    allocator, _ = make("vmm")
    return text_of(allocator, allocator.allocate(100 * MIB))


@given(text=st.binary(max_size=300))
@example(b"")
@example(b"\x02c" + bytes(64))
def test_foreign_texts_are_left_to_others(text: bytes) -> None:
    assert Receiver().importer.open(text) is None


@given(data=st.data())
def test_damaged_texts_are_refused(data: st.DataObject) -> None:
    """A text damaged anywhere is an error, or no text of ours where its end is gone."""
    text = bytearray(sample())
    kind = data.draw(st.sampled_from(["flip", "cut the end", "cut out", "insert"]))
    at = data.draw(st.integers(0, len(text) - 1))
    if kind == "flip":
        text[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut the end":
        del text[at:]
    elif kind == "cut out":
        del text[at : at + data.draw(st.integers(1, 40))]
    else:
        text[max(at, 1) : at] = data.draw(st.binary(min_size=1, max_size=40))
    receiver = Receiver()
    try:
        opened = receiver.importer.open(bytes(text))
    except ValueError as error:
        assert "the description of a shared CUDA tensor is damaged" in str(error)  # noqa: PT017
    else:
        assert opened is None
    assert receiver.importer.mapped == 0


@given(data=st.data())
def test_texts_that_contradict_themselves_are_refused(data: st.DataObject) -> None:
    """Any number of the text may be wrong, with a right checksum: an error, and nothing is left open."""
    text = sample()
    header, pieces, magic = read_text(text)
    assert write_text(header, pieces, magic) == text
    among = data.draw(st.sampled_from([header, *pieces]))
    field = data.draw(st.sampled_from(sorted(among)))
    limit = {"descriptor": 2**31, "pid": 2**63}.get(field, 2**64) - 1
    lowest = 0 if limit == 2**64 - 1 else -limit
    near = st.integers(-2, 2).map(lambda granules: min(max(among[field] + granules * 2 * MIB, lowest), limit))
    among[field] = data.draw(st.one_of(near, st.integers(lowest, limit)))
    if data.draw(st.booleans()):
        pieces = pieces[: data.draw(st.integers(0, 3))]
    receiver = Receiver()
    try:
        block = receiver.importer.open(write_text(header, pieces, magic))
    except (ValueError, RuntimeError):  # the simulated kernel refuses wrong descriptors and sizes
        pass
    else:
        assert block is not None
        block.close()
    assert receiver.importer.mapped == 0
    calls = receiver.device.calls()
    assert (calls["unmap"], calls["unreserve"]) == (calls["map"], calls["reserve"])


@pytest.mark.parametrize("change", [-2 * MIB, 2 * MIB, 64 * MIB, 1 << 40])
@pytest.mark.parametrize("which", [0, 1])
def test_a_known_handle_of_another_size_is_refused(change: int, which: int) -> None:
    """A handle has one size: a larger one would give an address beyond the mapping."""
    allocator, device = make("vmm")
    address = allocator.allocate(100 * MIB)
    receiver = Receiver()
    block, there = receiver.open(allocator, address)
    header, pieces, magic = read_text(text_of(allocator, address))
    pieces[which]["size"] += change
    header["size"] += change
    mapped = receiver.importer.mapped
    calls = receiver.device.calls()
    with pytest.raises(ValueError, match="the description of a shared CUDA tensor is damaged"):
        receiver.importer.open(write_text(header, pieces, magic))
    assert receiver.importer.mapped == mapped
    assert receiver.device.calls() == calls
    assert_same_memory(device, address, receiver.device, there, 100 * MIB)
    again, address_again = receiver.open(allocator, address)
    assert address_again == there
    again.close()
    block.close()
    assert receiver.importer.mapped == 0


needs_the_allocator = pytest.mark.skipif(
    not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h"
)


@needs_the_allocator
@pytest.mark.parametrize(
    "case",
    [
        "across_processes",
        "ended_sender",
        "another_process",
        "another_user",
        "idle_clients",
        "exports_alone_are_handed_over",
        "more_than_the_limit_of_files",
        "descriptors_are_closed_in_programs",
    ],
)
def test_descriptors_travel_between_processes(case: str, fake_driver: Callable[..., str]) -> None:
    run_case(CASES, case, LD_LIBRARY_PATH=fake_driver())


@needs_the_allocator
@pytest.mark.parametrize(
    "option",
    ["-DFAKE_REFUSES_SHARED_MEMORY=1", "-DcuMemExportToShareableHandle=absent"],
    ids=["refuses", "old"],
)
def test_a_driver_that_shares_nothing_serves_everything_else(option: str, fake_driver: Callable[..., str]) -> None:
    run_case(CASES, "memory_that_cannot_be_shared", LD_LIBRARY_PATH=fake_driver(option))
