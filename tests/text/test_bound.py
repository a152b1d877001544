"""A bound below the number of tokens: never above it, and unknown where text may vanish."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tests.fakes import byte_characters
from tests.text.vocabularies import KINDS, byte_level, load, load_bytes, loaded

Kind = Callable[[], tokenizers.Tokenizer]

GREEK = "\u03b1\u0313\u0300\u0345"
"""A letter with three accents, which NFC makes one character of."""


def composing() -> tokenizers.Tokenizer:
    """Qwen's kind: letters and their accents are joined first, and words are split."""
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+"), "isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Digits(), byte])
    return backend


def lacking(*missing: int) -> tokenizers.Tokenizer:
    """What has no token vanishes."""
    kept = [character for byte, character in enumerate(byte_characters()) if byte not in missing]
    backend = tokenizers.Tokenizer(models.BPE({character: id for id, character in enumerate(kept)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def without_controls() -> tokenizers.Tokenizer:
    """SmolLM2's kind: no tokens for some bytes that texts seldom have."""
    return lacking(0x04, 0x13, 0xC0, 0xF1, 0xFF)


def without_endings() -> tokenizers.Tokenizer:
    """Not every character beyond ASCII has a token left."""
    return lacking(*range(0x80, 0x100))


def dropping_spaces() -> tokenizers.Tokenizer:
    """What separates words is gone before there are tokens."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def stripping() -> tokenizers.Tokenizer:
    """Other normalizers drop what they like."""
    backend = byte_level()
    backend.normalizer = normalizers.Strip()
    return backend


def swallowing() -> tokenizers.Tokenizer:
    """An added token takes all the spaces before it."""
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


@pytest.mark.parametrize("kind", [*KINDS, composing, without_controls, without_endings, dropping_spaces, swallowing])
@given(text=st.text(max_size=40) | st.text("\x04\x13 a☃é", max_size=40) | st.sampled_from([GREEK, " <mask>", "\x04"]))
def test_a_text_never_has_fewer_tokens(tmp_path_factory: pytest.TempPathFactory, kind: Kind, text: str) -> None:
    """Of any tokenizer, be the text of special tokens, spaces, accents or characters that vanish."""
    folder = tmp_path_factory.getbasetemp() / kind.__name__
    if not folder.exists():
        load(kind, folder)
    for repeated in (text, text * 50, text + "<|endoftext|></s>plain text" * 9):
        assert loaded(folder).fewest(repeated) <= len(loaded(folder).encode(repeated, add_special_tokens=False))


@pytest.mark.parametrize("kind", [byte_level, composing, without_controls])
def test_a_long_text_is_known_to_be_long(tmp_path: Path, kind: Kind) -> None:
    """The bound grows with the text, whatever it is made of, but for what vanishes."""
    tokenizer = load(kind, tmp_path)
    longest = 12 * 4
    for text in ("x", " ", "é", "🦀", "x\x04"):
        assert tokenizer.fewest(text * 10_000) >= 10_000 // longest


@pytest.mark.parametrize("kind", [without_endings, dropping_spaces, stripping, swallowing])
def test_where_text_may_vanish_nothing_is_known(tmp_path: Path, kind: Kind) -> None:
    """Then it must be encoded to be counted."""
    assert load(kind, tmp_path).fewest("x" * 10_000) == 0


def test_the_longest_token_may_be_a_special_one(tmp_path: Path) -> None:
    """Written out in a text it is one token, too."""
    tokenizer = load_bytes(tmp_path)
    assert tokenizer.fewest("<|endoftext|>" * 100) == 100
    assert tokenizer.fewest("<|endoftext|>" * 100 + "a") == 101
