"""The curve of blocks in use, against counting block by block."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toka.core.usage import HORIZON, Future, Usage, future_of


def brute(futures: list[Future], steps: range) -> list[int]:
    """Blocks in use at each step, one sequence and one step at a time."""
    curve = []
    for step in steps:
        used = 0
        for future in futures:
            if step < future.end:
                used += future.blocks
                used += sum(1 for grows in range(future.grows, step + 1, future.page))
                used += sum(count for since, count in future.borrowed if step >= since)
        curve.append(used)
    return curve


FUTURES = st.builds(
    lambda start, length, steps, page, borrowed: future_of(
        start=start, length=length, row=-(-length // page), steps=steps, page=page, borrowed=borrowed
    ),
    start=st.integers(0, 40),
    length=st.integers(1, 60),
    steps=st.integers(1, 300),
    page=st.just(4),
    borrowed=st.just(()),
)


def test_a_sequence_takes_a_block_at_each_page() -> None:
    """5 tokens in 2 blocks of 4: positions 5, 6, 7 fit, position 8 takes a block, and so does position 12."""
    future = future_of(start=0, length=5, row=2, steps=9, page=4)
    assert future.over(0, 20).tolist() == [2, 2, 2, 3, 3, 3, 3, 4, 4]


@given(futures=st.lists(FUTURES, max_size=8), moves=st.lists(st.integers(0, 30), max_size=6), data=st.data())
@settings(max_examples=80, deadline=None)
def test_kept_up_to_date_equals_counted_anew(futures: list[Future], moves: list[int], data: st.DataObject) -> None:
    """Sequences that come and go while time passes leave the same curve as those that remain, counted by hand."""
    usage = Usage(span=600)
    present: list[Future] = []
    for future in futures:
        usage.add(future)
        present.append(future)
    for move in moves:
        usage.advance(usage.now + move)
        leaves: bool = data.draw(st.booleans())
        if present and leaves:
            gone = present.pop(data.draw(st.integers(0, len(present) - 1)))
            usage.remove(gone)
    expected = brute(present, range(usage.now, usage.now + 200))
    assert usage.ahead(expected[0])[:200].tolist() == expected


@given(futures=st.lists(FUTURES, max_size=6), candidate=FUTURES)
@settings(max_examples=60, deadline=None)
def test_the_peak_is_that_of_the_sum(futures: list[Future], candidate: Future) -> None:
    """What admission asks: the most blocks at once with one more sequence."""
    usage = Usage(span=600)
    for future in futures:
        usage.add(future)
    before = brute(futures, range(400))
    after = brute([*futures, candidate], range(400))
    assert usage.peak(before[0], candidate) == max(after)


def test_blocks_of_nobody_stay_in_use() -> None:
    """What is in use beyond the futures is taken to stay."""
    usage = Usage(span=100)
    usage.add(future_of(start=0, length=4, row=1, steps=3, page=4))
    assert usage.ahead(used=6)[:5].tolist() == [6, 6, 6, 4, 4]


def test_time_passes_without_end() -> None:
    """The curve is right after many times its own length."""
    usage = Usage(span=50)
    for start in range(0, 20 * HORIZON, HORIZON // 3):
        usage.advance(start)
        future = future_of(start=start, length=8, row=2, steps=40, page=4)
        usage.add(future)
        assert usage.ahead(3)[:41].tolist() == brute([future], range(start, start + 41))
        usage.remove(future)
        assert not np.any(usage.ahead(0))
