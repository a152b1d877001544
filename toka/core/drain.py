"""How long will those who wait take to start? The queue is played through, coarsely, from the predictions there are.

A sequence is taken to hold, for as long as it runs, the blocks that it has half-way: those who run together are at
different places. Prompts are prefilled one after the other in what the running ones leave of a step. Whoever stands
first starts first. Prefixes that are cached are not looked for, but samples of one prompt prefill it once.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from toka.core.limits import Limits

LOOK = 1024
"""Sequences of the queue that are played through. Those behind them are taken to go on at the same rate."""


class Turn(NamedTuple):
    """What a sequence that waits will need."""

    fill: int
    """Tokens to prefill, and then to keep, but for those that somebody else answers for."""
    steps: int
    """Tokens that it is predicted to generate."""


def steps_to_start(
    limits: Limits,
    ends: list[tuple[float, float]],
    free: int,
    turns: Iterable[Turn],
    waiting: int,
    unfilled: int,
    newcomer: Turn,
) -> float:
    """Steps until a sequence that comes now starts, behind `waiting` others, the first of which need `turns`.

    `ends`: of each running sequence, the steps until its predicted end and the blocks that it gives back then; `free`:
    blocks that nobody uses; `unfilled`: tokens still to be prefilled for those that run.
    """
    heapq.heapify(ends)
    slots, blocks = limits.max_seqs - len(ends), float(free)
    now = filled = 0.0
    filled += unfilled / max(limits.max_tokens - len(ends), 1)
    looked, behind = 0, 0.0

    def start(turn: Turn) -> float:
        nonlocal slots, blocks, now, filled
        need = limits.blocks_for(turn.fill + turn.steps // 2)
        while ends and (slots < 1 or blocks < need):
            end, given = heapq.heappop(ends)
            now = max(now, end)
            slots += 1
            blocks += given
        begun = filled = max(filled, now)
        filled += turn.fill / max(limits.max_tokens - len(ends), 1)
        slots -= 1
        blocks -= need
        heapq.heappush(ends, (filled + turn.steps, float(need)))
        return begun

    for turn in turns:
        behind = start(turn)
        looked += 1
    if looked and waiting > looked:
        return max(behind, start(newcomer)) * waiting / looked
    return start(newcomer)
