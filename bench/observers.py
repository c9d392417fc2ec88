"""Suite `observers`: the library that knows the running operator, against what serves without it, on a small model.

Both compress the same model, and their steps take turns. A decision is stricter where the same saved tensor is wanted
in a more exact form; which form that is, is asked where the engine asks for it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

import pyactcomp
from pyactcomp.cli.demo.model import VOCABULARY, ByteTransformer
from pyactcomp.engine.frame import Packing
from pyactcomp.readers import observer
from pyactcomp.readers.forms import Form, Reading
from pyactcomp.torch_private import extensions

from .measure import on_quick_cpu, turn_times
from .rows import Options, Row, failure, quantile
from .tables import conditions, latest, on_cpu, on_gpu, reasons, section, table

WITH, WITHOUT = "library", "without"
MODEL = "byte-transformer"
METHODS = {"int8": {"fuse": True}, "int8, not fused": {"fuse": False}}
SIZE, TINY_SIZE = (256, 4, 4, 256), (32, 1, 2, 16)
"""Width, blocks, heads and bytes of a sequence."""
BATCH, PAIRS, STEPS = 8, 9, 2


@contextmanager
def observed_by(name: str) -> Iterator[None]:
    """Have the library tell the operators, or what serves without it."""
    load = extensions.load if name == WITH else lambda _: (None, "left out")
    with mock.patch.object(extensions, "load", load):
        observer.observer.cache_clear()
        try:
            if isinstance(observer.observer(), observer.WithoutLibrary) != (name == WITHOUT):
                raise ImportError("the library is not built: pyactcomp build-observer")
            yield
        finally:
            observer.observer.cache_clear()


@contextmanager
def wanted_forms() -> Iterator[list[tuple[int, int]]]:
    """Give a list to which each saved tensor adds how exactly it is wanted, and its bytes."""
    found: list[tuple[int, int]] = []
    form_for = Packing.form_for

    def noted(self: Packing, tensor: Tensor, reading: Reading) -> Form:
        form = form_for(self, tensor, reading)
        found.append((form.need, tensor.nbytes))
        return form

    with mock.patch.object(Packing, "form_for", noted):
        yield found


def _step(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    model(*batch).backward()
    model.zero_grad(set_to_none=True)


def measure(method: str, device: str, tiny: bool) -> Row:
    """Return the figures of both."""
    torch.manual_seed(0)
    width, depth, heads, sequence = TINY_SIZE if tiny else SIZE
    plain = ByteTransformer(width, depth, heads, sequence).to(device)
    batch = tuple(torch.randint(VOCABULARY, (BATCH, sequence), device=device) for _ in range(2))
    models: dict[str, nn.Module] = {}
    facts: Row = {}
    forms: dict[str, list[tuple[int, int]]] = {}
    for name in (WITH, WITHOUT):
        model = pyactcomp.compress(copy.deepcopy(plain), min_bytes=0 if tiny else 4096, **METHODS[method])
        models[name] = model
        with observed_by(name), wanted_forms() as forms[name]:
            _step(model, batch)
        report = pyactcomp.report(model)
        facts[name] = {"stored_bytes": report.stored_bytes, "unique_bytes": report.unique_bytes}
    if len(forms[WITH]) != len(forms[WITHOUT]):
        raise RuntimeError(f"{len(forms[WITH])} and {len(forms[WITHOUT])} tensors: not the same decisions")
    stricter = [size for (a, size), (b, _) in zip(forms[WITH], forms[WITHOUT], strict=True) if b > a]
    looser = sum(b < a for (a, _), (b, _) in zip(forms[WITH], forms[WITHOUT], strict=True))
    times: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    steps = 1 if tiny else STEPS
    with on_quick_cpu():
        for pair in range(2 if tiny else PAIRS):
            for name in (WITH, WITHOUT) if pair % 2 == 0 else (WITHOUT, WITH):
                with observed_by(name):
                    turn = turn_times(functools.partial(_step, models[name], batch), steps, device)
                times[name].append(quantile(turn, 0.5))
    ratios = [b / a for a, b in zip(times[WITH], times[WITHOUT], strict=True)]
    return {
        **facts, "decisions": len(forms[WITH]), "stricter": len(stricter), "stricter_bytes": sum(stricter),
        "looser": looser, "ratio": quantile(ratios, 0.5), "ratios": ratios,
    }  # fmt: skip


def run(options: Options) -> None:
    """Measure each method once per commit."""
    store = options.store("observers")
    for method in METHODS:
        key: Row = {"workload": MODEL, "method": method, "scale": options.scale}
        if (store.has(**key) and not options.again) or not options.selects(MODEL, method):
            continue
        if not options.budget.allows(0.0):
            print(f"observers {method}: not started, the budget is used up")
            return
        try:
            row: Row = {"status": "ok", **measure(method, options.device, options.tiny)}
        except (ImportError, RuntimeError) as problem:
            row = failure(problem)
        store.append({"suite": "observers", **key, **row})
        figures = "  ".join(
            f"{name} {row[name]}" for name in ("decisions", "stricter", "looser", "ratio") if name in row
        )
        print(f"observers {method:16} {row['status']} {figures}{row.get('reason', '')}", flush=True)


def observers_table(rows: Iterable[Row]) -> str:
    """Return the table of the two."""
    rows = list(rows)
    measured = (
        on_gpu(rows) if any(r["origin"]["device"] != "cpu" and r["scale"] == "full" for r in rows) else on_cpu(rows)
    )
    found = list(latest(measured, "workload", "method").values())
    if not found:
        return ""
    lines = [
        [
            f"`{row['workload']}`",
            row["method"],
            *(f"{row[name]['stored_bytes'] / row[name]['unique_bytes']:.3f}" for name in (WITH, WITHOUT)),
            f"{row['stricter']} of {row['decisions']}",
            f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
        ]
        for row in found
        if row["status"] == "ok"
    ]
    header = ("model", "method", "stored, with", "stored, without", "stricter", "step, x with")
    note = (
        "Stored: share of the bytes that autograd holds, with the library and without. Stricter: saved tensors that "
        "need a more exact form without the library. Step: median and range of the ratios of turns."
    )
    return section(table(header, lines), note, conditions(found), reasons(found))


TABLES = {"observers": ("observers", observers_table)}
"""The suite and the table of its block."""
