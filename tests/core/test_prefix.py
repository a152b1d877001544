"""The prefix cache: what is computed once, what is shared with whom, and what is evicted first."""

import numpy as np
import pytest

from tests.core.replica import BOLD, Replica, expected, limits
from toka.core.prefix import PrefixTree
from toka.core.prompt import Prompt
from toka.core.sequence import End


def prompt(length: int, salt: str = "", start: int = 0) -> Prompt:
    return Prompt(np.arange(start, start + length, dtype=np.int32) % 64, salt)


def test_samples_of_one_prompt_prefill_it_once() -> None:
    """Each of n samples runs only its own last, partly filled block."""
    replica = Replica(limits(num_blocks=200, max_seqs=8, max_tokens=64))
    shared = prompt(22)
    sequences = [replica.sequence(0, 4, prompt=shared) for _ in range(6)]
    replica.plan()
    assert replica.scheduler.running == 6, "all start in the same plan"
    assert replica.prefilled == 22 + 5 * 2
    replica.run()
    for sequence in sequences:
        assert replica.seen[sequence] == expected(sequence)


def test_equal_prompts_that_come_later_find_the_blocks() -> None:
    """Blocks stay after their owner is gone."""
    replica = Replica(limits())
    replica.sequence(0, 3, prompt=prompt(21))
    replica.run()
    again = replica.sequence(0, 3, prompt=prompt(21))
    replica.run()
    assert again.cached == 20
    assert replica.prefilled == 21 + 1
    assert replica.seen[again] == expected(again)


def test_the_last_token_is_always_run() -> None:
    """Its logits are needed, so a prompt of whole blocks is never all cached."""
    replica = Replica(limits())
    for _ in range(2):
        sequence = replica.sequence(0, 3, prompt=prompt(16))
        replica.run()
    assert sequence.cached == 12


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    """A conversation that goes on finds its own answers."""
    replica = Replica(limits())
    first = replica.sequence(0, 40, prompt=prompt(10))
    first.stops = (expected(first)[30],)
    answer = expected(first)
    replica.run()
    assert first.end is End.STOP
    turn = np.concatenate([prompt(10).ids, np.array(answer, dtype=np.int32), np.arange(5, dtype=np.int32)])
    second = replica.sequence(0, 3, prompt=Prompt(turn))
    replica.run()
    assert second.cached == (10 + len(answer) - 1) // 4 * 4
    assert replica.seen[second] == expected(second)


def test_salts_share_nothing() -> None:
    """Tenants with different salts cannot find out what others asked."""
    replica = Replica(limits())
    replica.sequence(0, 3, prompt=prompt(21, "a"))
    replica.run()
    other = replica.sequence(0, 3, prompt=prompt(21, "b"))
    replica.run()
    assert other.cached == 0


def test_followers_of_a_long_prompt_wait_for_its_leader() -> None:
    """A prompt longer than a step is still prefilled once, by the first who came; the others hold nothing meanwhile."""
    replica = Replica(limits(max_tokens=8))
    sequences = [replica.sequence(0, 4, prompt=prompt(30)) for _ in range(4)]
    replica.plan()
    assert replica.scheduler.running == 1
    replica.run()
    assert replica.prefilled == 30 + 3 * 2
    for sequence in sequences:
        assert replica.seen[sequence] == expected(sequence)


def test_others_pass_those_who_wait_for_a_leader() -> None:
    """Waiting for another's prefill holds up nobody else."""
    replica = Replica(limits(max_tokens=8))
    long = prompt(30)
    replica.sequence(0, 4, prompt=long)
    replica.plan()
    replica.sequence(0, 4, prompt=long)
    short = replica.sequence(3, 2)
    for _ in range(3):
        replica.plan()
        replica.land()
    while replica.land():
        pass
    replica.run()
    assert replica.seen[short] == expected(short)


def test_if_the_leader_goes_the_first_follower_leads() -> None:
    """And goes on from what the leader had computed."""
    replica = Replica(limits(max_tokens=8))
    leader, follower, third = (replica.sequence(0, 4, prompt=prompt(30)) for _ in range(3))
    replica.plan()
    replica.scheduler.finish(leader, End.CANCELLED)
    replica.run()
    assert follower.cached == 8
    assert replica.seen[follower] == expected(follower)
    assert replica.seen[third] == expected(third)
    assert replica.prefilled == 30 + 2


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    """What it had computed is in the tree until somebody needs the room."""
    replica = Replica(limits(num_blocks=60, max_seqs=4), BOLD)
    sequences = [replica.sequence(3, 100) for _ in range(3)]
    replica.run()
    assert replica.scheduler.preemptions > 0
    recomputed = replica.prefilled - 9
    assert recomputed < 100
    for sequence in sequences:
        assert replica.seen[sequence] == expected(sequence)


def test_eviction_is_least_recently_released_first_and_leaves_first() -> None:
    """Of two paths the older goes first, from its end; a path that was used again counts as new."""
    tree = PrefixTree(num_blocks=6, page_size=4)
    rows = {}
    for name, start in (("old", 0), ("new", 20)):
        one = prompt(12, start=start)
        names = tree.digests(one)
        row = tree.pool.take(3)
        tree.publish(names, one.ids, row, 0)
        tree.release(row, names, one.ids, 3)
        rows[name] = (one, names)
    old, names = rows["old"]
    hit = tree.match(names[:1], old.ids)
    tree.pool.share(hit)
    tree.pool.give(hit)  # its first block was used again, after "new" was released
    held = []
    remaining = []
    for _ in range(6):
        held.append(tree.pool.take(1))
        tree.check()
        remaining.append(tuple(len(tree.match(n, p.ids)) for p, n in rows.values()))
    assert remaining == [(2, 3), (1, 3), (1, 2), (1, 1), (1, 0), (0, 0)]


def test_a_name_is_not_enough() -> None:
    """Tokens are compared on a hit: a collision of names never gives one prompt another's keys and values."""
    tree = PrefixTree(num_blocks=4, page_size=4)
    one, other = prompt(8), prompt(8, start=30)
    names = tree.digests(one)
    tree.publish(names, one.ids, tree.pool.take(2), 0)
    assert len(tree.match(names, one.ids)) == 2
    assert len(tree.match(names, other.ids)) == 0


def test_names_depend_on_the_key() -> None:
    """Who does not know the key cannot look for collisions."""
    assert PrefixTree(1, 4, b"a").digests(prompt(8)) != PrefixTree(1, 4, b"b").digests(prompt(8))


@pytest.mark.parametrize("length", [3, 4, 5, 11, 12])
def test_extending_names_equals_naming_the_whole(length: int) -> None:
    """The chain may be taken up where it was left."""
    tree = PrefixTree(1, 4)
    whole = prompt(length)
    assert (
        tree.extend(tree.digests(Prompt(whole.ids[:4]))[: length // 4], whole.ids) == tree.digests(whole) or length < 4
    )
