"""Suite `sharded`: steps of a model sharded over several GPUs by FSDP2, each block compiled, with and without us.

Every GPU has a process and a batch of its own. Gradients are compared with the mean of those that the unsharded,
uncompiled model has for each batch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from . import context_models, training
from .methods import METHODS, VANILLA
from .rows import Options, Row, failure
from .tables import conditions, figure, latest, on_gpus, reasons, section, table
from .tuned import TUNED, tokens
from .workload import LanguageModelLoss, Workload

SHARDED = (VANILLA, "int8", "int8+offload", "compile-blocks", "compile-blocks+int8")
BESIDE = {"int8": VANILLA, "int8+offload": "int8", "compile-blocks+int8": "compile-blocks"}
"""What each of ours is compared with."""
TINY = (VANILLA, "int8")
"""Without the compiler, whose C++ for a CPU takes minutes."""
RANKS, STEPS = 2, 8


def _wide_llama(tiny: bool) -> nn.Module:
    shapes = context_models.TINY if tiny else context_models.SHAPES
    device = torch.get_default_device().type
    return LanguageModelLoss(context_models.build(shapes["llama8b"], 16384, device, layers=8, vocabulary=32000))


WORKLOADS = {
    workload.name: workload
    for workload in (
        TUNED["llama_1b_bf16"],
        # Whether offload hides depends on how much a layer computes for each byte that it saves: its width.
        Workload(
            "llama_8b_widths_bf16", _wide_llama, tokens(32000, 16384, True), lambda m: list(m.model.model.layers), 1,
            "LlamaForCausalLM, 8 layers of Llama-3.1-8B, 1 x 16384 tokens, pure bf16", language_model=True,
        ),
    )
}  # fmt: skip


def _whole(gradients: list[Tensor]) -> list[Tensor]:
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


def measure_rank(rank: int, workload_name: str, method_name: str, device: str, tiny: bool, folder: str) -> None:
    """Write the figures of one process of a row to ``folder``, and end the process."""
    from torch.distributed.fsdp import fully_shard

    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        workload, method = WORKLOADS[workload_name], METHODS[method_name]
        trainer = training.build(workload, workload.batch_size(tiny), device, tiny)
        torch.manual_seed(training.INPUT_SEED + 100 + rank)
        trainer.batch = workload.inputs(workload.batch_size(tiny), device, tiny)
        exact = trainer.gradients()
        for gradient in exact:
            dist.all_reduce(gradient)
            gradient /= RANKS
        blocks = workload.blocks(trainer.module)
        trainer.context = method.apply(trainer.module, blocks)
        for block in blocks:
            fully_shard(block)
        fully_shard(trainer.module)
        row = {"grad_error": training.relative_error(_whole(trainer.gradients()), exact)}
        del exact
        training.clean(device)
        for _ in range(training.WARM_UP - 1):
            trainer.step()
        row |= training.memory_of_step(trainer)
        dist.barrier()
        row |= training.summary(training.step_times(trainer.step, 2 if tiny else STEPS, device), "ms")
        (Path(folder) / f"{rank}.json").write_text(json.dumps(row))
    finally:
        dist.destroy_process_group()
    # A thread of gloo's may still hold the last collective, and the Python objects of its thread-local state: released
    # while the interpreter is being finalized, they abort the process.
    os._exit(0)


def measure(workload: str, method: str, device: str, tiny: bool) -> Row:
    """Return the figures of one row: the slowest process, the largest peak, the largest error."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = workload, method, device, tiny, folder
        mp.start_processes(measure_rank, args=arguments, nprocs=RANKS, start_method="spawn")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    slowest: Row = max(found, key=lambda row: row["median_ms"])
    worst = {name: max(row[name] for row in found) for name in slowest if name.endswith(("_bytes", "_error"))}
    return {**slowest, **worst, "ranks": RANKS}


def run(options: Options) -> None:
    """Measure each method once for each workload."""
    if options.device == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"sharded: needs {RANKS} GPUs, found {torch.cuda.device_count()}")
        return
    store = options.store("sharded")
    longest = 0.0
    for workload, method in product(WORKLOADS, TINY if options.tiny else SHARDED):
        key: Row = {"workload": workload, "method": method, "scale": options.scale}
        if not options.selects(workload, method) or (store.has(**key) and not options.again):
            continue
        if not options.budget.allows(longest):
            print(f"sharded {workload} {method}: not started, the budget is used up")
            return
        begin = options.budget.clock()
        try:
            row: Row = {"status": "ok", **measure(workload, method, options.device, options.tiny)}
        except Exception as problem:  # whatever a process does wrong is the row
            row = failure(problem)
        longest = max(longest, options.budget.clock() - begin)
        store.append({"suite": "sharded", **key, **row})
        names = ("median_ms", "act_bytes", "peak_minus_base_bytes", "grad_error")
        figures = "  ".join(f"{name} {row[name]:.4g}" for name in names if name in row)
        print(f"sharded {workload:20} {method:20} {row['status']:6} {figures}{row.get('reason', '')}", flush=True)


def sharded_table(rows: Iterable[Row]) -> str:
    """Return the table of sharded steps, each beside the same form without us."""
    found = latest(on_gpus(rows), "gpu", "workload", "method")
    good = {key: row for key, row in found.items() if row["status"] == "ok"}
    lines = []
    for (gpu, workload, method), row in sorted(good.items(), key=lambda each: each[0][:2]):
        plain = good.get((gpu, workload, BESIDE.get(method, "")))
        cells = [figure(row, "median_ms", ".1f")]
        for name, unit in (("median_ms", 0), ("act_bytes", 2**30), ("peak_minus_base_bytes", 2**30)):
            if unit:
                cells.append(f"{row[name] / unit:.2f}")
            cells.append(f"{row[name] / plain[name]:.2f}" if plain else "")
        lines.append([gpu, workload, method, *cells, f"{row['grad_error']:.2%}"])
    if not lines:
        return ""
    header = ["GPU", "model", "method", "step ms", "x", "act GiB", "x", "peak - base GiB", "x", "gradient error"]
    ranks = next(iter(good.values()))["ranks"]
    models = "; ".join(f"`{name}`: {WORKLOADS[name].conditions}" for name in sorted({key[1] for key in good}))
    note = (
        f"Over {ranks} GPUs, each block a group of FSDP2. Of the slowest and of the fullest process. "
        "x: times the same without pyactcomp, or of int8+offload times int8. Error: against the unsharded, uncompiled "
        f"model. {models}."
    )
    everything = list(found.values())
    return section(table(header, lines), note, conditions(everything), reasons(everything))
