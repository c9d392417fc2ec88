"""Finds the best plan for a budget: measures, solves, simulates the plan, and solves again with the difference."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..config import Mode
from ..errors import PyactcompError
from ..estimate.process import Child
from ..estimate.result import ModeEstimate, Question, Recorded
from ..layout import OFFLOAD, Layout
from ..sizes import size_text
from .chain import Chain, solve
from .result import Plan
from .tables import Table, chain_of, roofline, shared_out, table_of

# Each round simulates a plan. Three find the budget's last percent in nearly all cases.
_ROUNDS = 6
_Key = tuple[Mode | None, bool]
# The modes of a chain, and whether stored bytes leave: then a window of them stays, and is larger in the first step.
_KEYS: tuple[_Key, ...] = ((None, False), ("lossless", False), ("int8", False), ("lossless", True), ("int8", True))


_CUDNN = 0.03
"""Share of the budget kept free for the workspaces of cuDNN's convolutions, which no operator shows: they made a
U-Net's peak up to 2.0 % higher than simulated on an H200 (bench/results/plan.json)."""


class Planner:
    """Measures layouts of one model's blocks, each once, and finds the best.

    ``host`` is what the host can pin, in bytes; None where the training runs on another one.
    """

    def __init__(
        self,
        child: Child,
        question: Question,
        choices: tuple[str, ...],
        fuse_head: bool,
        tell: Callable[[str], object],
        steps: Mapping[str, float] | None = None,
        host: int | None = None,
    ) -> None:
        self._child, self._question, self._card, self._fuse_head = child, question, question.gpu, fuse_head
        self._tell, self._steps, self._host = tell, steps, host
        self._runs: dict[Layout, tuple[Recorded, ModeEstimate]] = {}
        self._kept, _ = self._run(Layout(None, ()), "keep")
        self._names = [each.name for each in self._kept.blocks]
        if not self._names:
            raise PyactcompError(
                "the model has no blocks to plan: modules of one class, with children of their own, in a ModuleList or "
                "Sequential, that a step runs once and trains"
            )
        self._choices = choices

    def _run(self, layout: Layout, what: str) -> tuple[Recorded, ModeEstimate]:
        from ..estimate.recorded import estimated  # the replay needs the native module, which compression does not

        if layout not in self._runs:
            self._tell(what)
            recorded = self._child.record(layout, self._question.batch or 1, self._question.seq)
            self._runs[layout] = recorded, estimated(recorded, what, self._card)
        return self._runs[layout]

    def peak(self, layout: Layout) -> int:
        """Return the peak of a training by a layout, in bytes."""
        return _peak(self._run(layout, "simulating the plan")[1])

    def layout(self, mode: Mode | None, choices: Sequence[str]) -> Layout:
        """Return the layout of these choices, in the order of the blocks."""
        if mode is None and set(choices) == {"keep"}:
            return Layout(None, ())
        blocks = tuple(zip(self._names, choices, strict=True))
        return Layout(mode, blocks, self._fuse_head and mode == "int8")

    def _uniform(self, mode: Mode | None, choice: str) -> Table:
        layout = self.layout(mode, [choice] * len(self._names))
        recorded, _ = self._run(layout, choice if mode in (None, choice) else f"{choice}, the rest {mode}")
        table = table_of(recorded)
        if table.names != tuple(self._names):
            raise PyactcompError(f"with {choice} the blocks ran in another order: {table.names} after {self._names}")
        return table

    @functools.cached_property
    def chains(self) -> dict[_Key, Chain]:
        """Return the chain of blocks of each mode, without offload and with it; a model has one mode."""
        kept = self._uniform(None, "keep")
        chains: dict[_Key, Chain] = {}
        for mode, offloads in _KEYS:
            coded = [c for c in self._choices if mode and c.startswith(mode) and c.endswith(OFFLOAD) <= offloads]
            suits = [c for c in self._choices if c in ("keep", "checkpoint") or c in coded]
            if not suits or (mode and not any(c.endswith(OFFLOAD) == offloads for c in coded)):
                continue
            # In lossless mode the rest of the model stores as much whatever the blocks do: keep and checkpoint take the
            # tables that were recorded without compression.
            tables = {c: self._uniform(mode if mode == "int8" or c in coded else None, c) for c in suits}
            if self._steps is not None:
                chain = chain_of(tables, shared_out(self._kept, self._steps), 0.0)
                chains[mode, offloads] = self._within_host(mode, chain)
                continue
            alike: dict[str, Table] = {mode: self._uniform(mode, mode)} if mode and offloads else {}
            seconds = roofline(self._kept, {"keep": kept, **alike, **tables}, self._card)
            saved = max(kept.base - min(each.base for each in tables.values()), 0)
            chain = chain_of(tables, seconds, 2 * saved / self._card.bandwidth)
            chains[mode, offloads] = self._within_host(mode, chain)
        return chains

    def _within_host(self, mode: Mode | None, chain: Chain) -> Chain:
        """Return a chain in which as many blocks may offload, the first ones, as the host can pin the bytes of."""
        names, count = [choice.name for choice in chain.blocks[0]], len(chain.blocks)
        leaves, stays = ([name for name in names if name.endswith(OFFLOAD) == ends] for ends in (True, False))

        def pins(first: int) -> int:
            return self._pinned(self.layout(mode, leaves[:1] * first + stays[:1] * (count - first)))

        if self._host is None or not leaves or pins(count) <= self._host:
            return chain
        if not stays:
            raise PyactcompError(f"all choices offload{self._short_host()}: name another choice too, such as keep")
        may = bisect_right(range(1, count), self._host, key=pins)
        blocks = (
            tuple(choice for choice in block if i < may or not choice.name.endswith(OFFLOAD))
            for i, block in enumerate(chain.blocks)
        )
        return replace(chain, blocks=tuple(blocks))

    def _pinned(self, layout: Layout) -> int:
        return self._run(layout, "simulating the host's memory")[1].pinned

    def within(self, budget: int) -> Plan:
        """Return the plan for a budget."""
        limit = int(budget * self._seen)
        _, kept = self._run(Layout(None, ()), "keep")
        if "keep" in self._choices and _peak(kept) <= limit and self._steps is None:  # nothing is estimated faster
            return self._plan(budget, Layout(None, ()), self._kept_seconds)
        chains = self.chains
        found: dict[Layout, float] = {}
        # What the chains do not see: ends of blocks of memory, and where choices meet.
        miss = dict.fromkeys(chains, 0)
        for key, chain in chains.items():
            names = [[choice.name for choice in block] for block in chain.blocks]
            for name in names[0]:
                ran = self.layout(key[0], [name] * len(self._names)) in self._runs
                if ran and all(name in each for each in names):
                    same = [each.index(name) for each in names]
                    peak = self._consider(limit, key[0], chain, same, found)
                    miss[key] = max(miss[key], peak - chain.peak(same))
        for _ in range(_ROUNDS):
            solved = [(key, solve(chain, limit - miss[key])) for key, chain in chains.items()]
            best = min(
                ((chains[key].cost(picks), index) for index, (key, picks) in enumerate(solved) if picks is not None),
                default=None,
            )
            if best is None:
                break
            key, picks = solved[best[1]]
            assert picks is not None
            peak = self._consider(limit, key[0], chains[key], picks, found)
            more = peak - chains[key].peak(picks)
            if more == miss[key]:
                break
            miss[key] = more
        if not found:
            for (mode, _), chain in chains.items():
                self._consider(limit, mode, chain, _smallest(chain), found)
        if not found:
            smallest = self.smallest()
            raise PyactcompError(
                f"no plan is within the budget of {size_text(budget)}: the smallest budget that has one is "
                f"{smallest} bytes ({size_text(smallest)}); a smaller batch or an 8-bit optimizer needs less"
                f"{self._short_host()}"
            )
        layout = min(found, key=lambda each: found[each])
        return self._plan(budget, layout, found[layout])

    @property
    def _kept_seconds(self) -> float:
        if self._steps is not None:
            return self._steps["keep"]
        return sum(sum(each.seconds) for each in self._kept.blocks)

    def _consider(
        self, limit: int, mode: Mode | None, chain: Chain, picks: Sequence[int], found: dict[Layout, float]
    ) -> int:
        """Run the choices with these indices, note them with their cost if they fit, and return the peak."""
        layout = self.layout(mode, [block[pick].name for block, pick in zip(chain.blocks, picks, strict=True)])
        peak = self.peak(layout)
        if peak <= limit and self._suits_host(layout):
            found[layout] = chain.cost(picks)
        return peak

    def _suits_host(self, layout: Layout) -> bool:
        return self._host is None or self._pinned(layout) <= self._host

    def _short_host(self) -> str:
        """Return what the host cannot pin, as a clause of a sentence; empty where it can pin all."""
        pinned = max(map(self._pinned, list(self._runs)))
        if self._host is None or pinned <= self._host:
            return ""
        return f"; offload of all blocks pins {size_text(pinned)}, and the host has room for {size_text(self._host)}"

    def smallest(self) -> int:
        """Return the smallest budget that has a plan: the least peak of all that ran, and of the smallest plans."""
        for (mode, _), chain in self.chains.items():
            self._consider(0, mode, chain, _smallest(chain), {})
        return math.ceil(min(self.peak(each) for each in self._runs if self._suits_host(each)) / self._seen)

    @property
    def _seen(self) -> float:
        """The part of a budget that the simulated peak may take."""
        return 1 - _CUDNN if self._kept.convolves else 1.0

    def _plan(self, budget: int, layout: Layout, seconds: float) -> Plan:
        _, estimate = self._runs[layout]
        _, kept = self._runs[Layout(None, ())]
        return Plan(
            mode=layout.mode,
            blocks=layout.blocks or tuple((name, "keep") for name in self._names),
            fuse_head=layout.fuse_head,
            budget=budget,
            peak=_peak(estimate),
            reserved=estimate.peak_reserved,
            kept_peak=_peak(kept),
            seconds=seconds,
            kept_seconds=self._kept_seconds,
            measured=self._steps is not None,
            pinned=estimate.pinned,
            gpu=self._card.name,
        )


def _smallest(chain: Chain) -> list[int]:
    """Return the indices of the choices with the smallest peak."""
    picks = solve(chain, chain.smallest())
    assert picks is not None
    return picks


def _peak(estimate: ModeEstimate) -> int:
    return max(estimate.peak_allocated, estimate.first_step)
