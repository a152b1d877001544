"""Ids equal transformers'; folders without a usable tokenizer get one line."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.fakes import IM_END, IM_START, TINY_VOCAB, write_byte_tokenizer, write_tiny_model
from tests.text.vocabularies import byte_level, load, loaded, sentencepiece, wordpiece
from toka.errors import StartError
from toka.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "hello hello",
    "  two  spaces ",
    "naïve café ☃ 😀 日本語",
    "<s>a plain text</s>",
    "tab\tnewline\nthe end",
    "<|im_start|>user\nHi<|im_end|>\n",
    "don't 1234567 {x: [1, 2]} https://example.org/?q=%20",
    "e\u0301 \u200b \ufeff \x00",
]


@cache
def theirs(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(tmp_path: Path, kind: Callable[[], tokenizers.Tokenizer], special: bool) -> None:
    """With and without the special tokens that the tokenizer adds."""
    backend = kind()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    ours = load(lambda: backend, tmp_path)
    reference = theirs(write_settings(tmp_path, bos_token="<s>", eos_token="</s>"))
    for text in TEXTS:
        assert ours.encode(text, special) == reference(text, add_special_tokens=special).input_ids, text


def write_settings(folder: Path, **settings: object) -> Path:
    """tokenizer_config.json and what else AutoTokenizer asks for."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_tokens_that_only_the_settings_know_count(tmp_path: Path) -> None:
    """A fine-tune adds its tokens in tokenizer_config.json: they get the ids that transformers gives them."""
    load(byte_level, tmp_path)
    folder = write_settings(
        tmp_path,
        bos_token="<s>",
        eos_token="<|done|>",
        added_tokens_decoder={
            "400": {"content": "<tool>", "special": False, "normalized": False, "lstrip": True},
            "300": {"content": "<think>", "special": True, "normalized": False},
        },
        additional_special_tokens=["<extra>"],
    )
    ours, reference = Tokenizer.load(folder), theirs(folder)
    text = "a <tool>b<think><|done|><extra></s>"
    assert ours.encode(text) == reference(text).input_ids
    assert ours.decode(ours.encode(text)) == reference.decode(reference(text).input_ids, skip_special_tokens=True)


@pytest.mark.model
@given(text=st.text(max_size=60) | st.sampled_from(TEXTS))
def test_the_default_models_ids_are_those_of_transformers(smollm2: Path, text: str) -> None:
    """On any text, and what comes back is what transformers gives back."""
    ours, reference = loaded(smollm2), theirs(smollm2)
    ids = ours.encode(text)
    assert ids == reference(text).input_ids
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert ours.spelled.decode(ids) == reference.decode(ids)


def test_a_lone_surrogate_is_a_replacement_character(tmp_path: Path) -> None:
    """JSON can carry one; UTF-8 cannot."""
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path))
    assert tokenizer.encode("a\ud83d!") == tokenizer.encode("a\ufffd!")


def test_special_tokens_are_parsed_and_not_shown(tmp_path: Path) -> None:
    """Written out in a text they are one id, which has no text."""
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path))
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids == [IM_START, ord("a"), IM_END]
    assert tokenizer.decode(ids) == "a"


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_special_tokens_may_be_spelled(tmp_path: Path, kind: Callable[[], tokenizers.Tokenizer]) -> None:
    """As transformers shows them with skip_special_tokens=False; everything else stays as it is."""
    ours = load(kind, tmp_path)
    reference = theirs(write_settings(tmp_path, bos_token="<s>", eos_token="</s>"))
    ids = ours.encode("<s>hello é</s> hello<s></s>")
    assert ours.spelled.decode(ids) == reference.decode(ids)
    assert ours.spelled.special_ids == ours.special_ids
    assert [ours.spelled.bytes_of(id) for id in ours.special_ids] == [
        ours.token_of(id).encode() for id in ours.special_ids
    ]
    assert all(ours.bytes_of(id) == b"" for id in ours.special_ids)
    assert ours.spelled.spelled is ours.spelled


def test_some_decoders_put_spaces_between_special_tokens(tmp_path: Path) -> None:
    """BERT's does, those of language models do not; without special tokens there is nothing to space."""

    def bert() -> tokenizers.Tokenizer:
        backend = wordpiece()
        backend.add_special_tokens([AddedToken("[SEP]", special=True)])
        return backend

    assert load(bert, tmp_path / "bert").spaces_names
    assert not any(load(kind, tmp_path / kind.__name__).spaces_names for kind in (byte_level, sentencepiece, wordpiece))


def test_encoding_lets_other_threads_run(tmp_path: Path) -> None:
    """A long text is encoded in a thread of its own; the event loop's thread must not wait for it."""
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path))
    text = "hello world " * 50_000
    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        encoding = thread.submit(tokenizer.encode, text)
        longest, last = 0.0, time.monotonic()
        while not encoding.done():
            time.sleep(0.001)
            last, before = time.monotonic(), last
            longest = max(longest, last - before)
    assert len(encoding.result()) == len(text)
    assert longest < (time.monotonic() - began) / 2


def test_what_it_knows_of_itself(tmp_path: Path) -> None:
    """Size, BOS, special ids, and the bytes of each token."""
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (TINY_VOCAB, IM_START)
    assert sorted(tokenizer.special_ids) == [256, 257, 258]
    assert tokenizer.token_bytes == [*(bytes([byte]) for byte in range(256)), b"", b"", b""]


def test_ids_that_no_token_has_are_nothing(tmp_path: Path) -> None:
    """The model's vocabulary may be larger than the tokenizer's."""
    assert Tokenizer.load(write_byte_tokenizer(tmp_path)).decode([ord("a"), 5000]) == "a"


def test_no_bos_is_none(tmp_path: Path) -> None:
    """Not every tokenizer names one."""
    assert load(byte_level, tmp_path).bos_id is None


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    """Older repositories have only vocabulary files for a slow tokenizer."""
    (write_tiny_model(tmp_path, weights=False) / "tokenizer.json").unlink()
    with pytest.raises(StartError, match=r"has no tokenizer.json; write one with transformers .*tokenizer=DIR"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "No"}}'])
def test_a_broken_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    """Cut short by a full disk, or a pointer of Git LFS."""
    (write_byte_tokenizer(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(StartError, match=r"^\S*tokenizer.json is not a tokenizer \([^\n]*\); fetch the model again$"):
        Tokenizer.load(tmp_path)


def test_broken_settings_are_one_line(tmp_path: Path) -> None:
    """Named with the file."""
    (write_byte_tokenizer(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartError, match=r"tokenizer_config.json is not valid JSON \([^\n]*\); fetch the model again$"):
        Tokenizer.load(tmp_path)
