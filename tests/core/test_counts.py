"""What the core counts, against what the sequences say."""

import pytest

from tests.core.replica import BOLD, Replica, expected, limits
from toka.core.hydragen import Groups
from toka.core.prompt import Prompt
from toka.core.sequence import End


def test_a_prompt_is_computed_or_cached_once() -> None:
    """The second of two equal prompts finds its full blocks; the rest of it is computed."""
    replica = Replica(limits(page_size=4))
    first = replica.sequence(10, 3)
    replica.run()
    replica.sequence(10, 2, prompt=Prompt(first.prompt.ids))
    replica.run()
    counts = replica.scheduler.counts
    assert (counts.queries, counts.hits) == (20, 8)
    assert (counts.computed, counts.cached, counts.recomputed) == (12, 8, 0)
    assert counts.generated == 5


def test_what_must_be_run_looks_nothing_up() -> None:
    """A sequence that does not take from the prefix cache is no query of it."""
    replica = Replica(limits(page_size=4))
    sequence = replica.sequence(10, 1)
    sequence.uncached = True
    replica.run()
    counts = replica.scheduler.counts
    assert (counts.queries, counts.computed) == (0, 10)


@pytest.mark.parametrize("prompt", [3, 50])
def test_preempted_work_is_counted_as_such(prompt: int) -> None:
    """Whatever is preempted and comes back, each prompt is counted once, and each token that comes back once. All else
    that was prefilled was recomputed, but for a resumed sequence's last token, which had not been run before."""
    replica = Replica(limits(num_blocks=60, max_seqs=4), BOLD)
    sequences = [replica.sequence(prompt, 100) for _ in range(3)]
    replica.run()
    counts = replica.scheduler.counts
    assert counts.preemptions > 0
    assert counts.computed + counts.cached == 3 * prompt
    assert counts.queries == 3 * prompt
    assert counts.generated == 300
    assert sum(sequence.starts - 1 for sequence in sequences) == counts.preemptions
    assert counts.recomputed > 0
    resumed = replica.prefilled - counts.computed - counts.recomputed
    assert resumed == sum(sequence.starts - 1 for sequence in sequences)
    assert all(replica.seen[sequence] == expected(sequence) for sequence in sequences)


def test_what_comes_back_for_the_dead_is_not_generated() -> None:
    """Tokens of a sequence that was cancelled meanwhile do not count."""
    replica = Replica(limits())
    sequence = replica.sequence(4, 10)
    assert replica.plan()
    replica.land()
    assert replica.plan()
    replica.scheduler.finish(sequence, End.CANCELLED)
    replica.run()
    assert replica.scheduler.counts.generated == 1


def test_a_step_says_what_it_ran() -> None:
    """Tokens prefilled, rows decoded, those of them that count, and whose first token it is."""
    replica = Replica(limits(max_tokens=6, max_ahead=1))
    one, other = replica.sequence(4, 3), replica.sequence(4, 3)
    works = []
    while replica.plan():
        works.append(replica.scheduler.apply(replica.results.popleft()).work)
    assert works == [(6, 0, 0, [one]), (2, 1, 1, [other]), (0, 2, 2, []), (0, 1, 1, [])]


def test_shared_tokens_are_those_that_a_group_spares() -> None:
    """Three members of a group with a prefix of two blocks of four: each step with them spares twice eight tokens."""
    replica = Replica(limits(page_size=4, max_tokens=64, max_ahead=1), groups=Groups(2, 3))
    prompt = Prompt(replica.sequence(10, 1).prompt.ids)
    replica.run()
    for _ in range(3):
        replica.sequence(10, 4, prompt=prompt)
    replica.run()
    # All are filled in one step, decode in three, and the third is the last.
    assert replica.scheduler.counts.shared == 3 * 2 * 8
