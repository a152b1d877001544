"""The scheduler against a pretend worker that audits every plan."""

from collections import deque

import numpy as np

from toka.core.admission import POLICIES, Policy
from toka.core.blocks import Ints
from toka.core.hydragen import Groups
from toka.core.limits import Limits
from toka.core.progress import Ended, News
from toka.core.prompt import Prompt
from toka.core.scheduler import Scheduler
from toka.core.sequence import End, Sequence
from toka.sim.worker import PretendWorker, pretend_tokens
from toka.wire import Tokens, decode_to_worker, encode

VOCAB = 64
BOLD = POLICIES["greedy"]
"""Starts whatever fits now, and so must preempt."""


def limits(
    num_blocks: int = 64, page_size: int = 4, max_seqs: int = 8, max_tokens: int = 32, max_ahead: int = 4
) -> Limits:
    return Limits(
        num_blocks=num_blocks,
        page_size=page_size,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        max_ahead=max_ahead,
        max_len=num_blocks * page_size,
    )


def expected(sequence: Sequence) -> list[int]:
    """What a sequence must generate, whatever happens on the way."""
    count = sequence.limit
    positions = len(sequence.prompt) + np.arange(count)
    ids: list[int] = pretend_tokens(
        np.full(count, sequence.seed), np.full(count, sequence.choice), positions, VOCAB
    ).tolist()
    for index, token in enumerate(ids):
        if token in sequence.stops:
            return ids[: index + 1]
    return ids


class Replica:
    """Plans go through the wire's bytes; results wait in `results` until `land` takes one in."""

    def __init__(self, sizes: Limits, policy: Policy | None = None, groups: Groups | None = None) -> None:
        self.scheduler = Scheduler(sizes, epoch=7, policy=policy, groups=groups)
        self.worker = PretendWorker(
            max_slots=sizes.max_seqs,
            num_blocks=sizes.num_blocks,
            page_size=sizes.page_size,
            vocab_size=VOCAB,
            audit=True,
        )
        self.results: deque[Tokens] = deque()
        self.busy = 0.001
        """Seconds that the worker says a step took."""
        self.seen: dict[Sequence, list[int]] = {}
        self.ends: dict[Sequence, End] = {}
        self.prefilled = 0
        """Prompt tokens that were run."""
        self._made = 0

    def sequence(
        self,
        prompt_len: int,
        limit: int,
        *,
        stops: tuple[int, ...] = (),
        watched: bool = False,
        prompt: Prompt | None = None,
        family: int | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> Sequence:
        """Submit one. Prompts of one family begin alike, for two thirds of their length."""
        self._made += 1
        ids: Ints = (np.arange(prompt_len, dtype=np.int32) * 31 + self._made * 7) % VOCAB
        if family is not None:
            shared = prompt_len * 2 // 3
            ids[:shared] = (np.arange(shared) * 5 + family) % VOCAB
        sequence = Sequence(
            prompt or Prompt(ids),
            limit=limit,
            stops=stops,
            watched=watched,
            seed=self._made,
            priority=priority,
            tenant=tenant,
        )
        self.scheduler.submit(sequence)
        self.seen[sequence] = []
        return sequence

    def plan(self) -> bool:
        """Plan one step and run it on the worker; its results are in flight afterwards."""
        plan = self.scheduler.plan()
        self.scheduler.check()
        if plan is None:
            return False
        read = decode_to_worker(encode(plan))
        assert read == plan
        assert plan.chunks or plan.decode != b"", "an empty plan"
        self.prefilled += int(np.frombuffer(plan.chunks, "<i4").reshape(-1, 3)[:, 2].sum())
        tokens = self.worker.run(plan)
        self.results.append(Tokens(epoch=7, step=tokens.step, ids=tokens.ids, busy=self.busy))
        return True

    def land(self) -> bool:
        """Take in the oldest results in flight."""
        if not self.results:
            return False
        progress = self.scheduler.apply(self.results.popleft())
        self.scheduler.check()
        for item in progress.news:
            self._news(item)
        for over in progress.ended:
            self._ended(over)
        return True

    def _news(self, news: News) -> None:
        assert news.sequence not in self.ends, "news after the end"
        self.seen[news.sequence].append(news.token)
        if news.end:
            self.ends[news.sequence] = news.end

    def _ended(self, over: Ended) -> None:
        assert over.sequence not in self.ends, "two ends"
        self.seen[over.sequence] = over.tokens.tolist()
        self.ends[over.sequence] = over.end

    def run(self, steps: int = 100_000) -> None:
        """Until nothing is left to do; a scheduler that stands still is an error."""
        for _ in range(steps):
            planned = self.plan()
            if not planned and not self.land():
                break
        assert not self.scheduler.waiting, f"{self.scheduler!r} stands still"
        assert not self.scheduler.running
        assert self.scheduler.pool.available == self.scheduler.limits.num_blocks
