"""How much of the queue a tenant may fill, and when there is room again."""

import math

from toka.core.queue import Queue
from toka.core.scheduler import Scheduler
from toka.errors import RateLimited

HOLDS = 1.0
"""Seconds for which an estimate is good enough: to make one takes milliseconds."""


class Room:
    """Bounds for what waits, each tenant's by itself; None: no bound."""

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        """`tokens`: of prompts."""
        self._requests = requests
        self._tokens = tokens
        self._seen: dict[str, tuple[float, float]] = {}
        """Of each tenant that was refused when that was last looked at, and when a request of then would start."""

    def full(self, queue: Queue, tenant: str) -> bool:
        """Nothing more of the tenant is taken."""
        held = queue.held(tenant)
        over = self._requests is not None and held.requests >= self._requests
        return over or (self._tokens is not None and held.tokens >= self._tokens)

    def refusal(self, scheduler: Scheduler, tenant: str, now: float) -> RateLimited:
        """What to tell a tenant whose queue is full. `now`: seconds of any clock that does not go back."""
        held = scheduler.queue.held(tenant)
        asked, when = self._seen.get(tenant, (-math.inf, 0.0))
        if now >= asked + HOLDS:
            when = now + scheduler.until_start(held.tokens // max(held.sequences, 1), 1, tenant)
            self._seen[tenant] = (now, when)
        seconds = max(math.ceil(when - now), 1)
        return RateLimited(
            f"{held.requests} requests of yours with {held.tokens} prompt tokens are waiting, and no more are taken. "
            f"Try again in about {seconds} seconds.",
            retry_after=seconds,
        )
