"""Cases of test_allocator_variable.py, a process each: PYACTCOMP_ALLOCATOR is set, and nothing here enables anything.

Each runs with a GPU, and with tests/cuda_stand_in.py where there is none.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import child_script
import pytest
import torch

stand_in = sys.modules.get("cuda_stand_in")
BUILD = "run pyactcomp build-allocator"


def use_cuda() -> None:
    if stand_in:
        torch.cuda.init()
    else:
        torch.ones(1000, device="cuda")


def check_attached(*before: str) -> None:
    """The allocator became torch's before CUDA was initialised, with the environment's settings."""
    from pyactcomp import _core, allocator

    assert allocator.is_enabled()
    assert str(_core.runtime_config()) == os.environ.get("PYACTCOMP_ALLOC_CONF", "")
    if stand_in:
        assert stand_in.events == [*before, "install", "init"]
        assert stand_in.drivers_before == [False]
    else:
        assert torch.cuda.memory.get_allocator_backend() == "pyactcomp"
        # Natively initialised first, torch's allocator would be asked for statistics too.
        before = torch.cuda.memory_allocated()
        ones = torch.ones(1 << 20, device="cuda")
        assert torch.cuda.memory_allocated() == before + 4 * ones.numel()
        assert allocator.stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()


def check_native(*events: str) -> None:
    if stand_in:
        assert stand_in.events == list(events or ("init",))
    else:
        assert torch.cuda.memory.get_allocator_backend() == "native"
        assert torch.ones(3, device="cuda").sum().item() == 3


def first_use() -> None:
    assert "pyactcomp" not in sys.modules
    assert not torch.cuda.is_initialized()
    assert torch.cuda.memory_allocated() == 0
    use_cuda()
    check_attached()
    use_cuda()
    check_attached()


def child() -> None:
    assert "pyactcomp" not in sys.modules
    use_cuda()
    check_attached()


def _in_a_process(method: str) -> None:
    process = multiprocessing.get_context(method).Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0


def fork() -> None:
    """CUDA in a child, after torch was imported in the parent; then in the parent."""
    _in_a_process("fork")
    child()


def spawn() -> None:
    _in_a_process("spawn")
    use_cuda()
    check_attached()
    _in_a_process("spawn")


def spawn_under_run() -> None:
    """pyactcomp run enabled the allocator here, and hands the settings on."""
    assert os.environ["PYACTCOMP_ALLOC_CONF"] == "growth:malloc"
    _in_a_process("spawn")
    use_cuda()
    check_attached("count")


def launched() -> None:
    """torchrun, with this file as the script."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    subprocess.run([*launcher, __file__, "child"], check=True)


def no_devices_are_visible() -> None:
    """CUDA_VISIBLE_DEVICES set after the import: a driver started before would have seen all devices."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if stand_in:
        torch.cuda.init()
        assert stand_in.visible == [""]
        check_attached()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pyactcomp")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
                torch.cuda.init()


def first_device_is_visible() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    use_cuda()
    check_attached()
    assert torch.cuda.device_count() == 1 or stand_in


def history() -> None:
    """torch initialises CUDA behind _record_memory_history by itself: the recording is the allocator's."""
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: None)
    if stand_in:
        assert stand_in.events == ["install", "history", "observer"]
        return
    ones = torch.ones(1 << 20, device="cuda")
    check_attached()
    assert any(event["addr"] == ones.data_ptr() for event in torch.cuda.memory._snapshot()["device_traces"][0])


def threads() -> None:
    """Several threads use CUDA first, on both ways."""
    together = threading.Barrier(8)

    def use(number: int) -> None:
        together.wait()
        if number % 2:
            torch.cuda.init()
        else:
            torch.cuda.memory._record_memory_history(max_entries=100)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    if stand_in:
        assert stand_in.events[0] == "install"
        assert sorted(stand_in.events[1:]) == ["history"] * 4 + ["init"]
    else:
        check_attached()


def default_device() -> None:
    """pyactcomp, imported while torch holds the lock of its initialisation, makes no tensor."""
    torch.set_default_device("cuda")
    use_cuda()
    check_attached()


def pinned_first() -> None:
    """Pinned memory initialises CUDA in C++ alone; the allocator is attached at the next use."""
    if not stand_in:
        torch.ones(3).pin_memory()
    use_cuda()
    check_attached()


def enabled_by_the_program_too() -> None:
    from pyactcomp import PyactcompError, allocator

    use_cuda()
    allocator.enable()
    with pytest.raises(PyactcompError, match=r"by PYACTCOMP_ALLOCATOR=1, with max_split_size_mb:64,"):
        allocator.enable(max_split_size="128MiB")
    check_attached()


def enabled_by_the_program_before() -> None:
    from pyactcomp import allocator

    allocator.enable(growth="malloc")
    use_cuda()
    assert torch.cuda.is_initialized()
    assert allocator.is_enabled()
    assert stand_in is None or stand_in.events == ["count", "install", "init"]


@contextmanager
def one_warning(*named: str) -> Iterator[None]:
    """CUDA is used twice inside, and one warning says so at the first, which this file has."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    [warning] = [each for each in caught if "pyactcomp" in str(each.message)]
    assert str(warning.message).startswith("pyactcomp's allocator is not attached, torch's own serves: ")
    assert [name for name in named if name not in str(warning.message)] == []


def wrong_value() -> None:
    with one_warning("PYACTCOMP_ALLOCATOR is 1, or 0 for torch's allocator; got 'vmm'"):
        use_cuda()
        use_cuda()
    check_native()


def malformed_settings() -> None:
    with one_warning("PYACTCOMP_ALLOC_CONF in the environment: ", "growth is 'vmm' or 'malloc', got '?'"):
        use_cuda()
        use_cuda()
    check_native()


def no_subclass() -> None:
    from pyactcomp.torch_private import extensions

    extensions.load = lambda name: (None, f"its torch subclass is not built: {BUILD}")
    with one_warning(BUILD):
        use_cuda()
        use_cuda()
    check_native()


def no_package() -> None:
    sys.modules["pyactcomp.allocator"] = None  # type: ignore[assignment]
    with one_warning("ModuleNotFoundError: "):
        use_cuda()
        use_cuda()
    check_native()


def a_warning_as_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="PYACTCOMP_ALLOCATOR is 1"):
            torch.cuda.init()
    use_cuda()
    check_native()


def off() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="pyactcomp")
        use_cuda()
    check_native()


def _forked_case(case: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    globals()[case]()


def in_forks(cases: str) -> None:
    """Run cases, given with their variables as JSON, each in a fork of this process, and print how they exited.

    This process has imported torch, for a second or two, and has not used CUDA.
    """
    exits = {}
    for case, variables in json.loads(cases).items():
        process = multiprocessing.get_context("fork").Process(target=_forked_case, args=(case, variables))
        process.start()
        process.join()
        exits[case] = process.exitcode
    sys.stdout.write(json.dumps(exits))


if __name__ == "__main__":
    child_script.main(globals())
