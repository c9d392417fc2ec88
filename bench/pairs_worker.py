"""One side of the suite `pairs`: ``python -m bench.pairs_worker TREE``, with the bench of this tree around its package.

It reads a command per line of its input, in JSON, and answers each with one line of its output: first what to build,
then a number of steps each time it is this side's turn. Between two commands it leaves the device alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Turn = Callable[[int], dict[str, list[float]]]
"""Takes the number of steps and returns the samples of each figure."""


def model(workload_name: str, method_name: str, device: str, tiny: bool) -> tuple[dict[str, Any], Turn]:
    """Return what there is to say about a compressed model, and its turn."""
    import torch

    import pyactcomp

    from . import training
    from .measure import turn_times
    from .methods import METHODS, implementation
    from .workloads import WORKLOADS

    workload = WORKLOADS[workload_name]
    trainer = training.build(workload, workload.batch_size(tiny), device, tiny)
    trainer.gradients()  # so that libraries have their workspaces, which are no activations
    plain = {"vanilla_act_bytes": training.forward_bytes(trainer)[1]} if device == "cuda" else {}
    errors = training.apply_and_compare(trainer, METHODS[method_name])
    training.clean(device)
    torch.manual_seed(training.STEP_SEED)
    for _ in range(training.WARM_UP - 1):
        trainer.step()
    memory = training.memory_of_step(trainer)
    facts = {
        "batch": workload.batch_size(tiny),
        **plain,
        **memory,
        **errors,
        "stored_bytes": pyactcomp.report(trainer.module).stored_bytes,
        **implementation(trainer.module),
    }
    return facts, lambda steps: {"ms": turn_times(trainer.step, steps, device)}


def odd_sizes(device: str, tiny: bool) -> tuple[dict[str, Any], Turn]:
    """Return the bytes and the turn of a network with fused forms, of sizes that divide into nothing."""
    import torch
    from torch import nn

    import pyactcomp

    from .measure import turn_times

    rows, width = (67, 37) if tiny else (16381, 1537)
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(1 if tiny else 8)
        for layer in (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.ReLU())
    ]
    net = pyactcomp.compress(nn.Sequential(*layers).to(device))
    x = torch.randn(rows, width, device=device, requires_grad=True)

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            net(x).float().square().mean().backward()
        net.zero_grad()
        x.grad = None

    step()
    return {"stored_bytes": pyactcomp.report(net).stored_bytes}, lambda steps: {"ms": turn_times(step, steps, device)}


def chains(device: str, tiny: bool) -> tuple[dict[str, Any], Turn]:
    """Return the host's time of pack and unpack per tensor, and what an operator that saves nothing pays."""
    from .measure import on_quick_cpu
    from .overhead import LENGTH, TINY_LENGTH, Chains

    pair = Chains(device, TINY_LENGTH if tiny else LENGTH)

    def turn(steps: int) -> dict[str, list[float]]:
        with on_quick_cpu():
            saving = [pair.saving() for _ in range(steps)]
            nothing = [pair.nothing_ns() for _ in range(steps)]
        pack, unpack = ([ours[phase] - plain[phase] for plain, ours in saving] for phase in (0, 1))
        both = [a + b for a, b in zip(pack, unpack, strict=True)]
        return {"us": both, "pack_us": pack, "unpack_us": unpack, "nothing_ns": nothing}

    return {"tensors": pair.length}, turn


def serve(tree: Path) -> None:
    """Answer commands until the input ends; what goes wrong is an answer too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    sys.path.insert(0, str(tree))  # the package is the tree's; this bench is imported already
    import pyactcomp

    if Path(pyactcomp.__file__).resolve().parent != tree / "pyactcomp":
        raise RuntimeError(f"the package of {tree} was asked for, and {pyactcomp.__file__} was imported")
    from .overhead import CHAIN
    from .pairs import ODD
    from .rows import failure

    networks = {CHAIN: chains, ODD: odd_sizes}

    turn: Turn | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if turn is not None:
                answer: dict[str, Any] = turn(command["steps"])
            elif command["workload_name"] in networks:
                answer, turn = networks[command["workload_name"]](command["device"], command["tiny"])
            else:
                answer, turn = model(**command)
        except Exception as problem:  # whatever one side does wrong is the row of both
            answer = failure(problem)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    serve(Path(sys.argv[1]).resolve())
