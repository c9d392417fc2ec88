"""``python -m bench SUITE``: measure, and append rows to ``bench/results/SUITE.json``; ``report`` draws from them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .rows import ROOT, Budget, Options

ALLOC_PARTS = ("pair", "threads", "share", "pause", "training", "traces", "prediction")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the JSON files")

    measuring = argparse.ArgumentParser(add_help=False, parents=[shared])
    measuring.add_argument("--budget-s", type=float, help="start no row that would not end within these seconds")
    measuring.add_argument("--only", default="", metavar="WORKLOAD[,METHOD]", help="measure just this")
    measuring.add_argument("--again", action="store_true", help="also measure what is there for this commit")
    measuring.add_argument("--tiny", action="store_true", help="sizes that test the harness, not the code")
    measuring.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")

    training = argparse.ArgumentParser(add_help=False, parents=[measuring])
    training.add_argument("--methods", default="", metavar="A,B,...", help="measure just these methods")

    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    suites = top.add_subparsers(dest="suite", required=True)
    suites.add_parser("codec", parents=[measuring], help="quantise and dequantise against a device copy and the peers")
    suites.add_parser("overhead", parents=[measuring], help="host time of pack and unpack per tensor")
    suites.add_parser("mlp", parents=[measuring], help="one gated MLP at 8k to 128k tokens, in tiles and at once")
    suites.add_parser("scaling", parents=[measuring], help="CPU time against size: readers, replays, the allocator")
    frontier = suites.add_parser("frontier", parents=[training], help="training steps: time, memory, gradients")
    frontier.add_argument(
        "--set", choices=("all", "tuned", "untuned"), default="all", help="of the models that ours is tuned on, or not"
    )
    batch = suites.add_parser("batch", parents=[training], help="throughput against batch size under a memory cap")
    batch.add_argument("--memory-gib", type=float, help="the cap, by default 24")
    alloc = suites.add_parser("alloc", parents=[training], help="the allocator: its cost, trainings, recorded traces")
    alloc.add_argument("--parts", default="", metavar="A,B,...", help=f"of {', '.join(ALLOC_PARTS)}; default: all")
    pairs = suites.add_parser("pairs", parents=[training], help="this tree against an earlier one, in turns")
    pairs.add_argument("--before", type=Path, required=True, metavar="PATH", help="the earlier tree, built")
    pairs.add_argument("--pairs", type=int, metavar="N", help="turns of each tree, by default 5")
    holds = suites.add_parser("holds", parents=[training], help="two trainings, vanilla and compressed, in pairs")
    holds.add_argument("--seeds", type=int, help="pairs, by default the 5 that the report's bound needs")
    holds.add_argument("--workers", type=int, help="trainings at a time on the device, by default 5, on a CPU 1")
    suites.add_parser("sharded", parents=[measuring], help="steps of a model sharded over two GPUs, block by block")
    breadth = suites.add_parser("breadth", parents=[measuring], help="one step of tiny models of every architecture")
    breadth.add_argument("--limit", type=int, metavar="N", help="measure at most N pairs")
    breadth.add_argument("--workers", type=int, default=1, help="pairs at a time, each with one thread")
    breadth.add_argument("--limit-s", type=float, help="seconds that one pair may take")
    context = suites.add_parser("context", parents=[training], help="language models of 8 B: the longest sequence")
    context.add_argument("--memory-gib", type=float, help="the cap, by default 80")
    estimate = suites.add_parser("estimate", parents=[measuring], help="estimated peaks against measured ones")
    estimate.add_argument("--measure", action="store_true", help="measure the pairs, on a GPU")
    suites.add_parser("plan", parents=[measuring], help="plans under budgets: their peaks and steps on a GPU")
    report = suites.add_parser("report", parents=[shared], help="tables and plots, from the JSON files alone")
    report.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file whose bench blocks are filled")
    report.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the plots")
    report.add_argument("--against", type=Path, metavar="FILE", help="an earlier breadth.json: whose ratios got worse")
    return top


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one suite; return the exit code."""
    top = parser()
    args = top.parse_args(arguments)
    if args.suite == "report":
        from . import report

        report.run(args.out, args.readme, args.docs, args.against)
        return 0

    import torch

    from . import (
        alloc,
        alloc_methods,
        batch,
        breadth,
        codec,
        context,
        estimate,
        frontier,
        holds,
        mlp,
        overhead,
        pairs,
        plan,
        scaling,
        sharded,
    )
    from .context_methods import METHODS as CONTEXT_METHODS
    from .methods import METHODS
    from .workloads import WORKLOADS

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        top.error("--device cuda: torch finds no GPU here; use --device cpu or leave it out")
    options = Options(args.out.resolve(), device, Budget(args.budget_s), _names(args.only), args.again, args.tiny)
    if args.suite in ("frontier", "batch", "pairs"):
        methods = _names(args.methods)
        known = [
            name
            for name, method in METHODS.items()
            if args.suite == "frontier" or (method.timed if args.suite == "batch" else method.ours and method.timed)
        ]
        if unknown := set(methods) - set(known):
            top.error(f"unknown method {sorted(unknown)}; known: {', '.join(known)}")
        workloads = (*WORKLOADS, overhead.CHAIN, pairs.ODD) if args.suite == "pairs" else tuple(WORKLOADS)
        if options.only and options.only[0] not in workloads:
            top.error(f"unknown workload {options.only[0]!r}; known: {', '.join(workloads)}")
    if args.suite == "holds":
        for kind, given, known in (("arm", _names(args.methods), holds.ARMS), ("task", options.only[:1], holds.TASKS)):
            if unknown := set(given) - set(known):
                top.error(f"unknown {kind} {sorted(unknown)}; known: {', '.join(known)}")
    if args.suite == "context":
        workloads = tuple(dict.fromkeys(job.workload for job in context.plan(replace(options, only=()), (), 0.0)))
        for kind, given, known in (
            ("method", _names(args.methods), CONTEXT_METHODS),
            ("workload", options.only[:1], workloads),
        ):
            if unknown := set(given) - set(known):
                top.error(f"unknown {kind} {sorted(unknown)}; known: {', '.join(known)}")
        if device == "cpu" and not options.tiny:
            top.error(
                "context needs a GPU: a step of 8 billion parameters takes hours on a CPU; --tiny tests the bench"
            )
        context.run(options, _names(args.methods), args.memory_gib or context.MEMORY_GIB)
    elif args.suite == "alloc":
        parts = _names(args.parts) or (ALLOC_PARTS if device == "cuda" else ("traces",))
        for kind, given, known in (
            ("part", parts, ALLOC_PARTS),
            ("method", _names(args.methods), alloc_methods.METHODS),
            ("workload", options.only[:1], alloc.selectable()),
        ):
            if unknown := set(given) - set(known):
                top.error(f"unknown {kind} {sorted(unknown)}; known: {', '.join(known)}")
        if device == "cpu" and parts != ("traces",):
            top.error(f"--parts {args.parts}: only traces can be measured without a GPU")
        alloc.run(options, parts, _names(args.methods))
    elif args.suite == "breadth":
        try:
            breadth.run(options, args.limit, args.workers, args.limit_s or breadth.LIMIT_S)
        except breadth.UnknownPairError as problem:
            top.error(str(problem))
    elif args.suite == "estimate":
        if args.measure and device != "cuda":
            top.error("--measure needs a GPU; without it, estimates are compared with committed measurements")
        estimate.run(options, args.measure)
    elif args.suite == "plan":
        plan.run(options)
    elif args.suite == "codec":
        codec.run(options)
    elif args.suite == "overhead":
        overhead.run(options)
    elif args.suite == "mlp":
        mlp.run(options)
    elif args.suite == "scaling":
        if unknown := set(options.only[:1]) - set(scaling.CASES):
            top.error(f"unknown workload {sorted(unknown)}; known: {', '.join(scaling.CASES)}")
        scaling.run(options)
    elif args.suite == "sharded":
        sharded.run(options)
    elif args.suite == "frontier":
        frontier.run(options, methods, args.set)
    elif args.suite == "pairs":
        if not (args.before / "pyactcomp" / "__init__.py").exists():
            top.error(f"--before {args.before}: no checkout of this project is there")
        pairs.run(options, args.before, methods or ("int8",), args.pairs or pairs.PAIRS)
    elif args.suite == "holds":
        holds.run(options, _names(args.methods), args.seeds or holds.SEEDS, args.workers or holds.workers(device))
    else:
        batch.run(options, methods, args.memory_gib or batch.MEMORY_GIB)
    return 0


if __name__ == "__main__":
    sys.exit(main())
