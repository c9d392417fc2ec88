"""Suite `breadth`: does it hold on every architecture? One step of tiny models of all that the libraries have.

Each pair of an architecture and a head is measured in a process of its own, forked from one that has the libraries
imported: a crash or an endless forward costs one row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from . import breadth_report
from .breadth_measure import NOT_BUILT, measure
from .breadth_models import LIBRARIES, Pair, pairs
from .breadth_pool import Failed, results
from .rows import Options, Row, Store, provenance

LIMIT_S = 60.0
FINAL = ("ok", NOT_BUILT)
"""A row with one of these is a result; errors, crashes and time-outs are tried again by the next run."""
KEY = ("library", "architecture", "head")
PRELOAD = {
    "transformers": ("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "diffusers": ("diffusers", "diffusers.models"),
    "torch_geometric": ("torch_geometric.nn",),
}
"""Modules that the processes of a library's pairs share."""


class UnknownPairError(ValueError):
    """``--only`` names no pair."""


def selected(only: Sequence[str], everything: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that ``--only LIB/architecture/head`` names; the later parts may be left out.

    Raises
    ------
    UnknownPairError
        If there is none.
    """
    if not only:
        return list(everything)
    wanted = [tuple(name.split("/")) for name in only]
    keys = [(pair, (pair.library, pair.architecture, pair.head)) for pair in everything]
    found = [pair for pair, key in keys if any(key[: len(parts)] == parts for parts in wanted)]
    if not found:
        raise UnknownPairError(f"no pair is named {', '.join(only)}; give LIBRARY, LIBRARY/architecture or all three")
    return found


def measured(store: Store) -> set[Pair]:
    """Return the pairs that have a result at this commit, from these sources, on this device."""
    same = ("commit", "sources", "device")
    return {
        Pair(row["library"], row["architecture"], row["head"])
        for row in store.rows()
        if row["status"] in FINAL and all(row["origin"][name] == store.origin[name] for name in same)
    }


def _measure_all(pairs: Sequence[Pair], options: Options, limit_s: float, workers: int) -> Iterator[Row]:
    """Yield the row of each pair as it is measured, until there is no time left for another."""
    longest = 0.0
    jobs = (pair for pair in pairs if options.budget.allows(longest))
    libraries = dict.fromkeys(pair.library for pair in pairs)
    preload = (measure.__module__, *(module for library in libraries for module in PRELOAD[library]))
    for pair, result in results(jobs, measure, limit_s=limit_s, workers=workers, preload=preload):
        row = {"status": result.kind, "reason": result.reason} if isinstance(result, Failed) else result
        longest = max(longest, row.get("seconds", 0.0))
        yield {"library": pair.library, "architecture": pair.architecture, "head": pair.head, **row}


def run(options: Options, limit: int | None = None, workers: int = 1, limit_s: float = LIMIT_S) -> None:
    """Measure what is missing for these sources, at most ``limit`` pairs."""
    # The processes are many, and their models tiny.
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    store = Store(options.out / "breadth.json", provenance("cpu"), KEY)
    libraries = [name for name in LIBRARIES if not options.only or any(o.split("/")[0] == name for o in options.only)]
    chosen = selected(options.only, pairs(libraries))
    done = set() if options.again else measured(store)
    left = [pair for pair in chosen if pair not in done][:limit]
    for row in _measure_all(left, options, limit_s, workers):
        store.append(row)
        tell(row)
    if found := [row for row in store.rows() if row["origin"]["sources"] == store.origin["sources"]]:
        print(breadth_report.summary(found))


def tell(row: Row) -> None:
    """Print one line about a row."""
    figures = "  ".join(f"{name} {row[name]}" for name in (*breadth_report.FIGURES, "seconds") if name in row)
    where = f"{row['library']}/{row['architecture']}/{row['head']}"
    print(f"breadth {where:60} {row['status']:9} {figures}{row.get('reason', '')}", flush=True)
