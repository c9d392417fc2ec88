"""allocator.pause, resume and tag: over simulated devices in place of GPUs, and over a fake driver.

Longer than 400 lines: each way in which one of several devices may refuse has a test.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocator_cases import MIB
from child_script import run_case
from pausing_machine import Machine, Meddled, installed

from pyactcomp import PyactcompError, _core, allocator
from pyactcomp.allocator import pausing


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, allocator_not_enabled: None) -> Machine:
    return installed(monkeypatch)


def test_all_devices_are_paused_and_resumed(machine: Machine) -> None:
    for device, size in enumerate((30, 70)):
        machine.allocate(size * MIB, device)
    before = machine.reserved
    report = allocator.pause()
    assert machine.reserved == [0, 0]
    assert (report.released, report.saved, report.skipped) == (sum(before), 100 * MIB, ())
    assert allocator.paused() == {"": sum(before)}
    resumed = allocator.resume()
    assert machine.reserved == before
    assert (resumed.mapped, resumed.restored) == (sum(before), 100 * MIB)
    assert allocator.paused() == {}


def test_tags_nest_and_decide_what_is_kept(machine: Machine) -> None:
    with allocator.tag("weights"):
        machine.allocate(10 * MIB)
        with allocator.tag("kv", keep="drop"):
            machine.allocate(20 * MIB)
        with allocator.untagged():
            machine.allocate(30 * MIB)
        machine.allocate(40 * MIB)
    machine.allocate(50 * MIB)
    assert allocator.pause("kv").saved == 0
    assert allocator.pause(["weights"]).saved == 50 * MIB
    # The rest: what is paused already stays so.
    assert allocator.pause().saved == 80 * MIB
    assert set(allocator.paused()) == {"", "kv", "weights"}
    assert machine.reserved == [0, 0]
    assert allocator.resume("weights").restored == 50 * MIB
    assert allocator.resume().restored == 80 * MIB


def test_keep_overrides_the_tags_own(machine: Machine) -> None:
    with allocator.tag("kv", keep="drop"):
        machine.allocate(20 * MIB)
    assert allocator.pause("kv", keep="cpu").saved == 20 * MIB
    allocator.resume()
    assert allocator.pause(keep="drop").saved == 0


def test_a_decorated_function_allocates_in_the_tag(machine: Machine) -> None:
    @allocator.tag("kv")
    def grow(depth: int) -> None:
        machine.allocate(20 * MIB)
        if depth:
            grow(depth - 1)

    grow(2)
    assert machine.tag == 0
    assert allocator.pause("kv").saved == 60 * MIB


@pytest.mark.parametrize("make", [lambda: allocator.tag("kv"), allocator.untagged], ids=["tag", "untagged"])
def test_threads_that_share_a_tag_leave_with_their_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    of_thread = threading.local()

    def set_tag(tag: int) -> int:
        before = getattr(of_thread, "tag", 0)
        of_thread.tag = tag
        return before

    monkeypatch.setattr(pausing.extensions, "load", lambda name: (SimpleNamespace(set_tag=set_tag), None))
    shared = make()
    steps = threading.Barrier(2, timeout=60)
    seen: dict[str, list[str]] = {}

    def enter(name: str, first_to_leave: bool) -> None:
        names = seen.setdefault(name, [])
        with allocator.tag(name):
            if not first_to_leave:
                steps.wait()
            with shared:
                if first_to_leave:
                    steps.wait()
                steps.wait()
                names.append(machine.names[of_thread.tag])
                if not first_to_leave:
                    steps.wait()
            names.append(machine.names[of_thread.tag])
            if first_to_leave:
                steps.wait()
        names.append(machine.names[of_thread.tag])

    threads = [threading.Thread(target=enter, args=each) for each in (("weights", True), ("states", False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inside = getattr(shared, "name", "")
    assert seen == {"weights": [inside, "weights", ""], "states": [inside, "states", ""]}


def test_a_tag_is_entered_again_inside_itself(machine: Machine) -> None:
    kv, none = allocator.tag("kv"), allocator.untagged()
    seen = []
    with kv:
        with none:
            with kv, copy.deepcopy(none), none:
                seen.append(machine.names[machine.tag])
            seen.append(machine.names[machine.tag])
        seen.append(machine.names[machine.tag])
    assert seen == ["", "", "kv"]
    assert machine.tag == 0


def test_an_error_inside_a_tag_leaves_it(machine: Machine) -> None:
    with pytest.raises(KeyError), allocator.tag("kv"):
        raise KeyError("kv")
    assert machine.tag == 0


def test_a_device_that_refuses_leaves_all_as_before(machine: Machine) -> None:
    for device in (0, 1):
        machine.allocate(300 * MIB, device)
    before = machine.reserved
    machine.devices[1].limit_host("100MiB")
    with pytest.raises(PyactcompError, match="too little host memory"):
        allocator.pause()
    assert machine.reserved == before
    machine.allocators[1].begin_allocate_to_pool((0, 1))
    with pytest.raises(PyactcompError, match="while a CUDA graph is captured"):
        allocator.pause(keep="drop")
    assert machine.reserved == before
    assert allocator.paused() == {}


def test_a_device_without_room_leaves_all_paused(machine: Machine) -> None:
    for device in (0, 1):
        machine.allocate(1200 * MIB, device)
    allocator.pause()
    machine.allocators[1].allocate(1200 * MIB, tag="other")
    with pytest.raises(torch.OutOfMemoryError, match="still paused"):
        allocator.resume()
    assert machine.reserved[0] == 0
    assert list(allocator.paused()) == [""]


def test_an_undone_resume_pauses_each_tag_as_it_was(machine: Machine) -> None:
    addresses = {}
    for name, keep in (("kv", "drop"), ("weights", "cpu")):
        with allocator.tag(name, keep=keep):  # type: ignore[arg-type]
            addresses[name] = machine.allocate(300 * MIB)
            machine.allocate(300 * MIB, 1)
    machine.devices[0].write(addresses["weights"], 7)
    allocator.pause("kv", on_allocation="resume")
    allocator.pause("weights")
    before = [each.paused() for each in machine.allocators]
    taken = machine.allocators[1].allocate(1600 * MIB, tag="other")
    pinned = machine.devices[0].pinned
    with pytest.raises(torch.OutOfMemoryError, match="still paused"):
        allocator.resume()
    # The contents of "kv" were dropped, and an undo keeps none of them.
    assert [each.paused() for each in machine.allocators] == before
    assert machine.devices[0].pinned == pinned == 300 * MIB
    with pytest.raises(PyactcompError, match="'weights' is paused"):
        machine.allocators[0].allocate(1 * MIB, tag="weights")
    machine.allocators[0].allocate(1 * MIB, tag="kv")
    assert machine.paused == [{"weights"}, {"kv", "weights"}]
    machine.allocators[1].free(taken)
    machine.allocators[1].empty_cache()
    assert allocator.resume().restored == 600 * MIB
    assert machine.devices[0].read(addresses["weights"]) == 7


@pytest.mark.parametrize("keeps", [("cpu", "drop"), ("drop", "cpu")])
def test_an_undone_resume_keeps_an_override_of_each_device(
    machine: Machine, keeps: tuple[pausing.Keep, pausing.Keep]
) -> None:
    with allocator.tag("kv", keep="drop"):
        machine.allocate(300 * MIB)
        machine.allocate(300 * MIB, 1)
    machine.used = {0}
    allocator.pause("kv", keep=keeps[0])
    machine.used = {0, 1}
    allocator.pause("kv", keep=keeps[1])
    before = [each.paused() for each in machine.allocators]
    assert [saved // MIB for each in before for _, saved in each.values()] == [300 * (keep == "cpu") for keep in keeps]
    machine.allocators[1].allocate(1900 * MIB, tag="other")
    with pytest.raises(torch.OutOfMemoryError):
        allocator.resume("kv")
    assert [each.paused() for each in machine.allocators] == before


def test_a_refused_step_of_an_undone_resume_is_a_note_of_the_error(machine: Machine) -> None:
    for name in ("first", "second", "third"):
        with allocator.tag(name):
            machine.allocate(300 * MIB)
            machine.allocate(300 * MIB, 1)
    allocator.pause(["first", "second", "third"])
    real = machine.allocators[0]

    def pause(keep: dict[str, bool], resume_on_allocation: bool = False) -> dict[str, Any]:
        if "second" in keep:
            raise PyactcompError("too little host memory")
        return real.pause(keep, resume_on_allocation)

    machine.allocators[0] = Meddled(real, pause=pause)  # type: ignore[call-overload]
    machine.allocators[1].allocate(1900 * MIB, tag="other")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        allocator.resume()
    assert raised.value.__notes__ == ["the tag 'second' stays resumed on a device: too little host memory"]
    assert machine.paused == [{"first", "third"}, {"first", "second", "third"}]


def test_a_refused_step_of_an_undone_pause_is_a_note_of_the_error(machine: Machine) -> None:
    for name in ("first", "second"):
        with allocator.tag(name):
            machine.allocate(300 * MIB)
            machine.allocate(300 * MIB, 1)
    real = machine.allocators[0]

    def resume(tags: list[str]) -> dict[str, int]:
        if "second" in tags:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real.resume(tags)

    machine.allocators[0] = Meddled(real, resume=resume)  # type: ignore[call-overload]
    machine.devices[1].limit_host("100MiB")
    with pytest.raises(PyactcompError, match="too little host memory") as raised:
        allocator.pause(["first", "second"])
    assert raised.value.__notes__ == ["the tag 'second' stays paused on a device: CUDA out of memory"]
    assert machine.paused == [{"second"}, set()]


def test_a_tag_that_stays_paused_is_paused_again_as_it_was(machine: Machine) -> None:
    with allocator.tag("kv", keep="drop"):
        machine.allocate(300 * MIB)
        machine.allocate(300 * MIB, 1)

    def refuse(*_: Any) -> None:
        raise PyactcompError("refused")

    meddled = [
        Meddled(each, **{call: refuse}) for each, call in zip(machine.allocators, ("resume", "pause"), strict=True)
    ]
    machine.allocators[:] = meddled  # type: ignore[assignment]
    with pytest.raises(PyactcompError, match="refused"):
        allocator.pause("kv")
    assert machine.paused == [{"kv"}, set()]
    for each in meddled:
        each.calls.clear()
    allocator.pause("kv", keep="cpu")
    before = [each.paused() for each in machine.allocators]
    machine.allocators[1].allocate(1900 * MIB, tag="other")
    with pytest.raises(torch.OutOfMemoryError):
        allocator.resume("kv")
    assert [each.paused() for each in machine.allocators] == before
    assert machine.devices[0].pinned == 0


def test_a_capture_that_begins_during_a_pause_is_the_error(machine: Machine) -> None:
    with allocator.tag("kv", keep="drop"):
        machine.allocate(300 * MIB)
        machine.allocate(300 * MIB, 1)
    before = machine.reserved
    real = machine.allocators[1]
    calls: list[dict[str, bool]] = []

    def pause(keep: dict[str, bool], resume_on_allocation: bool = False) -> dict[str, Any]:
        # Another thread's capture.
        calls.append(keep)
        real.begin_allocate_to_pool((0, 1))
        return real.pause(keep, resume_on_allocation)

    machine.allocators[1] = Meddled(real, pause=pause)  # type: ignore[call-overload]
    with pytest.raises(PyactcompError, match="cannot be paused while a CUDA graph is captured") as raised:
        allocator.pause("kv")
    assert not hasattr(raised.value, "__notes__")
    assert calls == [{"kv": False}]
    assert machine.reserved == before
    assert machine.paused == [set(), set()]


def test_a_device_first_used_while_a_tag_is_paused_joins_later(machine: Machine) -> None:
    machine.used = {0}
    with allocator.tag("weights"):
        machine.allocate(100 * MIB)
    first = machine.reserved[0]
    allocator.pause("weights")
    machine.used = {0, 1}
    with allocator.tag("weights"):
        machine.allocate(40 * MIB, 1)
    second = machine.reserved[1]
    assert allocator.resume("weights").restored == 100 * MIB
    assert machine.reserved == [first, second]
    with pytest.raises(PyactcompError, match=r"^not paused: the tag 'weights'$"):
        allocator.resume("weights")
    machine.used = {0}
    allocator.pause("weights")
    machine.used = {0, 1}
    assert allocator.pause("weights").saved == 40 * MIB
    assert machine.reserved == [0, 0]
    with pytest.raises(PyactcompError, match=r"^paused already: the tag 'weights'; call resume"):
        allocator.pause("weights")
    assert allocator.resume("weights").restored == 140 * MIB
    assert machine.reserved == [first, second]


def test_an_allocation_that_resumes_one_device_leaves_the_other_to_resume(machine: Machine) -> None:
    for device, size in enumerate((30, 70)):
        with allocator.tag("kv"):
            machine.allocate(size * MIB, device)
    for call, saved in ((allocator.resume, 70), (allocator.pause, 30)):
        allocator.pause("kv", on_allocation="resume")
        with allocator.tag("kv"):
            machine.allocators[0].free(machine.allocate(1 * MIB))
        assert machine.paused == [set(), {"kv"}]
        report = call("kv")
        copied = report.restored if isinstance(report, pausing.Resumed) else report.saved
        assert copied == saved * MIB
    assert machine.paused == [{"kv"}, {"kv"}]


def test_a_tag_paused_nowhere_or_everywhere_is_named_and_the_others_stay(machine: Machine) -> None:
    for name in ("weights", "kv"):
        with allocator.tag(name):
            machine.allocate(10 * MIB)
    allocator.pause("kv")
    before = machine.paused
    with pytest.raises(PyactcompError, match=r"^paused already: the tag 'kv'; call resume"):
        allocator.pause(["weights", "kv"])
    with pytest.raises(PyactcompError, match=r"^not paused: the tag 'weights'$"):
        allocator.resume(["weights", "kv"])
    assert machine.paused == before


def test_a_pause_of_all_takes_what_runs_of_each_device(machine: Machine) -> None:
    with allocator.tag("kv"):
        machine.allocate(20 * MIB)
    machine.allocate(30 * MIB)
    allocator.pause("")
    assert allocator.pause().saved == 20 * MIB
    with pytest.raises(PyactcompError, match=r"^paused already: memory without a tag, the tag 'kv'; call resume"):
        allocator.pause()
    assert allocator.resume().restored == 50 * MIB


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: allocator.pause("nowhere"), ValueError, r"no tag is named 'nowhere'; opened so far: 'kv'"),
        (lambda: allocator.resume(["kv", "no", "other"]), ValueError, r"no tag is named 'no', 'other'"),
        (lambda: allocator.pause(keep="disk"), ValueError, "keep must be one of"),
        (lambda: allocator.pause(on_allocation="wait"), ValueError, "on_allocation must be one of"),
        (lambda: allocator.resume(), PyactcompError, "nothing is paused: call pause"),
        (lambda: allocator.resume("kv"), PyactcompError, "not paused: the tag 'kv'"),
        (lambda: allocator.pause(["kv", ""]) and allocator.pause("kv"), PyactcompError, "paused already: the tag 'kv'"),
        (lambda: allocator.pause() and allocator.pause(), PyactcompError, "paused already: memory without a tag"),
        (lambda: allocator.tag(""), ValueError, "a tag needs a name"),
        (lambda: allocator.tag(7), TypeError, "a string as its name, got 7"),
        (lambda: allocator.tag("kv", keep="disk"), ValueError, "keep must be one of"),
        (lambda: allocator.tag("kv", keep="drop").__enter__(), ValueError, r"'kv' was opened with keep='cpu'"),
        (lambda: allocator.hold((0, 9)), PyactcompError, r"no device has a memory pool \(0, 9\)"),
    ],
)
def test_what_cannot_be_done_is_said(
    machine: Machine, call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with allocator.tag("kv"):
        machine.allocate(20 * MIB)
    before = machine.reserved
    with pytest.raises(error, match=message):
        call()
    assert machine.reserved in (before, [0, 0])


def test_nothing_is_paused_before_enable(allocator_not_enabled: None) -> None:
    for call in (allocator.pause, allocator.resume, lambda: allocator.hold((0, 1)), allocator.tag("kv").__enter__):
        with pytest.raises(PyactcompError, match=r"pyactcomp\.allocator\.enable\(\) first"):
            call()
    assert allocator.paused() == {}


def test_tags_need_the_subclass(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pausing.extensions, "load", lambda name: (None, "it is not built: run pyactcomp build-allocator")
    )
    with pytest.raises(PyactcompError, match="not built: run pyactcomp build-allocator"):
        allocator.tag("kv").__enter__()


def test_the_environment_switches_pausing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYACTCOMP_DISABLE", "1")
    with allocator.tag("kv"):
        assert allocator.pause().released == allocator.resume().mapped == 0


def test_a_registered_pool_is_held(machine: Machine) -> None:
    pool = SimpleNamespace(id=(0, 3))
    machine.allocators[0].begin_allocate_to_pool(pool.id)
    machine.allocate(20 * MIB)
    machine.allocators[0].end_allocate_to_pool(pool.id)
    before = machine.reserved[0]
    registered: list[Any] = []
    allocator.register_mem_pool(SimpleNamespace(register_mem_pool=registered.append), pool)
    assert registered == [pool]
    assert allocator.pause().skipped == (f"the memory pool (0, 3) with {before} bytes is held",)
    assert machine.reserved[0] == before
    allocator.resume()

    def refuses(_: Any) -> None:
        raise RuntimeError("NCCL refuses")

    allocator.hold(pool, False)
    with pytest.raises(RuntimeError, match="NCCL refuses"):
        allocator.register_mem_pool(SimpleNamespace(register_mem_pool=refuses), pool)
    assert allocator.pause().skipped == ()


# The driver.


@pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h")
def test_the_driver_gets_memory_back_and_copies_contents(fake_driver: Callable[..., str]) -> None:
    run_case("pausing_cases.py", "on_a_driver", LD_LIBRARY_PATH=fake_driver())


@pytest.mark.skipif(not _core.has_cuda_allocator, reason="pyactcomp._core was built without cuda.h")
def test_memory_of_cuda_malloc_is_not_paused(fake_driver: Callable[..., str]) -> None:
    settings = "growth:malloc"
    run_case("pausing_cases.py", "malloc_growth", PYACTCOMP_ALLOC_CONF=settings, LD_LIBRARY_PATH=fake_driver())
