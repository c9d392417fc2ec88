"""A case of test_allocator_capture_reuse.py, in a process of its own: the order of work in a capture of a driver."""

from __future__ import annotations

import ctypes

import child_script
import native_alone  # noqa: F401

from pyactcomp import _core

MIB = 1 << 20
MAIN, SIDE = 8, 9


def on_a_driver(order: str) -> None:
    """Free a block that a side stream used; ``order`` is what the fake driver tells of the side stream's work."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_capture.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    core = _core.runtime_device(0)
    core.begin_allocate_to_pool((0, 1), {MAIN, SIDE})
    driver.fake_capture(MAIN, MAIN)
    block = core.allocate(30 * MIB, stream=MAIN)
    driver.fake_capture(SIDE, MAIN)
    core.record_stream(block, SIDE)
    core.free(block)
    assert core.allocate(30 * MIB, stream=MAIN) != block
    driver.fake_capture(MAIN, SIDE)
    if order == "unknown":
        driver.fake_early_launch()
    assert (core.allocate(30 * MIB, stream=MAIN) == block) == (order == "known")


if __name__ == "__main__":
    child_script.main(globals())
