"""Jobs for the processes of `bench.breadth_pool`, in a module that they import in no time."""

from __future__ import annotations

import os
import time


def work(job: str) -> int:
    if job == "fails":
        raise ValueError("/a/path/of/this/machine is no file\nsecond line")
    if job == "dies":
        os.kill(os.getpid(), 11)
    if job == "hangs":
        time.sleep(600)
    return len(job)
