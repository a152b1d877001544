"""Several replicas: where a sequence goes, and that nothing is lost between them."""

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.replica import VOCAB, expected, limits
from toka.core.blocks import Ints
from toka.core.fleet import Fleet
from toka.core.limits import Limits
from toka.core.prompt import Prompt
from toka.core.router import Longs, Router
from toka.core.sequence import End, Sequence
from toka.sim.worker import PretendWorker
from toka.wire import Tokens


def load(*tokens: int) -> Longs:
    return np.array(tokens, dtype=np.int64)


NAMES = [bytes([index]) for index in range(8)]


def test_without_hits_the_least_loaded_is_taken() -> None:
    """And of equals the first."""
    router = Router(3, page_size=16)
    assert router.place(NAMES, 128, load(5, 3, 3)) == (1, 128)


def test_a_hit_is_worth_the_tokens_it_saves() -> None:
    """Twice: 64 cached tokens are worth a queue that is 127 tokens longer, and not one that is 129 longer."""
    router = Router(2, page_size=16)
    for name in NAMES[:4]:
        router.named(1, name, True)
    assert router.place(NAMES, 128, load(0, 127)) == (1, 64)
    assert router.place(NAMES, 128, load(0, 129)) == (0, 128)


def test_hits_are_exact_for_each_replica() -> None:
    """As far as its own blocks go from the beginning without a gap."""
    router = Router(4, page_size=16)
    for replica, held in enumerate([[0, 1, 2], [0], [1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]):
        for index in held:
            router.named(replica, NAMES[index], True)
    assert router.hits(NAMES) == {0: 3, 1: 1, 3: 8}


def test_a_lost_replica_holds_nothing() -> None:
    """A new epoch starts with an empty tree."""
    router = Router(2, page_size=16)
    router.named(0, NAMES[0], True)
    router.named(1, NAMES[0], True)
    router.lost(1)
    assert router.hits(NAMES) == {0: 1}
    router.lost(0)
    assert len(router) == 0


class World:
    """A fleet and its pretend workers."""

    def __init__(self, replicas: int, sizes: Limits) -> None:
        self.fleet = Fleet(replicas, sizes)
        self.workers = [
            PretendWorker(
                max_slots=sizes.max_seqs,
                num_blocks=sizes.num_blocks,
                page_size=sizes.page_size,
                vocab_size=VOCAB,
                audit=True,
            )
            for _ in range(replicas)
        ]
        self.flights: list[deque[Tokens]] = [deque() for _ in range(replicas)]
        self.seen: dict[Sequence, list[int]] = {}
        self.where: dict[Sequence, int] = {}
        self.made = 0

    def sequence(self, ids: Ints, limit: int) -> Sequence:
        self.made += 1
        sequence = Sequence(Prompt(ids.astype(np.int32) % VOCAB), limit=limit, seed=self.made)
        self.fleet.submit(sequence)
        return sequence

    def turn(self, replica: int) -> bool:
        """Plan and run one step of a replica, or take in one result; False if there was nothing to do."""
        self.fleet.dispatch()
        plan = self.fleet.plan(replica)
        self.fleet.check()
        if plan is not None:
            self.flights[replica].append(self.workers[replica].run(plan))
            return True
        if not self.flights[replica]:
            return False
        for sequence, _, tokens in self.fleet.apply(replica, self.flights[replica].popleft()).ended:
            assert sequence not in self.seen, "answered twice"
            self.seen[sequence] = tokens.tolist()
            self.where[sequence] = replica
        self.fleet.check()
        return True

    def run(self) -> None:
        busy = True
        while busy:
            busy = False
            for replica in range(len(self.workers)):
                busy |= self.turn(replica)
        assert not self.fleet.waiting


def test_work_is_spread() -> None:
    """Equal requests without common beginnings go to all replicas alike."""
    world = World(3, limits(num_blocks=200, max_seqs=8, max_tokens=64))
    for index in range(30):
        world.sequence(np.arange(20, dtype=np.int32) * (index + 3) + index, 5)
    world.run()
    shares = [list(world.where.values()).count(replica) for replica in range(3)]
    assert min(shares) >= 7


def test_samples_of_one_prompt_go_where_its_blocks_are() -> None:
    """As long as waiting there costs less than computing the blocks elsewhere."""
    world = World(3, limits(num_blocks=200, max_seqs=8, max_tokens=64))
    first = world.sequence(np.arange(60, dtype=np.int32), 3)
    world.run()
    again = [world.sequence(np.arange(60, dtype=np.int32), 3) for _ in range(3)]
    world.run()
    assert {world.where[sequence] for sequence in again} == {world.where[first]}


def test_samples_that_come_together_stay_together() -> None:
    """Though nothing of their prompt is computed yet when they are placed."""
    world = World(3, limits(num_blocks=400, max_seqs=8, max_tokens=64))
    shared = Prompt(np.arange(61, dtype=np.int32))
    for seed in range(4):
        world.fleet.submit(Sequence(shared, limit=3, seed=seed))
    world.run()
    assert len(set(world.where.values())) == 1


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=40),
    replicas=st.integers(1, 4),
    cancel=st.sets(st.integers(0, 39), max_size=8),
)
@settings(max_examples=40)
def test_every_sequence_is_answered_once(requests: list[tuple[int, int, int]], replicas: int, cancel: set[int]) -> None:
    """With the tokens it would get alone, wherever it runs; the cancelled are not."""
    world = World(replicas, limits(num_blocks=24, max_seqs=4, max_tokens=16))
    sequences = [
        world.sequence(np.arange(length, dtype=np.int32) * (family + 1), min(limit, 96 - length))
        for length, limit, family in requests
    ]
    for replica in range(replicas):
        world.turn(replica)
    gone = [sequence for index, sequence in enumerate(sequences) if index in cancel and sequence not in world.seen]
    for sequence in gone:
        world.fleet.finish(sequence, End.CANCELLED)
        world.fleet.check()
    world.run()
    for sequence in sequences:
        if sequence in gone:
            assert sequence not in world.seen
        else:
            assert world.seen[sequence] == expected(sequence)
