"""How few tokens a text can have, so that one that is far too long need not be encoded to be refused."""

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

COMPOSED = 4
"""Characters that NFC joins into one at most."""
ENDINGS = frozenset(range(0x80, 0xC0))
"""Bytes that end every character beyond ASCII."""


class Bound:
    """No token stands for more characters than the longest one has. That says something of byte-level BPE where nothing
    swallows text before it, which most models have; of other tokenizers nothing is known."""

    __slots__ = ("_longest", "_lost")

    def __init__(self, backend: tokenizers.Tokenizer, vocab: dict[str, int], single: frozenset[int]) -> None:
        """`vocab` is the backend's, `single` the bytes that have a token of their own."""
        self._longest = 0
        """Characters that one token stands for at most; 0: unknown."""
        if (
            isinstance(backend.model, models.BPE)
            and isinstance(backend.decoder, decoders.ByteLevel)
            and isinstance(backend.normalizer, normalizers.NFC | None)
            and _keeps_all(backend.pre_tokenizer)
            and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
            and single >= ENDINGS
        ):
            self._longest = max(map(len, vocab)) * (1 if backend.normalizer is None else COMPOSED)
        self._lost = [chr(byte) for byte in range(0x80) if byte not in single]
        """Characters that some vocabularies lack: they vanish."""

    def fewest(self, text: str) -> int:
        """Tokens that `text` has at least; 0 where nothing is known."""
        if not self._longest:
            return 0
        return -(-(len(text) - sum(map(text.count, self._lost))) // self._longest)


def _keeps_all(splitter: pre_tokenizers.PreTokenizer | None) -> bool:
    """Whether all that goes into a pre-tokenizer comes out of it, at the end as bytes."""
    if splitter is None:
        return False
    state = json.loads(splitter.__getstate__())
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    whole = all(
        part["type"] in ("ByteLevel", "Digits") or (part["type"] == "Split" and part["behavior"] != "Removed")
        for part in parts
    )
    return whole and parts[-1]["type"] == "ByteLevel"
