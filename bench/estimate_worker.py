"""Measures one pair of ``bench.estimate`` on this machine's GPU: ``python -m bench.estimate_worker PAIR ALLOCATOR``."""

from __future__ import annotations

import json
import sys

import torch

import pyactcomp
from pyactcomp.estimate.programs import builder
from pyactcomp.estimate.result import Question
from pyactcomp.estimate.training import STEPS, record

from .estimate_programs import MODELS


class _Device:
    """Stands where the library of phantom tensors does: marks read and reset the counters of the real allocator."""

    def __init__(self) -> None:
        self.peaks: list[tuple[int, int]] = []

    def count(self) -> int:
        torch.cuda.synchronize()
        self.peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()
        return len(self.peaks) - 1

    def live(self) -> int:
        return torch.cuda.memory_allocated()

    def set_label(self, label: int) -> int:
        return label

    def columns(self) -> tuple[bytes, bytes, bytes, bytes]:
        return b"", b"", b"", b""


def main() -> None:
    model, batch, mode, optimizer = json.loads(sys.argv[1])
    if sys.argv[2] == "pyactcomp":
        pyactcomp.allocator.enable()
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    device = _Device()
    autocast = "bfloat16" if MODELS[model].autocast else None
    question = Question(f"bench.estimate_programs:{model}", batch, None, optimizer, None, autocast, "")
    try:
        found = record(device, builder(question.model), question, mode, lambda: 0)
    except torch.OutOfMemoryError as error:
        print(json.dumps({"status": "oom", "reason": str(error)[:200]}))
        return
    steps = [
        range(found.marks[f"step{n - 1}"] + 1 if n else found.marks["built"] + 1, found.marks[f"step{n}"] + 1)
        for n in range(STEPS)
    ]
    allocated = [max(device.peaks[mark][0] for mark in step) for step in steps]
    row = {"status": "ok", "measured": allocated[-1], "allocated": allocated, "parts": found.parts}
    row |= {"measured_reserved": max(each[1] for each in device.peaks), "context": total - free}
    row |= {"device": torch.cuda.get_device_name(), "measured_at": None}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
