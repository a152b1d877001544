"""The real scheduler on a virtual clock: nothing waits, the time of the next event is the time.

An event is a request that arrives or the results of a step. Each replica has a scheduler and a device that runs its
plans in order; when a plan's results will be in is known as soon as it is sent. Engines are processes that do one thing
at a time, each for a share of the replicas.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from toka.core.admission import Policy
from toka.core.fleet import Fleet
from toka.core.hydragen import Groups
from toka.core.ledger import Ledger
from toka.core.limits import Limits
from toka.core.prompt import Prompt
from toka.core.scheduler import Scheduler
from toka.core.sequence import BATCH, Sequence
from toka.errors import ConfigError
from toka.sim.cost import Costs
from toka.sim.device import NO_END, STOP_ID, Device, Longs, Sampled
from toka.sim.meter import Meter, State
from toka.sim.workload import Floats, Workload
from toka.wire import Tokens

TURN = 64
"""Requests that an engine takes in before it looks after its replicas again."""


class Hydragen(NamedTuple):
    """When sequences are a group."""

    min_prefix: int
    """Tokens that they share."""
    min_size: int
    """How many they are."""

    def groups(self, page_size: int) -> Groups:
        """Those of one replica, none yet."""
        return Groups(max(-(-self.min_prefix // page_size), 1), self.min_size)


class Setup(NamedTuple):
    """What runs the workload."""

    costs: Costs
    limits: Limits
    """Of each replica."""
    policy: Policy
    hydragen: Hydragen | None = None
    """None: prefixes are read by each sequence for itself."""
    replicas: int = 1
    engines: int = 1
    """Processes; replica i belongs to engine i modulo this."""
    weights: Mapping[str, float] = {}
    """By tenant; of others 1."""


class Totals(NamedTuple):
    """What the schedulers counted, over all replicas."""

    preemptions: int
    cached: int
    """Prompt tokens that sequences found in the prefix cache when they first started."""
    busy: float
    """Seconds that devices worked."""
    engine_busy: float
    """Seconds that engines worked."""
    through: float
    """When the last device had done all that was sent to it."""


class Replica:
    """A scheduler, and the device that runs its plans."""

    __slots__ = ("device", "engine", "free_at", "index", "scheduler", "sent", "state")

    def __init__(self, index: int, engine: int, scheduler: Scheduler, device: Device) -> None:
        self.index = index
        self.engine = engine
        self.scheduler = scheduler
        self.device = device
        self.free_at = 0.0
        """When the device has done all that was sent to it."""
        self.sent: deque[tuple[int, float, Sampled]] = deque()
        """Steps whose results are not in: step, seconds on the device, what it sampled."""
        self.state = State()

    def measure(self) -> State:
        """Its state now."""
        scheduler = self.scheduler
        pool = scheduler.pool
        return State(pool.num_blocks - pool.available, scheduler.running, scheduler.waiting)


class Simulation:
    """One run. `run` it once, then read `meter` and `totals`."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        """Raises ConfigError for a request that no replica could hold."""
        limits = setup.limits
        if workload.longest - 1 > min(limits.num_blocks * limits.page_size, limits.max_len):
            raise ConfigError(
                f"the longest request may take {workload.longest - 1} tokens, and a replica holds "
                f"{limits.num_blocks * limits.page_size}: give more num_blocks, or shorter requests"
            )
        sequences = workload.requests * workload.samples
        most = np.repeat(workload.limit, workload.samples)
        ends = np.where(workload.output < most, workload.output, NO_END).astype(np.int64)
        computed = np.zeros(sequences, dtype=np.int64)
        self.meter = Meter(sequences)
        self.workload = workload
        self.setup = setup
        self._cached = 0
        self._busy = 0.0
        self._engine_busy = 0.0
        hydragen = setup.hydragen
        self._fleet = Fleet(
            setup.replicas,
            limits,
            policy=setup.policy,
            groups=(lambda: hydragen.groups(limits.page_size)) if hydragen else None,
            ledger=Ledger(setup.weights),
        )
        self._replicas = [
            Replica(index, index % setup.engines, scheduler, Device(limits.max_seqs, limits.page_size, ends, computed))
            for index, scheduler in enumerate(self._fleet.schedulers)
        ]
        self._engine_free = [0.0] * setup.engines
        self._open: Longs = np.full(workload.requests, workload.samples, dtype=np.int64)
        self._events: list[tuple[float, int, int]] = []
        """A heap of (time, order of sending, replica): results come in."""
        self._order = itertools.count()
        self._next = 0
        """The request to be taken in next."""
        self._door = 0.0
        """When the engines have time for it."""
        self._arrival: Floats = workload.arrival
        """When each comes; in a closed loop, infinity until there is room for it."""
        self._let_in = workload.requests
        """Requests whose arrival is known."""
        if workload.concurrency is not None:
            self._let_in = min(workload.concurrency, workload.requests)
            self._arrival = np.where(np.arange(workload.requests) < self._let_in, 0.0, np.inf)

    @property
    def totals(self) -> Totals:
        """Of all replicas."""
        return Totals(
            preemptions=sum(replica.scheduler.preemptions for replica in self._replicas),
            cached=self._cached,
            busy=self._busy,
            engine_busy=self._engine_busy,
            through=max(replica.free_at for replica in self._replicas),
        )

    def run(self) -> None:
        """Until every request is answered."""
        events, requests = self._events, self.workload.requests
        while True:
            due = max(float(self._arrival[self._next]), self._door) if self._next < requests else np.inf
            if events and events[0][0] <= due:
                now, _, index = heapq.heappop(events)
                self._results(now, self._replicas[index])
            elif due < np.inf:
                self._arrive(due)
            else:
                break
        if self._open.any():
            raise RuntimeError(f"{self._fleet!r} stands still")

    def _arrive(self, now: float) -> None:
        """The engines take in those that have come, a turn of them."""
        engines = self.setup.engines
        count = min(int(np.searchsorted(self._arrival, now, side="right")) - self._next, TURN * engines)
        for _ in range(count):
            self._submit(now)
        self._door = now + count / engines * self.setup.costs.engine_request
        self._plan_all(now, self._fleet.dispatch())

    def _submit(self, now: float) -> None:
        """Take in the next request."""
        workload, request = self.workload, self._next
        self._next += 1
        prompt, limit, samples = Prompt(workload.prompt(request)), int(workload.limit[request]), workload.samples
        first = request * samples
        tenant = workload.tenant[request] if workload.tenant else ""
        priority = BATCH if workload.batch and workload.batch[request] else 0
        self.meter.arrived[first : first + samples] = self._arrival[request]
        for number in range(first, first + samples):
            self._fleet.submit(
                Sequence(prompt, limit=limit, stops=(STOP_ID,), seed=number, tenant=tenant, priority=priority)
            )
        self._engine(request % self.setup.engines, now, self.setup.costs.engine_request)

    def _results(self, now: float, replica: Replica) -> None:
        """The oldest step of a replica is done."""
        step, seconds, sampled = replica.sent.popleft()
        at = max(now, self._engine_free[replica.engine])
        self.meter.advance(now)
        tokens = Tokens(epoch=replica.scheduler.epoch, step=step, ids=sampled.ids, busy=seconds)
        progress = self._fleet.apply(replica.index, tokens)
        self.meter.sampled(at, sampled.sequences)
        for over in progress.ended:
            self.meter.ended[over.sequence.seed] = at
            self._cached += over.sequence.cached
            self._over(over.sequence, now)
        self._plan_all(now, self._fleet.dispatch() | {replica.index})
        self._engine(replica.engine, now, self.setup.costs.engine_token * len(sampled.sequences))

    def _over(self, sequence: Sequence, now: float) -> None:
        """A sequence has ended, and perhaps its request."""
        request = sequence.seed // self.workload.samples
        self._open[request] -= 1
        if self._open[request]:
            return
        if self._let_in < self.workload.requests:
            self._arrival[self._let_in] = now
            self._let_in += 1

    def _plan_all(self, now: float, replicas: set[int]) -> None:
        """Send each replica the steps that should be in flight; those that start sequences make room for others."""
        self.meter.advance(now)
        while replicas:
            for index in sorted(replicas):
                self._plan(now, self._replicas[index])
            replicas = self._fleet.dispatch()

    def _plan(self, now: float, replica: Replica) -> None:
        while (plan := self._fleet.plan(replica.index)) is not None:
            sampled = replica.device.run(plan)
            self._send(now, replica, plan.step, sampled)
        after = replica.measure()
        self.meter.change(replica.state, after)
        replica.state = after

    def _send(self, now: float, replica: Replica, step: int, sampled: Sampled) -> None:
        """A plan leaves: when will its results be in?"""
        costs, meter = self.setup.costs, self.meter
        leaves = self._engine(replica.engine, now, costs.engine_step)
        seconds = costs.seconds(sampled.work)
        replica.free_at = max(leaves + costs.round_trip / 2, replica.free_at) + seconds
        replica.sent.append((step, seconds, sampled))
        heapq.heappush(self._events, (replica.free_at + costs.round_trip / 2, next(self._order), replica.index))
        self._busy += seconds
        meter.steps += 1
        meter.rows += sampled.rows
        meter.recomputed += sampled.recomputed

    def _engine(self, engine: int, now: float, seconds: float) -> float:
        """An engine works; returns when it is through."""
        through = max(now, self._engine_free[engine]) + seconds
        self._engine_free[engine] = through
        self._engine_busy += seconds
        return through
