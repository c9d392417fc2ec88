"""How far estimates are from measured peaks.

``python -m bench estimate`` predicts, without a GPU, the rows of ``frontier.json`` that were measured on one, and
writes ``estimate.json``. ``--measure`` measures the pairs below on a GPU, each in a process of its own, under each
allocator, those without a row first; a later run without it predicts those too. Both go on where an earlier run
stopped.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyactcomp.errors import PyactcompError

from .rows import GIB, ROOT, Options, Row, failure, read
from .tables import folded, section, table
from .workloads import WORKLOADS

MODES = {
    "vanilla": "plain",
    "ckpt": "checkpoint",
    "lossless": "lossless",
    "int8": "int8",
    "int8+ckpt": "int8+checkpoint",
}
"""Methods of ``bench frontier`` that are modes of an estimate; ours takes the head of a language model too."""

GPUS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}
ALLOCATORS = ("native", "expandable", "pyactcomp")
PAIR_S, COMPILING_S = 60.0, 120.0
"""What a measured pair takes at most; the first int8 process of a machine compiles kernels."""


@dataclass(frozen=True)
class Pair:
    model: str
    batch: int
    mode: str
    optimizer: str

    @property
    def key(self) -> Row:
        return {"model": self.model, "batch": self.batch, "mode": self.mode, "optimizer": self.optimizer}


def _pairs() -> tuple[Pair, ...]:
    bert, gpt2, llama, resnet = "bert_large_amp", "gpt2_medium_amp", "llama_1b_bf16", "resnet50_tf32"
    swin, convnext, qwen3, t5 = "swin_base_amp", "convnext_base_amp", "qwen3_bf16", "t5_bf16"
    vit, unet, each, fused = "vit_large_amp", "unet_amp", "adamw:foreach", "adamw:fused"
    rows = (
        (bert, 32, "plain", each), (gpt2, 8, "plain", each), (llama, 2, "plain", fused), (resnet, 128, "plain", "sgd"),
        (vit, 64, "plain", fused), (bert, 32, "int8+head", fused), (gpt2, 16, "int8+head", each),
        (llama, 4, "int8+head", fused),
        (resnet, 256, "int8", "sgd"), (vit, 128, "int8", each), (bert, 32, "checkpoint", fused),
        (llama, 4, "checkpoint", each), (qwen3, 4, "plain", fused), (swin, 64, "plain", fused),
        (convnext, 64, "plain", "sgd"), (t5, 16, "plain", each), (unet, 16, "plain", "sgd"),
        (bert, 16, "lossless", fused), (gpt2, 8, "lossless", fused), (qwen3, 8, "int8+head", fused),
        (swin, 64, "int8", fused), (convnext, 128, "int8", "sgd"), (vit, 64, "checkpoint", each),
        (llama, 4, "int8+head+checkpoint", fused), (unet, 16, "int8", each), (t5, 16, "int8", fused),
        (resnet, 256, "plain", "sgd"), (gpt2, 16, "plain", fused), (bert, 16, "plain", fused),
        (unet, 16, "checkpoint", "sgd"), (resnet, 256, "checkpoint", "sgd"), (qwen3, 8, "checkpoint", fused),
        (llama, 2, "lossless", "sgd"), (gpt2, 8, "plain", fused),
        # Not among those with which the rules of kernel_memory.py were written.
        ("whisper_medium_amp", 8, "plain", fused), ("whisper_medium_amp", 8, "int8", fused),
        ("wav2vec2_base_amp", 16, "plain", each), ("wav2vec2_base_amp", 16, "int8", each),
        ("modernbert_base_amp", 16, "plain", fused), ("modernbert_base_amp", 16, "int8+head+checkpoint", fused),
        ("encoder_amp", 32, "plain", "sgd"), ("encoder_amp", 32, "int8", fused),
        ("bert_large_fp32", 8, "plain", each), ("plain_gpt_amp", 16, "checkpoint", "adamw8bit"),
        (bert, 32, "int8+head+offload", fused), (gpt2, 16, "lossless+offload", fused), (vit, 128, "int8+offload", each),
    )  # fmt: skip
    return tuple(Pair(*row) for row in rows)


PAIRS = _pairs()


def run(options: Options, measure: bool) -> None:
    """Predict, or measure, what is not in the file yet."""
    if measure:
        _measure(options)
    else:
        _predict(options)
    rows = read(options.out / "estimate.json")
    print(summary_of(rows), summary_of(rows, "reserved_error"))


def _truth(options: Options) -> list[Row]:
    """Return the newest measured row of each workload and method, and of each pair."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in read(ROOT / "bench" / "results" / "frontier.json"):
        known = row.get("status") == "ok" and row.get("scale") == "full" and row.get("peak_minus_base_bytes")
        if known and row["method"] in MODES and row["origin"]["device"] in GPUS:
            found = {
                "model": row["workload"],
                "batch": row["batch"],
                "mode": _mode(row),
                "optimizer": "adamw:fused",
                "measured": row["base_bytes"] + row["peak_minus_base_bytes"],
                "measured_at": row["origin"]["commit"],
                "device": row["origin"]["device"],
                "measured_time": row["time"],
            }
            key = tuple(found[name] for name in ("model", "batch", "mode", "optimizer"))
            if key not in newest or found["measured_time"] > newest[key]["measured_time"]:
                newest[key] = found
    return list(newest.values())


def _mode(row: Row) -> str:
    mode = MODES[row["method"]]
    headed = mode.startswith("int8") and WORKLOADS[row["workload"]].language_model
    return mode.replace("int8", "int8+head") if headed else mode


def _predict(options: Options) -> None:
    store = options.store("estimate")
    wanted = [row for row in _truth(options) if options.selects(row["model"], row["mode"])]
    wanted += [
        {**row, "kind": "pair"}
        for row in store.rows()
        if row.get("kind") == "measured" and options.selects(row["model"])
    ]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in wanted:
        key = {name: row[name] for name in ("model", "batch", "mode", "optimizer")}
        if options.again or not store.has(kind="predicted", allocator=row.get("allocator"), **key):
            groups.setdefault((row["model"], row["batch"], row["optimizer"], row["device"]), []).append(row)
    for rows in groups.values():
        if not options.budget.allows(PAIR_S):
            return
        began = time.monotonic()
        found = _estimates(rows)
        seconds = round((time.monotonic() - began) / len(found), 1)
        for row in rows:
            key = {name: row[name] for name in ("model", "batch", "mode", "optimizer")}
            one = found[row["mode"]]
            if isinstance(one, PyactcompError):
                store.append({"kind": "predicted", **key, **failure(one)})
                print(key, str(one).splitlines()[0], flush=True)
                continue
            out = {
                **{"kind": "predicted", **key, "status": "ok", "device_of": row["device"], "seconds": seconds},
                **{"measured": row["measured"], "allocated": one.peak_allocated},
                "measured_at": row["measured_at"] or row["origin"]["commit"],
                **{"error": one.peak_allocated / row["measured"] - 1, "reserved": one.peak_reserved},
                **{"activations": one.activations, "allocator": row.get("allocator")},
            }
            if "measured_reserved" in row:
                out["reserved_error"] = one.peak_reserved[row["allocator"]] / row["measured_reserved"] - 1
            store.append(out)
            print(f"{row['model']:22} {row['mode']:16} {out['error']:+.2%}  {seconds} s", flush=True)


def _estimates(rows: list[Row]) -> dict[str, Any]:
    """Return the estimate of each mode of one model, or the error; all in one process if there is none."""
    from pyactcomp.estimate import estimate

    from .estimate_programs import MODELS

    def ask(modes: list[str]) -> dict[str, Any]:
        first = rows[0]
        found = estimate(
            f"bench.estimate_programs:{first['model']}",
            batch=first["batch"],
            optimizer=first["optimizer"],
            autocast="bfloat16" if MODELS[first["model"]].autocast else None,
            modes=modes,
            gpu=GPUS[first["device"]],
        )
        return {each.mode: each for each in found.modes}

    modes = list(dict.fromkeys(row["mode"] for row in rows))
    try:
        return ask(modes)
    except PyactcompError:
        alone: dict[str, Any] = {}
        for mode in modes:
            try:
                alone.update(ask([mode]))
            except PyactcompError as error:
                alone[mode] = error
        return alone


def _measure(options: Options) -> None:
    """Measure the pairs under each allocator, those that never were first; needs a GPU."""
    store = options.store("estimate")
    for pair, allocator in in_turn([*read(ROOT / "bench" / "results" / "estimate.json"), *store.rows()]):
        done = store.has(kind="measured", allocator=allocator, **pair.key)
        limit = COMPILING_S if pair.mode.startswith("int8") else PAIR_S
        if not options.selects(pair.model, pair.mode) or (done and not options.again):
            continue
        if not options.budget.allows(limit):
            continue  # a later pair may take less
        row = _row_of(pair, allocator, limit)
        store.append({"kind": "measured", **pair.key, "allocator": allocator, **row})
        print(pair.key, allocator, row.get("measured", row.get("reason")), flush=True)


def in_turn(rows: Iterable[Row]) -> list[tuple[Pair, str]]:
    """Return each pair with each allocator: those without a row first, then those measured longest ago.

    A row of a failure counts, so a pair that always fails does not take the time of the others.
    """
    last: dict[Any, str] = {}
    for row in rows:
        if row.get("kind") == "measured":
            asked = Pair(row["model"], row["batch"], row["mode"], row["optimizer"]), row["allocator"]
            last[asked] = max(last.get(asked, ""), row["time"])
    return sorted(itertools.product(PAIRS, ALLOCATORS), key=lambda each: last.get(each, ""))


def _row_of(pair: Pair, allocator: str, limit: float) -> Row:
    """Measure a pair in a process of its own, for at most ``limit`` seconds."""
    asked = json.dumps([pair.model, pair.batch, pair.mode, pair.optimizer])
    environment = dict(os.environ)
    if allocator == "expandable":
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, "-m", "bench.estimate_worker", asked, allocator]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"status": "error", "reason": f"longer than {limit} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    row: Row = json.loads(lines[-1]) if lines else {"status": "error", "reason": ran.stderr[-400:]}
    return row


def _newest(rows: Iterable[Row]) -> list[Row]:
    """Return the newest prediction of each model, batch, mode, optimizer and allocator."""
    names = ("model", "batch", "mode", "optimizer", "allocator")
    found = {
        tuple(row.get(name) for name in names): row
        for row in rows
        if row.get("kind") == "predicted" and row["status"] == "ok"
    }
    return list(found.values())


def summary_of(rows: Iterable[Row], name: str = "error") -> str:
    """Return the median and the worst of an error, as a sentence; empty where there is none."""
    errors = [row[name] for row in _newest(rows) if name in row]
    if not errors:
        return ""
    sizes = sorted(map(abs, errors))
    within = sum(each <= 0.01 for each in sizes)
    what = "peak allocated" if name == "error" else "peak reserved"
    return (
        f"{what}, {len(errors)} cases: median error {statistics.median(sizes):.2%}, worst "
        f"{max(errors, key=abs):+.2%}, {within} within 1 %."
    )


def estimate_table(rows: Iterable[Row]) -> str:
    """Return the table of estimated and measured peaks, and of pairs the error of what each allocator reserves."""
    everything = list(rows)
    pairs: dict[tuple[Any, ...], list[Row]] = {}
    for row in _newest(everything):
        pairs.setdefault((row["model"], row["batch"], row["mode"], row["optimizer"], row["measured_at"]), []).append(
            row
        )
    if not pairs:
        return ""
    header = [
        "model",
        "batch",
        "mode",
        "optimizer",
        "measured GiB",
        "estimated GiB",
        "error",
        "reserved",
        "measured on",
        "at commit",
    ]
    lines = []
    for group in sorted(pairs.values(), key=lambda own: abs(own[0]["error"])):
        row = group[0]
        reserved = {each["allocator"]: each["reserved_error"] for each in group if "reserved_error" in each}
        lines.append(
            [
                *(f"`{row['model']}`", str(row["batch"]), row["mode"], row["optimizer"]),
                *(f"{row['measured'] / GIB:.2f}", f"{row['allocated'] / GIB:.2f}", f"{row['error']:+.2%}"),
                ", ".join(f"{reserved[name]:+.1%}" for name in ALLOCATORS if name in reserved),
                *(row["device_of"].removeprefix("NVIDIA ").split()[0], (row["measured_at"] or "")[:7]),
            ]
        )
    sentences = [summary_of(everything), summary_of(everything, "reserved_error")]
    names = ", ".join(ALLOCATORS)
    note = f"A case is an estimate under one allocator. Reserved: the errors under {names}, where they were measured."
    rows_of_all = folded(f"All {len(lines)} estimates, the closest first", section(table(header, lines), note))
    return section(" ".join(each.capitalize() for each in sentences if each), rows_of_all)
