"""Decides what each step runs, and learns from what came back. The whole state of one replica for one epoch.

The life of a sequence here:

    submit ─▶ waiting ─▶ prefilling ─▶ decoding ─▶ draining ─▶ (gone)
                 ▲            │            │
                 └─ preempt ──┴────────────┘

Plans are made ahead of results: `scheduled` counts the tokens planned, `returned` those come back, and up to
`depth.value` plans are in flight. What makes that safe:

* A result belongs to the row of the roster kept with its plan, never to whoever has the slot now.
* A sequence that reaches its limit gives up slot and blocks as soon as its last step is planned. Others may get them
  in the next plan: steps run in order, so the old writes happen first.
* A sequence that ended unexpectedly (a stop id) may still be in plans in flight. It is draining: their rows are
  dropped, and its seat is freed with the last of them.
* A prompt's full blocks are in the prefix tree as soon as the plan that computes them is sealed: a step writes the keys
  and values of all its tokens before any of them attends, so others may read them in the same step.
* Preemption needs to know where everything stands: when blocks run short, nothing is planned until nothing is in
  flight, and only then is the newest sequence of the tenant that has been served most sent back to the head of its
  line with all the tokens it has made.
"""

from collections import deque
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from toka.core import drain
from toka.core.admission import Admission, Policy
from toka.core.blocks import Ints
from toka.core.books import check
from toka.core.counts import Counts
from toka.core.depth import Depth
from toka.core.forecast import Forecast
from toka.core.hydragen import Groups
from toka.core.ledger import Ledger
from toka.core.limits import Limits
from toka.core.prefill import Prefill
from toka.core.prefix import Named, PrefixTree
from toka.core.progress import Diverged, Ended, Flight, News, Progress, Scored, Work
from toka.core.queue import Queue
from toka.core.seats import NO_SLOT, Flags, Seats
from toka.core.sequence import NO_SEAT, End, Sequence
from toka.wire import NO_TOKEN, Plan, Tokens, pack, unpack

NOBODY: Ints = np.zeros(0, dtype=np.int32)


class Scheduler:
    """One replica's queue, batch and blocks. `plan` and `apply` alternate in any order; neither waits."""

    def __init__(
        self,
        limits: Limits,
        epoch: int = 0,
        key: bytes = b"",
        policy: Policy | None = None,
        groups: Groups | None = None,
        named: Named | None = None,
        counts: Counts | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`key` makes the names of the prefix cache unpredictable. With `groups`, plans say which sequences share a
        prefix. `named` is told of each name that comes to the prefix cache or goes. `counts` and
        `ledger` go on from an epoch before; several replicas may share a ledger."""
        self.limits = limits
        self.epoch = epoch
        self.depth = Depth(limits.max_ahead)
        self.tree = PrefixTree(limits.num_blocks, limits.page_size, key, named)
        self.pool = self.tree.pool
        # Twice as many seats as slots: a full batch may run while another full batch is draining.
        self.seats = Seats(2 * limits.max_seqs, limits.blocks_for(limits.max_len))
        policy = policy or Policy()
        self.forecast = Forecast(limits, self.seats, self.pool.owners, policy.learn)
        self.groups = groups
        self.steps = 0
        self.counts = counts or Counts()
        self.started: list[Sequence] = []
        """Those that took a seat with the last call of `plan`."""
        self.preempted: list[Sequence] = []
        """Those that lost theirs to others with the last call of `plan`."""
        self._arrivals = 0
        self.ledger = ledger or Ledger()
        self._waiting = Queue(self.ledger)
        self._decoding: Ints = NOBODY
        self._prefill = Prefill(
            limits,
            self.seats,
            self.tree,
            self.forecast,
            Admission(limits.num_blocks, policy),
            self._waiting,
            self.ledger,
            self.counts,
        )
        self._released: list[int] = []
        self._flights: deque[Flight] = deque()
        self._sent: bytes = b""

    def __repr__(self) -> str:
        return (
            f"<Scheduler epoch {self.epoch}: step {self.steps}, {self.waiting} waiting, {self.running} running, "
            f"{self.in_flight} in flight, {self.pool!r}>"
        )

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def waiting_batch(self) -> int:
        """Of these, those of the batch lane."""
        return self._waiting.batch

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._prefill.begun) + len(self._decoding)

    @property
    def preemptions(self) -> int:
        """Times that a sequence lost its seat to others."""
        return self.counts.preemptions

    @property
    def in_flight(self) -> int:
        """Plans whose results are not in."""
        return len(self._flights)

    @property
    def unfilled(self) -> tuple[int, list[Sequence]]:
        """Tokens still to be prefilled for the sequences that have begun, and those that have not."""
        seats = self.seats
        begun = int((seats.fill[self._prefill.begun] - seats.filled[self._prefill.begun]).sum())
        return begun, list(self._waiting)

    @property
    def queue(self) -> Queue:
        """Those who wait. It is the scheduler's to change."""
        return self._waiting

    def until_start(self, prompt: int, limit: int, tenant: str = "") -> float:
        """About how many seconds from now a sequence would start that comes now, with a prompt of so many tokens and at
        most `limit` new ones, behind what its tenant has in the queue; 0 before any step has been measured.

        While no lengths are known everybody is taken to use all of max_tokens, which says too long.
        """
        seats, forecast, page = self.seats, self.forecast, self.limits.page_size
        running = [*self._prefill.begun, *self._decoding.tolist()]
        left = np.maximum(seats.end[running] - forecast.usage.now, 0)
        left[seats.batch[running]] = 0  # they give way
        held = seats.blocks[running] + left / (2 * page)
        # What several sequences share is given back once.
        held *= self.pool.used / max(int(seats.blocks[running].sum()), 1)
        turns: list[drain.Turn] = []
        before: Sequence | None = None
        own = behind = 0
        for sequence in islice(self._waiting, drain.LOOK):
            if sequence.priority > 0 and not sequence.vested:
                break
            fill = len(sequence.prompt) + sequence.kept
            if before is not None and before.prompt is sequence.prompt:
                fill -= len(sequence.prompt) // page * page
            turns.append(drain.Turn(max(fill, 1), forecast.left(sequence)))
            before = sequence
            if sequence.tenant == tenant:
                own, behind = own + 1, len(turns)
        waiting = behind
        if len(turns) == drain.LOOK and own:
            # The rest of the tenant's stands among the others as what was seen of it does.
            waiting = max(behind, self._waiting.held(tenant).sequences * len(turns) // own)
        steps = drain.steps_to_start(
            self.limits,
            list(zip(left.tolist(), held.tolist(), strict=True)),
            max(int(self.pool.num_blocks - held.sum()), 0),
            turns[:behind],
            waiting,
            int((seats.fill[self._prefill.begun] - seats.filled[self._prefill.begun]).sum()),
            drain.Turn(prompt, limit),
        )
        return steps * self.depth.pace

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence that has not ended waits or runs here."""
        seat = sequence.seat
        return sequence in self._waiting or (seat >= 0 and self.seats.sequences[seat] is sequence)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence could run to its limit with the cache to itself."""
        limits = self.limits
        return sequence.longest <= limits.max_len and limits.blocks_for(sequence.longest) <= limits.num_blocks

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of its tenant's line in the queue. It must fit."""
        assert self.fits(sequence), f"{sequence} is larger than the KV cache"
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.push(sequence)

    def take(self, sequence: Sequence) -> None:
        """The same for a sequence that has waited in another queue. Its `arrival` is set."""
        assert self.fits(sequence), f"{sequence} is larger than the KV cache"
        self._waiting.push(sequence, moved=True)

    def finish(self, sequence: Sequence, end: End) -> None:
        """End a sequence from outside: cancelled, or stopped by what the engine sees in its text. Harmless after its
        end."""
        if sequence.end:
            return
        sequence.end = end
        if self._waiting.remove(sequence):
            return
        seat = sequence.seat
        self.seats.alive[seat] = False
        self._stop_running(np.array([seat], dtype=np.int32))
        if self.seats.flying[seat] == 0:
            self.seats.leave(seat)

    def abandon(self) -> list[Sequence]:
        """The worker is lost, and this scheduler with it: all sequences that have not ended, in the order in which they
        should go on elsewhere, each with the tokens that came back."""
        seats = self.seats
        running = [seats.who(seat) for seat in seats.taken() if seats.alive[seat]]
        for sequence in running:
            seats.move(sequence.seat)
            sequence.reached = max(sequence.reached, int(seats.length[sequence.seat]))
            sequence.seat = NO_SEAT
            sequence.names = []
        running.sort(key=lambda sequence: (sequence.priority, sequence.arrival))
        return [*running, *self._waiting]

    # Planning

    def plan(self) -> Plan | None:
        """The next step, or None: nothing to run, enough in flight, or results are needed before anything else."""
        if self.started or self.preempted:
            self.started, self.preempted = [], []
        if len(self._flights) >= self.depth.value:
            return None
        self.forecast.advance(self.steps)
        if not self._grow() or not self._give_way():
            return None
        decoding = self._decoding
        self.forecast.look(decoding)
        appended = self._append(decoding)
        chunks, chunked, filled, admitted, self.started = self._prefill.fill(
            self.limits.max_tokens - len(decoding), decoding
        )
        roster = np.concatenate([filled, decoding]) if len(filled) else decoding
        if not chunks and not len(decoding):
            return None

        groups, members = self.groups.news() if self.groups else ([], [])
        rows = self.seats.slot[decoding].astype("<i4").tobytes()
        plan = Plan(
            epoch=self.epoch,
            step=self.steps,
            releases=np.array(self._released, dtype="<i4").tobytes(),
            admits=admitted,
            appends=appended,
            chunks=np.array(chunks, dtype="<i4").tobytes(),
            decode=None if rows == self._sent else rows,
            groups=groups,
            members=pack(chain.from_iterable((int(self.seats.slot[seat]), group) for seat, group in members)),
        )
        self._sent = rows
        self._released = []
        prefilled = sum(count for _, _, count in chunks)
        self._flights.append(Flight(self.steps, roster, chunked, prefilled, len(filled)))
        if self.groups and len(decoding):
            self.counts.shared += self.groups.shared * self.limits.page_size
        self.steps += 1
        self._advance(filled, decoding)
        return plan

    def _grow(self) -> bool:
        """See that every decoding sequence can get the block it needs; False: not before what is in flight is in."""
        while len(self._short(self._decoding)) > self.pool.available:
            if self._flights:
                return False
            self._preempt([*self._prefill.begun, *self._decoding.tolist()])
        return True

    def _give_way(self) -> bool:
        """If somebody found no room in the last step while the batch lane holds some, make the batch lane smaller by
        one sequence; False: not before what is in flight is in."""
        if not self._prefill.crowded:
            return True
        seats = np.concatenate([np.array(self._prefill.begun, dtype=np.int32), self._decoding])
        batch = seats[self.seats.batch[seats]]
        if len(batch) and self._flights:
            return False
        if len(batch):
            self._preempt(batch.tolist())
        self._prefill.crowded = False
        return True

    def _short(self, seats: Ints) -> Ints:
        """Those of `seats` whose next token starts a block that they do not own yet."""
        short: Ints = seats[self.seats.length[seats] == self.seats.blocks[seats] * self.limits.page_size]
        return short

    def _append(self, decoding: Ints) -> bytes:
        """Give each decoding sequence the block it needs; int32[n, 2] of (slot, block)."""
        short = self._short(decoding)
        if not len(short):
            return b""
        blocks = self.pool.take(len(short))
        self.seats.table[short, self.seats.blocks[short]] = blocks
        self.seats.blocks[short] += 1
        return np.stack([self.seats.slot[short], blocks], axis=1).astype("<i4").tobytes()

    def _advance(self, filled: Ints, decoding: Ints) -> None:
        """A plan is sealed: count what it does, and let go of the sequences whose last step it is."""
        seats = self.seats
        seats.length[decoding] += 1
        if len(filled):
            gone = set(filled.tolist())
            self._prefill.begun = [seat for seat in self._prefill.begun if seat not in gone]
            self._decoding = np.concatenate([decoding, filled])
        sampled = self._decoding  # exactly the roster: those that decoded and those just filled
        seats.scheduled[sampled] += 1
        seats.flying[sampled] += 1
        last = sampled[seats.scheduled[sampled] >= seats.limit[sampled]]
        if len(last):
            self._stop_running(last)
        for seat in filled[seats.slot[filled] != NO_SLOT].tolist():
            self.forecast.filled(seat, self.steps)
            if self.groups:
                self.groups.join(seat, seats.table[seat, : seats.published[seat]])

    def _stop_running(self, who: Ints) -> None:
        """Take slot and blocks from `who`. The worker hears of it with the next plan; seats stay until they drain."""
        seats = self.seats
        who = who[seats.slot[who] != NO_SLOT]
        for seat in who.tolist():
            slot = int(seats.slot[seat])
            self._released.append(slot)
            self._prefill.slots.append(slot)
            self._release(seat)
        seats.slot[who] = NO_SLOT
        seats.blocks[who] = 0
        self._decoding = self._decoding[seats.slot[self._decoding] != NO_SLOT]
        self._prefill.begun = [seat for seat in self._prefill.begun if seats.slot[seat] != NO_SLOT]

    def _release(self, seat: int) -> None:
        """Give a seat's blocks back. Those whose content is known stay in the tree: all before the last token that has
        come back, which the next step would have run."""
        seats, sequence, page = self.seats, self.seats.who(seat), self.limits.page_size
        published, names, ids = int(seats.published[seat]), sequence.names, sequence.prompt.ids
        if seats.filled[seat] < seats.fill[seat]:
            self._prefill.unlead(names[published:], seat)
            names = names[:published]
        elif seats.returned[seat]:
            ids = np.concatenate([ids, seats.generated(seat)])
            names = self.tree.extend(names, ids[: len(ids) - 1])[: (len(ids) - 1) // page]
        self.tree.release(seats.row(seat), names, ids, min(published, len(names)))
        self.forecast.drop(seat)
        if self.groups:
            self.groups.leave(seat)

    def _preempt(self, seats: list[int]) -> None:
        """Send the sequence of one of `seats` back to the head of its tenant's line, with its tokens: of those of the
        lowest priority, and of these of the tenant that has been served most, the newest. The oldest of the highest
        priority stays, unless it is alone. Nothing is in flight."""
        running = [self.seats.who(seat) for seat in seats]
        if len(running) > 1:
            running.remove(min(running, key=lambda one: (one.priority, one.arrival)))
        counters = self.ledger.counters
        sequence = max(running, key=lambda one: (one.priority, not one.vested, counters[one.account], one.arrival))
        seat = sequence.seat
        self.seats.move(seat)
        sequence.reached = max(sequence.reached, int(self.seats.length[seat]))
        self._stop_running(np.array([seat], dtype=np.int32))
        self.seats.leave(seat)
        sequence.names = []
        self._waiting.push_front(sequence)
        self.preempted.append(sequence)
        self.counts.preemptions += 1

    # Results

    def apply(self, tokens: Tokens) -> Progress:
        """Take in the results of the oldest plan in flight. Raises Diverged if these are not they."""
        if not self._flights or tokens.step != self._flights[0].step:
            awaited = self._flights[0].step if self._flights else "none"
            raise Diverged(f"results of step {tokens.step} came, those of step {awaited} are awaited")
        _, roster, chunked, prefilled, filled = self._flights.popleft()
        ids: Ints = np.frombuffer(tokens.ids, dtype="<i4").astype(np.int32)
        if len(ids) != len(roster) or tokens.counts:
            raise Diverged(f"step {tokens.step} has {len(roster)} rows, its results {len(ids)}")
        self.depth.observe(tokens.busy)

        seats = self.seats
        seats.flying[roster] -= 1
        alive = seats.alive[roster]
        rows = np.flatnonzero(alive)
        live, ids = roster[rows], ids[rows]
        if (ids == NO_TOKEN).any():
            raise Diverged(f"step {tokens.step} brought no token for a sequence that has not ended")
        seats.store(live, ids)
        self.ledger.served(seats.account, live)
        self.counts.generated += len(live)
        new = int(rows.searchsorted(filled))
        begun = [seats.who(seat) for seat in live[:new].tolist()]
        work = Work(prefilled, len(roster) - filled, len(live) - new, begun)
        stopped = (seats.stops[live] == ids[:, None]).any(axis=1)
        over = stopped | (seats.returned[live] >= seats.limit[live])
        # Looked at before ends are noted: a sequence may end with the very step that fills it.
        scored = [Scored(chunked[chunk], logprobs) for chunk, logprobs in tokens.prompts if not chunked[chunk].end]
        where = {row: place for place, row in enumerate(unpack(tokens.logprobs.rows))} if tokens.logprobs else {}
        news, reports = self._report(live, ids, stopped, over, rows, where)

        ended = live[over]
        if len(ended):
            seats.alive[ended] = False
            self._stop_running(ended)
        if len(ended) or not alive.all():
            for seat in roster[~seats.alive[roster] & (seats.flying[roster] == 0)].tolist():
                seats.leave(seat)
        return Progress(news, reports, scored, work, tokens.logprobs)

    def _report(
        self,
        live: Ints,
        ids: Ints,
        stopped: Flags,
        over: Flags,
        places: NDArray[np.int64],
        where: dict[int, int],
    ) -> tuple[list[News], list[Ended]]:
        """What the step means for its sequences. Python runs for rows that are watched or over, not for the others."""
        news: list[News] = []
        ended: list[Ended] = []
        rows = np.flatnonzero(self.seats.watched[live] | over)
        for row, seat, token in zip(rows.tolist(), live[rows].tolist(), ids[rows].tolist(), strict=True):
            sequence = self.seats.who(seat)
            if over[row]:
                sequence.end = End.STOP if stopped[row] else End.LENGTH
                if sequence.stops:
                    self.forecast.ended(int(self.seats.returned[seat]), sequence.limit)
            if sequence.watched:
                scored = where.get(int(places[row]), -1) if where else -1
                news.append(News(sequence, token, sequence.end, scored))
            else:
                assert sequence.end
                ended.append(Ended(sequence, sequence.end, self.seats.generated(seat)))
        return news, ended

    def check(self) -> None:
        """Prove that the books balance. Raises AssertionError."""
        check(self)
