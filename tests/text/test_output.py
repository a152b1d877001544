"""Ids in, text out that nothing takes back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import IM_END
from tests.text.vocabularies import load, load_bytes, sentencepiece
from toka.text.output import Piece, TextOutput
from toka.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_bytes(tmp_path_factory.mktemp("bytes"))


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_without_stop_strings_everything_is_text(tokenizer: Tokenizer) -> None:
    """All ids are used; special ones have no text."""
    output = TextOutput(tokenizer)
    assert output.push([*ids("é"), IM_END]) == Piece("é", None, 3)
    assert (output.finish(), output.stop) == ("", None)


def test_used_counts_up_to_the_id_that_completed_the_stop_string(tokenizer: Tokenizer) -> None:
    """Ids behind it were sampled for nothing."""
    output = TextOutput(tokenizer, ("lo",))
    assert output.push(ids("hello world")) == Piece("hel", "lo", 5)


def test_after_a_stop_string_nothing_comes(tokenizer: Tokenizer) -> None:
    """Neither from more ids nor from the end."""
    output = TextOutput(tokenizer, ("a",))
    output.push(ids("a"))
    assert output.push(ids("b")) == Piece("", "a", 0)
    assert output.finish() == ""


def test_the_end_releases_what_was_held(tokenizer: Tokenizer) -> None:
    """The start of a stop string, then the unfinished character."""
    output = TextOutput(tokenizer, ("END",))
    assert output.push([*ids("the EN"), 0xE2]) == Piece("the ", None, 7)
    assert output.finish() == "EN\ufffd"


def test_a_stop_string_may_come_with_the_end(tmp_path: Path) -> None:
    """Text that was withheld is searched too, so a stop string is never shown."""
    tokenizer = load(sentencepiece, tmp_path)
    output = TextOutput(tokenizer, ("😀",))
    assert output.push(tokenizer.encode("a😀")) == Piece("a", None, 6)
    assert (output.finish(), output.stop) == ("", "😀")


@given(
    text=st.text("ab é€", max_size=20),
    stops=st.lists(st.text("ab é€", min_size=1, max_size=3), max_size=3).map(tuple),
    size=st.integers(1, 4),
)
def test_streamed_text_is_whole_text(tokenizer: Tokenizer, text: str, stops: tuple[str, ...], size: int) -> None:
    """The pieces of a stream are the text that comes at once, and use as many ids."""
    whole = TextOutput(tokenizer, stops)
    at_once = whole.push(ids(text))
    stream, shown, used = TextOutput(tokenizer, stops), "", 0
    sent = ids(text)
    for start in range(0, len(sent), size):
        piece = stream.push(sent[start : start + size])
        shown, used = shown + piece.text, used + piece.used
    assert (shown + stream.finish(), stream.stop, used) == (at_once.text + whole.finish(), whole.stop, at_once.used)
