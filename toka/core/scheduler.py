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
  flight, and only then is the newest sequence sent back to the head of the queue with all the tokens it has made.
"""

from collections import deque
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from toka.core.admission import Admission, Policy
from toka.core.blocks import Ints
from toka.core.books import check
from toka.core.depth import Depth
from toka.core.forecast import Forecast
from toka.core.hydragen import Groups
from toka.core.limits import Limits
from toka.core.prefix import Named, PrefixTree
from toka.core.progress import Diverged, Ended, Flight, News, Progress, Scored
from toka.core.queue import Queue
from toka.core.seats import NO_SLOT, Flags, Seats
from toka.core.sequence import BATCH, NO_SEAT, End, Sequence
from toka.core.usage import Future
from toka.wire import NO_TOKEN, Admit, Plan, Tokens, pack, unpack

LOOK = 64
"""How far behind the head of the queue a sequence may stand that starts before it."""
LOOK_PAST = 4
"""Sequences that do not fit which one step looks past. Each costs the look at a curve."""
MAX_PASSED = 64
"""Sequences that may start before one that does not fit."""
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
    ) -> None:
        """`key` makes the names of the prefix cache unpredictable. With `groups`, plans say which sequences share a
        prefix. `named` is told of each name that comes to the prefix cache or goes."""
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
        self.preemptions = 0
        self._arrivals = 0
        self._waiting = Queue()
        self._prefilling: list[int] = []
        self._leads: dict[bytes, int] = {}
        self._decoding: Ints = NOBODY
        self._admission = Admission(limits.num_blocks, policy)
        self._passed = 0
        self._crowded = False
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
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
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def in_flight(self) -> int:
        """Plans whose results are not in."""
        return len(self._flights)

    @property
    def unfilled(self) -> tuple[int, list[Sequence]]:
        """Tokens still to be prefilled for the sequences that have begun, and those that have not."""
        seats = self.seats
        begun = int((seats.fill[self._prefilling] - seats.filled[self._prefilling]).sum())
        return begun, list(self._waiting)

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence that has not ended waits or runs here."""
        seat = sequence.seat
        return sequence in self._waiting or (seat >= 0 and self.seats.sequences[seat] is sequence)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence could run to its limit with the cache to itself."""
        limits = self.limits
        return sequence.longest <= limits.max_len and limits.blocks_for(sequence.longest) <= limits.num_blocks

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue. It must fit."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.take(sequence)

    def take(self, sequence: Sequence) -> None:
        """Put a sequence, whose `arrival` is set, at the end of the queue. It must fit."""
        assert self.fits(sequence), f"{sequence} is larger than the KV cache"
        self._waiting.push(sequence)

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
            sequence.seat = NO_SEAT
            sequence.names = []
        running.sort(key=lambda sequence: (sequence.priority, sequence.arrival))
        return [*running, *self._waiting]

    # Planning

    def plan(self) -> Plan | None:
        """The next step, or None: nothing to run, enough in flight, or results are needed before anything else."""
        if len(self._flights) >= self.depth.value:
            return None
        self.forecast.advance(self.steps)
        if not self._grow() or not self._give_way():
            return None
        decoding = self._decoding
        self.forecast.look(decoding)
        admitted: list[Admit] = []
        appended = self._append(decoding)
        chunks, chunked, filled = self._prefill(self.limits.max_tokens - len(decoding), admitted)
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
        self._flights.append(Flight(self.steps, roster, chunked))
        self.steps += 1
        self._advance(filled, decoding)
        return plan

    def _grow(self) -> bool:
        """See that every decoding sequence can get the block it needs; False: not before what is in flight is in."""
        while len(self._short(self._decoding)) > self.pool.available:
            if self._flights:
                return False
            self._preempt([*self._prefilling, *self._decoding.tolist()])
        return True

    def _give_way(self) -> bool:
        """If somebody found no room in the last step while the batch lane holds some, make the batch lane smaller by
        one sequence; False: not before what is in flight is in."""
        if not self._crowded:
            return True
        seats = np.concatenate([np.array(self._prefilling, dtype=np.int32), self._decoding])
        batch = seats[self.seats.batch[seats]]
        if len(batch) and self._flights:
            return False
        if len(batch):
            self._preempt(batch.tolist())
        self._crowded = False
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

    def _prefill(self, budget: int, admitted: list[Admit]) -> tuple[list[tuple[int, int, int]], list[Sequence], Ints]:
        """Spend up to `budget` tokens on prompts: first those begun, then new ones in the order of their arrival.
        Returns the chunks (slot, start, length), whose they are, and the seats that are filled with this step."""
        chunks: list[tuple[int, int, int]] = []
        sequences: list[Sequence] = []
        filled: list[int] = []
        seats = self.seats

        def chunk(seat: int) -> None:
            nonlocal budget
            start, fill = int(seats.filled[seat]), int(seats.fill[seat])
            count = min(budget, fill - start)
            budget -= count
            chunks.append((int(seats.slot[seat]), start, count))
            sequences.append(seats.who(seat))
            seats.filled[seat] = seats.length[seat] = start + count
            self._publish(seat)
            if start + count == fill:
                filled.append(seat)

        for seat in self._prefilling:
            if budget <= 0:
                break
            chunk(seat)
        while budget > 0 and (admitted_seat := self._admit(budget, admitted)) is not None:
            chunk(admitted_seat)
        return chunks, sequences, np.array(filled, dtype=np.int32)

    def _admit(self, budget: int, admitted: list[Admit]) -> int | None:
        """Seat the next sequence of the queue that may start, if there is one. One that does not fit may be passed by a
        few others behind it, and then by nobody until it starts."""
        if not self._slots or not self.seats.free:
            first = next(iter(self._waiting), None)
            self._crowded = first is not None and first.priority < BATCH
            return None
        refused = 0
        for sequence in islice(self._waiting, LOOK):
            fill = sequence.fill()
            if not sequence.names:  # while it waits they stay what they are
                sequence.names = self.tree.extend(self.tree.digests(sequence.prompt), fill)
            # The last token is run again for its logits, so its block is never taken from the tree.
            usable = sequence.names[: (len(fill) - 1) // self.limits.page_size]
            if sequence.uncached:
                usable = []
            hit = self.tree.match(usable, fill)
            if len(hit) < len(usable) and usable[len(hit)] in self._leads:
                continue  # somebody is about to compute its next block: it waits for that, and others may pass
            new = self.limits.blocks_for(len(fill)) - len(hit)
            future = self.forecast.of(sequence, len(fill), hit, new, budget, self.running)
            enough = new + self.pool.idle(hit) <= self.pool.available
            if enough and self._admission.admits(self.forecast.usage, self.pool.used, future):
                self._passed = self._passed + 1 if refused else 0
                return self._seat(sequence, fill, hit, new, future, admitted)
            if not refused:
                self._crowded = sequence.priority < BATCH
            refused += 1
            if refused > LOOK_PAST or self._passed >= MAX_PASSED:
                return None
        return None

    def _seat(self, sequence: Sequence, fill: Ints, hit: Ints, new: int, future: Future, admitted: list[Admit]) -> int:
        """Give a sequence its slot and its blocks: those that the tree has, and `new` ones."""
        seats = self.seats
        self._waiting.remove(sequence)
        seat = seats.sit(sequence, self._slots.pop(), len(fill))
        self.pool.share(hit)
        blocks = np.concatenate([hit, self.pool.take(new)])
        seats.table[seat, : len(blocks)] = blocks
        seats.blocks[seat] = len(blocks)
        seats.published[seat] = len(hit)
        self.forecast.start(seat, future)
        seats.filled[seat] = seats.length[seat] = len(hit) * self.limits.page_size
        if not sequence.kept:
            sequence.cached = int(seats.filled[seat])
        self._leads.update(dict.fromkeys(sequence.names[len(hit) :], seat))
        self._prefilling.append(seat)
        admitted.append(
            Admit(
                slot=int(seats.slot[seat]),
                ids=fill.astype("<i4").tobytes(),
                blocks=blocks.astype("<i4").tobytes(),
                stops=np.array(sequence.stops, dtype="<i4").tobytes(),
                seed=sequence.seed,
                choice=sequence.choice,
                prompt_len=len(sequence.prompt),
                sampling=sequence.sampling,
            )
        )
        return seat

    def _publish(self, seat: int) -> None:
        """A chunk is planned: the blocks that it fills are anybody's to read."""
        seats, sequence = self.seats, self.seats.who(seat)
        start, full = int(seats.published[seat]), int(seats.filled[seat]) // self.limits.page_size
        if full > start:
            names = sequence.names[:full]
            seats.published[seat] = self.tree.publish(names, sequence.fill(), seats.row(seat), start)
            self._unlead(names[start:], seat)

    def _unlead(self, names: list[bytes], seat: int) -> None:
        """The blocks of these names are computed, or will not be: nobody waits for `seat` to do it any more."""
        for name in names:
            if self._leads.get(name) == seat:
                del self._leads[name]

    def _advance(self, filled: Ints, decoding: Ints) -> None:
        """A plan is sealed: count what it does, and let go of the sequences whose last step it is."""
        seats = self.seats
        seats.length[decoding] += 1
        if len(filled):
            gone = set(filled.tolist())
            self._prefilling = [seat for seat in self._prefilling if seat not in gone]
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
            self._slots.append(slot)
            self._release(seat)
        seats.slot[who] = NO_SLOT
        seats.blocks[who] = 0
        self._decoding = self._decoding[seats.slot[self._decoding] != NO_SLOT]
        self._prefilling = [seat for seat in self._prefilling if seats.slot[seat] != NO_SLOT]

    def _release(self, seat: int) -> None:
        """Give a seat's blocks back. Those whose content is known stay in the tree: all before the last token that has
        come back, which the next step would have run."""
        seats, sequence, page = self.seats, self.seats.who(seat), self.limits.page_size
        published, names, ids = int(seats.published[seat]), sequence.names, sequence.prompt.ids
        if seats.filled[seat] < seats.fill[seat]:
            self._unlead(names[published:], seat)
            names = names[:published]
        elif seats.returned[seat]:
            ids = np.concatenate([ids, seats.generated(seat)])
            names = self.tree.extend(names, ids[: len(ids) - 1])[: (len(ids) - 1) // page]
        self.tree.release(seats.row(seat), names, ids, min(published, len(names)))
        self.forecast.drop(seat)
        if self.groups:
            self.groups.leave(seat)

    def _preempt(self, seats: list[int]) -> None:
        """Send the sequence of one of `seats` back to the head of the queue, with its tokens: of those of the lowest
        priority the newest. Nothing is in flight."""
        running = [self.seats.who(seat) for seat in seats]
        sequence = max(running, key=lambda one: (one.priority, one.arrival))
        seat = sequence.seat
        self.seats.move(seat)
        self._stop_running(np.array([seat], dtype=np.int32))
        self.seats.leave(seat)
        sequence.names = []
        self._waiting.push_front(sequence)
        self.preemptions += 1

    # Results

    def apply(self, tokens: Tokens) -> Progress:
        """Take in the results of the oldest plan in flight. Raises Diverged if these are not they."""
        if not self._flights or tokens.step != self._flights[0].step:
            awaited = self._flights[0].step if self._flights else "none"
            raise Diverged(f"results of step {tokens.step} came, those of step {awaited} are awaited")
        _, roster, chunked = self._flights.popleft()
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
        return Progress(news, reports, scored, tokens.logprobs)

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
