"""Text that comes token by token is the text of all tokens, and no part of a character is ever shown."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.text.vocabularies import KINDS, byte_level, load, load_bytes, loaded, sentencepiece
from toka.text.detokenize import Detokenizer
from toka.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind.__name__: load(kind, tmp_path_factory.mktemp(kind.__name__)) for kind in KINDS}


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_bytes(tmp_path_factory.mktemp("bytes"))


def pieces(tokenizer: Tokenizer, ids: list[int], size: int) -> list[str]:
    """What each push of `size` ids brings, and at the end what `finish` does."""
    detokenizer = Detokenizer(tokenizer)
    return [
        *(detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)),
        detokenizer.finish(),
    ]


@given(
    kind=st.sampled_from([kind.__name__ for kind in KINDS]),
    ids=st.lists(st.integers(0, 280), max_size=40),
    size=st.integers(1, 5),
    spelled=st.booleans(),
)
@example(kind="sentencepiece", ids=[259, 259, 265], size=1, spelled=False)
@example(kind="sentencepiece", ids=[1, 259, 1, 265], size=1, spelled=False)
@example(kind="sentencepiece", ids=[1, 265, 2, 265], size=1, spelled=True)
@example(kind="metaspace", ids=[1, 5, 4], size=1, spelled=False)
def test_the_pieces_are_the_text(
    vocabularies: dict[str, Tokenizer], kind: str, ids: list[int], size: int, spelled: bool
) -> None:
    """Byte for byte what `decode` makes of all ids, in pieces of any size; ids that no token has are nothing. Special
    tokens are spelled or not."""
    tokenizer = vocabularies[kind].spelled if spelled else vocabularies[kind]
    assert "".join(pieces(tokenizer, ids, size)) == tokenizer.decode(ids)


@given(
    ids=st.lists(st.sampled_from([*range(3, 259, 9), *(3 + byte for byte in "é☃😀 a".encode()), 260, 271]), max_size=24)
)
def test_runs_of_fallback_bytes_are_whole(vocabularies: dict[str, Tokenizer], ids: list[int]) -> None:
    """A run of byte tokens is characters only if all of it is UTF-8, which its last token decides."""
    tokenizer = vocabularies["sentencepiece"]
    assert "".join(pieces(tokenizer, ids, 1)) == tokenizer.decode(ids)


@given(text=st.text(max_size=30), size=st.integers(1, 3))
def test_no_piece_shows_part_of_a_character(byte_tokenizer: Tokenizer, text: str, size: int) -> None:
    """A token that ends inside a character brings nothing until the character is complete."""
    shown = pieces(byte_tokenizer, byte_tokenizer.encode(text), size)
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte(tmp_path: Path) -> None:
    """Not later: nothing is withheld that is certain."""
    assert pieces(load_bytes(tmp_path), list("a€".encode()), 1) == ["a", "", "", "€", ""]


def test_an_unfinished_character_is_shown_at_the_end(tmp_path: Path) -> None:
    """As one U+FFFD, by `finish` alone."""
    assert pieces(load_bytes(tmp_path), list("a€".encode())[:-1], 1) == ["a", "", "", "\ufffd"]


def test_a_word_comes_with_its_token(tmp_path: Path) -> None:
    """Spaces that stand in the tokens come with them, but for the text's first."""
    tokenizer = load(sentencepiece, tmp_path)
    ids = tokenizer.encode("hello hello")
    assert pieces(tokenizer, ids, 1) == ["he", "l", "lo", " he", "l", "lo", ""]


def test_added_tokens_are_as_they_are_written(tmp_path: Path) -> None:
    """A token in plain text is not taken for characters that stand for bytes; special ones are not shown."""
    tokenizer = load(byte_level, tmp_path)
    ids = tokenizer.encode("<s>a plain text</s>")
    assert pieces(tokenizer, ids, 1) == ["", "a", " ", "plain text", "", ""]


def test_special_tokens_are_shown_where_they_are_spelled(tmp_path: Path) -> None:
    """Each with its id, as it is written."""
    tokenizer = load(byte_level, tmp_path)
    ids = tokenizer.encode("<s>a plain text</s>")
    assert pieces(tokenizer.spelled, ids, 1) == ["<s>", "a", " ", "plain text", "</s>", ""]


@pytest.mark.model
@given(data=st.data())
def test_the_default_models_ids_are_its_text(smollm2: Path, data: st.DataObject) -> None:
    """Any ids of the real vocabulary, those that start and end inside characters included."""
    tokenizer = loaded(smollm2)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    assert "".join(pieces(tokenizer, ids, 1)) == tokenizer.decode(ids)
