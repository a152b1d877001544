"""Stop strings across pieces: what is released, what is held back, and which one wins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka.text.stop import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)
PIECES = st.lists(st.text("abc", max_size=4), max_size=16)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The oracle: the text before the first stop string in it, and that stop string."""
    matches = [(start, len(stop), stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not matches:
        return text, None
    start, _, stop = min(matches)
    return text[:start], stop


def run(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    """All that is released, and the stop string that ended it."""
    matcher = StopMatcher(stops)
    released = [matcher.push(piece)[0] for piece in pieces]
    return "".join(released) + matcher.finish(), matcher.stop


@given(pieces=PIECES, stops=STOPS)
def test_the_text_is_cut_at_the_first_stop_string(pieces: list[str], stops: tuple[str, ...]) -> None:
    """However the text is cut into pieces: the one that starts first, of those the one that ends first."""
    assert run(pieces, stops) == cut("".join(pieces), stops)


@given(pieces=PIECES, stops=STOPS)
def test_what_is_released_stays_and_no_more_is_held_than_must_be(pieces: list[str], stops: tuple[str, ...]) -> None:
    """While no stop string is complete, the longest end of the text that begins one is held back, and only that."""
    matcher, text, released = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        released += matcher.push(piece)[0]
        if any(stop in text for stop in stops):
            break
        starts = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert released == text[: len(text) - max(starts, default=0)]


@given(pieces=PIECES, stops=STOPS)
def test_the_pieces_do_not_matter(pieces: list[str], stops: tuple[str, ...]) -> None:
    """A text ends at the same character whether it comes at once or letter by letter."""
    whole, letters = StopMatcher(stops), StopMatcher(stops)
    text = "".join(pieces)
    at_once = whole.push(text)
    by_letter = [letters.push(letter) for letter in text]
    assert at_once == ("".join(released for released, _ in by_letter), letters.stop)
    assert whole.finish() == letters.finish()


def test_a_stop_string_is_found_across_pieces() -> None:
    """None of it is shown before, nothing after."""
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("Paris.\n") == ("Paris.", None)
    assert matcher.push("\nUse") == ("", None)
    assert matcher.push("r: and") == ("", "\n\nUser:")
    assert matcher.push("more") == ("", "\n\nUser:")
    assert matcher.finish() == ""


def test_what_did_not_become_a_stop_string_is_released() -> None:
    """As soon as that is certain."""
    matcher = StopMatcher(("STOP",))
    assert matcher.push("ST") == ("", None)
    assert matcher.push("ART ST") == ("START ", None)
    assert matcher.finish() == "ST"


def test_an_earlier_start_wins_over_an_earlier_end() -> None:
    """A whole stop string waits for a longer one that started before it."""
    matcher = StopMatcher(("abcd", "bc"))
    assert matcher.push("xabc") == ("x", None)
    assert matcher.push("d") == ("", "abcd")
    matcher = StopMatcher(("abcd", "bc"))
    assert matcher.push("xabc") == ("x", None)
    assert matcher.push("e") == ("a", "bc")


def test_a_stop_string_that_waits_ends_the_text_all_the_same() -> None:
    """`finish` cuts before it, and says so."""
    matcher = StopMatcher(("abcd", "bc"))
    assert matcher.push("abc") == ("", None)
    assert (matcher.finish(), matcher.stop) == ("a", "bc")


def test_the_shorter_of_two_with_one_start_wins() -> None:
    """It is complete first."""
    assert StopMatcher(("abc", "ab")).push("xabc") == ("x", "ab")


def test_an_empty_stop_string_is_refused() -> None:
    """It would match before every text."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


def test_time_is_linear_in_the_text() -> None:
    """The worst text for the worst stop string takes a bounded number of moves for each character."""
    count = 4000
    matcher = StopMatcher(("a" * count + "b",))
    text = "".join(matcher.push("a")[0] for _ in range(3 * count)) + matcher.push("b")[0]
    assert (text, matcher.stop) == ("a" * 2 * count, "a" * count + "b")
