"""Strings to ids and back, by the tokenizer.json of a model folder."""

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken, decoders

from toka.errors import StartError
from toka.text.bound import Bound
from toka.text.files import read_json, special_tokens, token_text

_SURROGATE = re.compile("[\ud800-\udfff]")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The ids that transformers' AutoTokenizer gives for the same folder. Safe to use from several threads."""

    __slots__ = (
        "_backend",
        "_bound",
        "_spelled",
        "bos_id",
        "fallback_ids",
        "settings",
        "silent_ids",
        "special_ids",
        "token_bytes",
        "vocab_size",
    )

    def __init__(
        self, backend: tokenizers.Tokenizer, named: dict[str, str], settings: dict[str, Any] | None = None
    ) -> None:
        """`named` are the texts of the tokens that have a name, such as `bos_token`.

        `settings` is tokenizer_config.json, for those who ask.
        """
        self.settings = settings or {}
        self._backend = backend
        bos = named.get("bos_token")
        self.bos_id: int | None = backend.token_to_id(bos) if bos is not None else None
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        """Ids are below it. The model's own may be larger: rows that no token has are padding."""
        self.special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        """Ids that stand for no text of their own, such as the end of a turn."""
        self.silent_ids = self.special_ids
        """Ids that have no text in an answer: the special ones, or none in a tokenizer that is `spelled`."""
        self._spelled: Self | None = None
        byte_of = _bytes_of_characters()
        self._bound = Bound(backend, vocab, frozenset(byte_of[token] for token in byte_of.keys() & vocab.keys()))
        self.token_bytes: list[bytes] | None = None
        """The bytes of each token where the text is their concatenation, else None; empty for `silent_ids`."""
        self.fallback_ids: frozenset[int] = frozenset()
        """Tokens such as `<0xE2>`, a run of which is decoded as a whole."""
        if isinstance(backend.decoder, decoders.ByteLevel):
            self.token_bytes = _byte_table(vocab, self.vocab_size, self.silent_ids)
        else:
            self.fallback_ids = frozenset(id for token, id in vocab.items() if _FALLBACK.fullmatch(token))

    def __repr__(self) -> str:
        kind = "bytes" if self.token_bytes is not None else type(self._backend.decoder).__name__
        return f"<Tokenizer {self.vocab_size} tokens, decoder {kind}>"

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The tokenizer of a model folder. Raises StartError if there is none that can be used."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise StartError(
                f"{folder} has no tokenizer.json; write one with transformers"
                " (AutoTokenizer.from_pretrained(…).save_pretrained(…)), or name another folder: tokenizer=DIR"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # `tokenizers` raises Exception itself
            reason = " ".join(str(error).split())
            raise StartError(f"{file} is not a tokenizer ({reason}); fetch the model again") from None
        # Cutting and padding are for training; requests are refused when they are too long, never cut.
        backend.no_truncation()
        backend.no_padding()
        settings = read_json(folder / "tokenizer_config.json")
        named = special_tokens(folder)
        _add_missing(backend, settings, named)
        backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
        return cls(backend, named, settings)

    @property
    def spelled(self) -> Self:
        """The same tokenizer, but that special tokens have text in an answer: their names."""
        if self._spelled is None:
            spelled = copy.copy(self)
            spelled.silent_ids = frozenset()
            if self.token_bytes is not None:
                byte_of = _bytes_of_characters()
                spelled.token_bytes = list(self.token_bytes)
                for id in self.special_ids:
                    spelled.token_bytes[id] = _bytes_of_token(self.token_of(id), byte_of)
            spelled._spelled = spelled
            self._spelled = spelled
        return self._spelled

    @property
    def spaces_names(self) -> bool:
        """Whether there are spaces between special tokens where they are spelled: not with byte-level decoders."""
        ids = [*self.special_ids][:1] * 2
        return self.spelled.decode(ids) != "".join(map(self.token_of, ids))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens that are written out in it become their ids.

        Lone surrogates, which JSON allows and UTF-8 does not, count as U+FFFD. A rendered chat template brings its own
        special tokens: encode it with `add_special_tokens=False`.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = _SURROGATE.sub("\ufffd", text)
        # Not `encode`, which keeps the interpreter to itself while it runs: a batch does not.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def fewest(self, text: str) -> int:
        """Tokens that `text` has at least, known without encoding it; 0 where nothing is known."""
        return self._bound.fewest(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without `silent_ids`, and without ids that no token has."""
        return self._backend.decode(ids, skip_special_tokens=bool(self.silent_ids))

    def bytes_of(self, id: int, first: bool = False) -> bytes:
        """What `id` adds to the bytes of a text, which it begins if `first`; nothing for `silent_ids`.

        Exact for byte-level decoders. Others may change a token by its neighbours: then what it adds by itself.
        """
        if self.token_bytes is not None:
            return self.token_bytes[id] if id < len(self.token_bytes) else b""
        token = self._backend.id_to_token(id)
        if token is None or id in self.silent_ids:
            return b""
        if id in self.fallback_ids:
            return bytes([int(token[3:5], 16)])
        if first or "\u2581" not in token:
            return self.decode([id]).encode()
        return token.replace("\u2581", " ").encode()

    def token_of(self, id: int) -> str:
        """What the vocabulary calls `id`; empty if it has no such id."""
        return self._backend.id_to_token(id) or ""


def _add_missing(backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json knows, as transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in _listed(settings, named) if token.content not in known]
    if missing:
        backend.add_tokens(missing)


def _listed(settings: dict[str, Any], named: dict[str, str]) -> Iterator[AddedToken]:
    """Tokens that tokenizer_config.json lists, in the order in which new ones get their ids."""
    listed = settings.get("added_tokens_decoder") or {}
    for key in sorted((key for key in listed if key.isdigit()), key=int):
        token, text = listed[key], token_text(listed[key])
        if text is not None and isinstance(token, dict):
            flags = {name: bool(token[name]) for name in _FLAGS if name in token}
            yield AddedToken(text, special=bool(token.get("special")) or text in named.values(), **flags)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra_texts = [token_text(token) for token in extra] if isinstance(extra, list) else []
    for text in (*named.values(), *extra_texts):
        if text is not None:
            yield AddedToken(text, special=True)


def _byte_table(vocab: dict[str, int], size: int, silent: frozenset[int]) -> list[bytes]:
    """What each id adds to the bytes of a text whose decoder is ByteLevel.

    A token's characters stand for bytes; one with any other character in it is a token in plain text.
    """
    byte_of = _bytes_of_characters()
    table = [b""] * size
    for token, id in vocab.items():
        if id not in silent:
            table[id] = _bytes_of_token(token, byte_of)
    return table


def _bytes_of_token(token: str, byte_of: dict[str, int]) -> bytes:
    """A token with a character that stands for no byte is plain text."""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        return token.encode()


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: a byte that is printed in Latin-1 stands for itself, the others are U+0100 and on, in order."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
