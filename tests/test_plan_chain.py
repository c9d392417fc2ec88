"""The solver of the planner against enumeration, on random chains of blocks."""

from __future__ import annotations

import itertools
import random

import pytest

from pyactcomp.plan.chain import Chain, Choice, solve

CHAINS = 400
MIB = 1 << 20


def _block(draw: random.Random, kinds: int) -> tuple[Choice, ...]:
    whole = draw.randrange(20, 400) * MIB
    out = draw.randrange(2, 20) * MIB
    ranges = (
        ("keep", (0.0, 0.0), (1.0, 1.0), (0.1, 0.6)),
        ("int8", (0.0, 2e-3), (0.15, 0.35), (0.2, 0.7)),
        ("checkpoint", (1e-3, 5e-3), (0.0, 0.0), (1.0, 1.5)),
        ("int8+checkpoint", (1e-3, 6e-3), (-0.01, 0.0), (1.0, 1.6)),
    )
    return tuple(
        Choice(
            name,
            draw.uniform(*seconds),
            max(out + int(whole * draw.uniform(*stored)), 1),
            int(whole * draw.uniform(0, 1.3)),
            int(whole * draw.uniform(*backward)),
        )
        for name, seconds, stored, backward in ranges[:kinds]
    )


def _chain(draw: random.Random, length: int, kinds: int, equal: bool) -> Chain:
    first = _block(draw, kinds)
    blocks = tuple(first if equal else _block(draw, kinds) for _ in range(length))
    return Chain(draw.randrange(100, 2000) * MIB, blocks, fixed=draw.randrange(0, 2500) * MIB, change=20e-6)


def _every(chain: Chain) -> list[tuple[int, float, tuple[int, ...]]]:
    ranges = (range(len(block)) for block in chain.blocks)
    return [(chain.peak(picks), chain.cost(picks), picks) for picks in itertools.product(*ranges)]


def test_plan_costs_as_little_as_the_best_of_all() -> None:
    draw = random.Random(0)
    infeasible = 0
    for _ in range(CHAINS):
        chain = _chain(draw, draw.randrange(2, 7), draw.randrange(2, 5), draw.random() < 0.5)
        every = _every(chain)
        low, high = min(every)[0], chain.peak([0] * len(chain.blocks))
        assert chain.smallest() == low
        budget = int(low + draw.uniform(-0.05, 1) * (high - low))
        picks = solve(chain, budget)
        within = [cost for peak, cost, _ in every if peak <= budget]
        if picks is None:
            infeasible += 1
            assert not within
            continue
        assert chain.peak(picks) <= budget
        # Sums of the same numbers in the same order.
        assert chain.cost(picks) == pytest.approx(min(within), rel=1e-12, abs=1e-15)
    assert 0 < infeasible < CHAINS / 10  # both sides were met


def test_more_budget_never_costs_more() -> None:
    draw = random.Random(1)
    for equal in (False, True):
        chain = _chain(draw, 12, 4, equal)
        low, high = chain.smallest(), chain.peak([0] * 12)
        assert solve(chain, low - 1) is None
        costs = []
        for step in range(21):
            picks = solve(chain, low + (high - low) * step // 20)
            assert picks is not None
            costs.append(chain.cost(picks))
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] == 0.0  # all blocks are kept


def test_equal_plans_are_told_apart_by_their_runs() -> None:
    # Two of the blocks must be packed, any two: the plan packs neighbours.
    block = (Choice("keep", 0.0, 100, 0, 0), Choice("int8", 1e-3, 20, 0, 0))
    picks = solve(Chain(0, (block,) * 6, change=1e-6), 6 * 100 - 2 * 80)
    assert picks is not None
    assert picks.count(1) == 2
    assert sum(a != b for a, b in itertools.pairwise(picks)) == 1


def test_early_blocks_run_again_where_the_last_has_no_room_to() -> None:
    # Backward of the first block finds the memory of the others free: it may run again at no price in bytes.
    block = (Choice("keep", 0.0, 100, 0, 10), Choice("checkpoint", 1e-3, 0, 0, 110))
    assert solve(Chain(0, (block,) * 4), 310) == [1, 0, 0, 0]
