"""A worker without a model: it follows plans to the letter and makes tokens up.

`PretendWorker` is the worker's state machine in plain arrays. With `audit=True` it also remembers which token lies in
which place of its pretend KV cache and proves, at every step, that each sequence reads its own history: an oracle for
everything that plans promise. `python -m toka.sim.worker engine=ADDRESS` speaks the protocol as a process of its own.
"""

import contextlib
import os
import sys
import threading
import time
from typing import Annotated

import msgspec
import numpy as np
import zmq
from msgspec import Meta, Struct
from numpy.typing import NDArray

from toka.errors import ConfigError
from toka.options import build, from_words
from toka.wire import (
    MAX_STOP_IDS,
    NO_TOKEN,
    VERSION,
    Admit,
    Agreed,
    Attached,
    Beat,
    Group,
    Hello,
    Logprobs,
    Message,
    Plan,
    Ready,
    Refused,
    Sampling,
    Stop,
    Tokens,
    Welcome,
    decode_to_worker,
    encode,
    pack,
)

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
EMPTY = -3
"""A place in the pretend KV cache that was never written."""
NOBODY: Ints = np.zeros(0, dtype=np.int32)


def pretend_tokens(seeds: Longs, choices: Longs, positions: Longs, vocab_size: int) -> Longs:
    """The tokens that a pretend worker samples: a hash of (seed, choice, position) and of nothing else, int64[rows].

    The mixing steps are those of splitmix64 (Steele, Lea, Flood 2014).
    """
    with np.errstate(over="ignore"):
        x = seeds.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += choices.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + positions.astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    tokens: Longs = (x % np.uint64(vocab_size)).astype(np.int64)
    return tokens


def pretend_scores(rows: list[int], tokens: list[int], width: int, *, ranked: bool = False) -> Logprobs:
    """Log-probabilities that a test can tell: -token / 256 for a token, and for its rivals the next ids and values."""
    best = [[token + rank for rank in range(width)] for token in tokens]
    return Logprobs(
        rows=pack(rows),
        chosen=np.array([-token / 256 for token in tokens], "<f4").tobytes(),
        width=width,
        ids=pack(id for ids in best for id in ids),
        values=np.array([[-id / 256 for id in ids] for ids in best], "<f4").tobytes(),
        ranks=pack([1] * len(tokens)) if ranked else b"",
    )


class PretendWorker:
    """Slots, block rows and lengths as a real worker keeps them. A plan that breaks the protocol is an
    AssertionError."""

    def __init__(
        self, *, max_slots: int, num_blocks: int, page_size: int, vocab_size: int = 256, audit: bool = False
    ) -> None:
        self.page_size = page_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.step = 0
        self.taken = np.zeros(max_slots, dtype=bool)
        self.dead = np.zeros(max_slots, dtype=bool)
        self.length = np.zeros(max_slots, dtype=np.int64)
        self.seed = np.zeros(max_slots, dtype=np.int64)
        self.choice = np.zeros(max_slots, dtype=np.int64)
        self.stops = np.full((max_slots, MAX_STOP_IDS), EMPTY, dtype=np.int64)
        self.fill = np.zeros(max_slots, dtype=np.int64)
        self.blocks = np.zeros(max_slots, dtype=np.int64)
        self.decoding: Ints = np.zeros(0, dtype=np.int32)
        self.audit = audit
        self.rows: dict[int, list[int]] = {}
        self.history: dict[int, list[int]] = {}
        self.cache = np.full((num_blocks, page_size), EMPTY, dtype=np.int64)
        self.largest_step = 0
        self.groups: dict[int, Group] = {}
        self.group: dict[int, int] = {}
        self.scored: dict[int, Sampling] = {}
        self.prompts: dict[int, list[int]] = {}

    def run(self, plan: Plan) -> Tokens:
        """Apply a plan and sample its roster."""
        assert plan.step == self.step, f"step {plan.step} came, {self.step} was due"
        self.step += 1
        releases = np.frombuffer(plan.releases, "<i4")
        assert self.taken[releases].all(), "a slot released and free"
        self.taken[releases] = False
        for admit in plan.admits:
            self._admit(admit)
        self._append(plan.appends)
        self._regroup(plan)
        if plan.decode is not None:
            self.decoding = np.frombuffer(plan.decode, "<i4")
        decoding = self.decoding
        chunks = np.frombuffer(plan.chunks, "<i4").reshape(-1, 3)
        assert self.taken[decoding].all(), "a slot decodes that nobody has"
        running = np.bincount(np.concatenate([chunks[:, 0], decoding]), minlength=1)
        assert running.max() <= 1, "a slot twice in one step"
        sampled = self._prefill(chunks) if len(chunks) else NOBODY
        if self.audit:
            self._look_back(chunks.tolist(), decoding)
        roster = np.concatenate([sampled, decoding])
        assert len(roster) or len(chunks), "a plan that runs nothing"
        self.largest_step = max(self.largest_step, len(decoding) + int(chunks[:, 2].sum()))
        dead = self.dead[roster]
        self.length[decoding] += ~self.dead[decoding]
        positions = self.length[roster]
        ids = pretend_tokens(self.seed[roster], self.choice[roster], positions, self.vocab_size)
        if self.audit:
            for slot, token in zip(roster.tolist(), ids.tolist(), strict=True):
                if not self.dead[slot]:
                    self.history[slot].append(token)
        ids[dead] = NO_TOKEN
        logprobs = self._score(roster, ids)
        prompts = self._score_prompts(chunks)
        self.dead[roster] |= (self.stops[roster] == ids[:, None]).any(axis=1)
        return Tokens(
            epoch=plan.epoch, step=plan.step, ids=ids.astype("<i4").tobytes(), logprobs=logprobs, prompts=prompts
        )

    def _score(self, roster: Ints, ids: Longs) -> Logprobs | None:
        """Made-up log-probabilities for the rows that ask: those of `pretend_scores`."""
        widths = {
            row: self.scored[slot].logprobs
            for row, slot in enumerate(roster.tolist())
            if slot in self.scored and self.scored[slot].logprobs >= 0 and ids[row] != NO_TOKEN
        }
        rows = list(widths)
        return pretend_scores(rows, ids[rows].tolist(), max(widths.values())) if rows else None

    def _score_prompts(self, chunks: Ints) -> list[tuple[int, Logprobs]]:
        scores = []
        for index, (slot, start, count) in enumerate(chunks.tolist()):
            if slot in self.scored and self.scored[slot].prompt_logprobs >= 0:
                prompt = self.prompts[slot]
                positions = range(start + 1, min(start + count, len(prompt) - 1) + 1)
                tokens = [prompt[position] for position in positions]
                width = self.scored[slot].prompt_logprobs
                scores.append((index, pretend_scores(list(positions), tokens, width, ranked=True)))
        return scores

    def _regroup(self, plan: Plan) -> None:
        """Follow which slots share a prefix; an audit proves that they do."""
        for slot in np.frombuffer(plan.releases, "<i4").tolist():
            self.group.pop(slot, None)
        for group in plan.groups:
            if group.blocks:
                assert group.id not in self.groups, f"group {group.id} made twice"
                self.groups[group.id] = group
            else:
                del self.groups[group.id]
        slots, ids = np.frombuffer(plan.members, "<i4").reshape(-1, 2).T.tolist()
        self.group.update(zip(slots, ids, strict=True))
        if self.audit:
            for slot, id in self.group.items():
                prefix = self._prefix(id)
                assert self.rows[slot][: len(prefix)] == prefix, f"slot {slot} does not begin like group {id}"

    def _prefix(self, id: int) -> list[int]:
        """The blocks of a group, those of its parent first."""
        if id < 0:
            return []
        group = self.groups[id]
        return [*self._prefix(group.parent), *np.frombuffer(group.blocks, "<i4").tolist()]

    def _admit(self, admit: Admit) -> None:
        slot = admit.slot
        assert not self.taken[slot], f"slot {slot} given twice"
        self.taken[slot] = True
        self.dead[slot] = False
        self.scored.pop(slot, None)
        if max(admit.sampling.logprobs, admit.sampling.prompt_logprobs) >= 0:
            self.scored[slot] = admit.sampling
            self.prompts[slot] = np.frombuffer(admit.ids, "<i4").tolist()[: admit.prompt_len]
        self.length[slot] = 0
        self.seed[slot] = admit.seed
        self.choice[slot] = admit.choice
        self.stops[slot] = EMPTY
        stops = np.frombuffer(admit.stops, "<i4")
        self.stops[slot, : len(stops)] = stops
        self.fill[slot] = len(admit.ids) // 4
        self.blocks[slot] = len(admit.blocks) // 4
        if self.audit:
            self.rows[slot] = np.frombuffer(admit.blocks, "<i4").tolist()
            self.history[slot] = np.frombuffer(admit.ids, "<i4").tolist()

    def _append(self, appends: bytes) -> None:
        """Rows of blocks become longer."""
        slots, blocks = np.frombuffer(appends, "<i4").reshape(-1, 2).T
        assert self.taken[slots].all(), "a block for a slot that nobody has"
        assert len(blocks) == 0 or (blocks.min() >= 0 and blocks.max() < self.num_blocks), "a block that is none"
        np.add.at(self.blocks, slots, 1)
        if self.audit:
            for slot, block in zip(slots.tolist(), blocks.tolist(), strict=True):
                self.rows[slot].append(block)

    def _prefill(self, chunks: Ints) -> Ints:
        """Run the chunks, int32[n, 3]; returns the slots whose ids end with them."""
        slots, starts, counts = chunks.T
        assert self.taken[slots].all(), "a chunk for a slot that nobody has"
        assert counts.min() > 0, "an empty chunk"
        length = self.length[slots]
        # What lies before a slot's first chunk came from the prefix cache.
        cached = (length == 0) & (starts % self.page_size == 0)
        assert (cached | (starts == length)).all(), f"slots filled up to {length}, their chunks start at {starts}"
        ends: Ints = starts + counts
        assert (ends <= self.fill[slots]).all(), "a chunk longer than its slot's ids"
        assert (ends <= self.blocks[slots] * self.page_size).all(), "a chunk without blocks for its tokens"
        self.length[slots] = ends
        filled: Ints = slots[ends == self.fill[slots]]
        return filled

    def _look_back(self, chunks: list[list[int]], decoding: Ints) -> None:
        """Write all tokens of the step, then let each sequence read its whole history: within a step writes come
        first."""
        live = [slot for slot in decoding.tolist() if not self.dead[slot]]
        for slot, start, count in chunks:
            for position in range(start, start + count):
                self._write(slot, position)
        for slot in live:
            assert self.length[slot] >= self.fill[slot], f"slot {slot} decodes before it is filled"
            self._write(slot, int(self.length[slot]))
        for slot, start, count in chunks:
            self._read(slot, start + count)
        for slot in live:
            self._read(slot, int(self.length[slot]) + 1)

    def _write(self, slot: int, position: int) -> None:
        block = self.rows[slot][position // self.page_size]
        self.cache[block, position % self.page_size] = self.history[slot][position]

    def _read(self, slot: int, length: int) -> None:
        blocks = self.rows[slot][: -(-length // self.page_size)]
        seen = self.cache[blocks].reshape(-1)[:length].tolist()
        assert seen == self.history[slot][:length], f"slot {slot} reads what another sequence wrote"


class Options(Struct, frozen=True, kw_only=True):
    """The options of `python -m toka.sim.worker`."""

    engine: Annotated[str, Meta(description="the engine's control address")]
    step_ms: Annotated[float, Meta(ge=0, description="milliseconds that a step takes")] = 0.0
    num_blocks: Annotated[int, Meta(ge=1, description="blocks of KV cache")] = 4096
    vocab_size: Annotated[int, Meta(ge=1, description="ids are below it")] = 256


def join(context: "zmq.Context[zmq.Socket[bytes]]", engine: str) -> Welcome:
    """Say Hello to the engine at this address. A refusal ends the process."""
    control = context.socket(zmq.DEALER)
    control.connect(engine)
    control.send(encode(Hello(version=VERSION, pid=os.getpid())))
    match decode_to_worker(control.recv()):
        case Welcome() as welcome:
            return welcome
        case Refused(reason=reason):
            sys.exit(reason)
        case other:
            sys.exit(f"unexpected answer: {other}")


def serve(options: Options) -> None:
    """Join the engine and answer its plans until it says Stop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    welcome = join(context, options.engine)
    epoch, rank, step_seconds = welcome.epoch, welcome.rank, options.step_ms / 1000
    plans = context.socket(zmq.PULL)
    plans.connect(welcome.plans)

    def speaker() -> "zmq.Socket[bytes]":
        socket = context.socket(zmq.PUSH)
        socket.connect(welcome.results)
        return socket

    results = speaker()
    worker = PretendWorker(
        max_slots=welcome.max_slots,
        num_blocks=options.num_blocks,
        page_size=welcome.page_size,
        vocab_size=options.vocab_size,
    )

    def say(message: Message) -> None:
        results.send(encode(message))

    def beat() -> None:
        socket = speaker()
        with contextlib.suppress(zmq.ZMQError):  # at the end the context is gone, whatever this thread is about
            while True:
                socket.send(encode(Beat(epoch=epoch, rank=rank, step=worker.step - 1)))
                time.sleep(1)

    say(Attached(epoch=epoch, rank=rank))
    threading.Thread(target=beat, daemon=True).start()
    say(
        Ready(
            epoch=epoch,
            rank=rank,
            num_blocks=options.num_blocks,
            max_model_len=131072,
            vocab_size=options.vocab_size,
            seconds=0.0,
        )
    )
    through = time.monotonic()
    while True:
        match decode_to_worker(plans.recv()):
            case Plan() as plan:
                # A step begins when the one before has ended, however long its results took to work out.
                through = max(through, time.monotonic()) + step_seconds
                tokens = msgspec.structs.replace(worker.run(plan), busy=step_seconds)
                if (rest := through - time.monotonic()) > 0:
                    time.sleep(rest)
                say(tokens)
            case Agreed():
                pass
            case Stop():
                break
            case other:
                sys.exit(f"unexpected message: {other}")
    context.destroy(linger=1000)


def main(arguments: list[str]) -> None:
    """Serve as `arguments` say: the fields of `Options`, as `key=value`."""
    try:
        options = build(Options, from_words(arguments))
    except ConfigError as error:
        sys.exit(f"pretend worker: {error}")
    serve(options)


if __name__ == "__main__":
    main(sys.argv[1:])
