"""Log-probabilities as arrays: what is cut and joined says of each token what it said before."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from toka.core.scores import Score, Scores, joined_scores
from toka.wire import Logprobs, pack


def sent(rows: list[list[int]], width: int) -> Logprobs:
    """A row a list: rank, own logprob · 4, then `width` pairs of an id and its logprob · 4."""
    floats = [[value / 4 for value in row[3::2]] for row in rows]
    return Logprobs(
        rows=pack(range(len(rows))),
        chosen=struct.pack(f"<{len(rows)}f", *(row[1] / 4 for row in rows)),
        width=width,
        ids=pack(id for row in rows for id in row[2::2]),
        values=struct.pack(f"<{len(rows) * width}f", *(value for row in floats for value in row)),
        ranks=pack(row[0] for row in rows),
    )


def expected(rows: list[list[int]], width: int) -> list[Score]:
    return [
        Score(row[1] / 4, [(id, value / 4) for id, value in zip(row[2::2], row[3::2], strict=True)][:width], row[0])
        for row in rows
    ]


widths = st.integers(0, 4)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    width = draw(widths)
    row = st.lists(st.integers(-100, 100), min_size=2 + 2 * width, max_size=2 + 2 * width)
    return draw(st.lists(row, max_size=6)), width


@given(tables(), widths, st.integers(0, 6))
def test_rows_stay_what_they_are(table: tuple[list[list[int]], int], narrow: int, cut: int) -> None:
    """Taken one by one or together, narrowed, split and joined."""
    rows, width = table
    message = sent(rows, width)
    one_by_one = Scores(min(narrow, width))
    for row in range(len(rows)):
        one_by_one.add(message, row)
    together = Scores(width)
    together.extend(message)
    wanted = expected(rows, narrow)
    assert one_by_one.tolist() == together.narrowed(narrow).tolist() == wanted
    assert len(together) == len(rows)
    head, tail = one_by_one.split(cut)
    assert (head.tolist(), tail.tolist()) == (wanted[:cut], wanted[cut:])
    whole = joined_scores([None, head, None, tail])
    assert whole == one_by_one
    later = Scores(width)
    later.extend(message, cut)
    assert later.tolist() == expected(rows, width)[cut:]


def test_nothing_joins_to_nothing() -> None:
    """Where no log-probabilities were asked for there are none."""
    assert joined_scores([None, None]) is None
    assert joined_scores([]) is None


def test_the_mean_is_of_the_tokens_own() -> None:
    """And 0 of none."""
    scores = Scores(1)
    scores.extend(sent([[1, -4, 7, -4], [1, -8, 7, -4]], 1))
    assert scores.mean() == -1.5
    assert Scores(1).mean() == 0


def test_ranks_may_be_missing() -> None:
    """Those of sampled tokens are not told."""
    scores = Scores(0)
    scores.extend(Logprobs(rows=pack([0]), chosen=struct.pack("<f", -1.0), width=0, ids=b"", values=b""))
    assert scores.tolist() == [Score(-1.0, [], 0)]
    assert scores.split(1)[0].tolist() == scores.tolist()
