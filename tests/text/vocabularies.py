"""Small tokenizers of the kinds that real models have, one for each way in which ids become text."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tests.fakes import byte_characters, write_byte_tokenizer
from toka.text.tokenizer import Tokenizer

SPACE = "▁"


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: tokens are bytes. With an added token in plain text, and one in characters that stand for bytes."""
    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    merges = [(characters[0xE2], characters[0x82]), (characters[ord("t")], characters[ord("h")]), ("Ġ", "th")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("plain text"), AddedToken("é")])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's kind: `▁` for a space, bytes for what has no token, the text's first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [SPACE, "a", "b", "e", "l", "o", "h", SPACE + "h", SPACE * 2, SPACE + "he", "lo", "é", "☃"]
    merges = [(SPACE, "h"), (SPACE, SPACE), (SPACE + "h", "e"), ("l", "o")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id for id, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Unigram models' kind: every `▁` of the first token goes."""
    pieces = ["<unk>", SPACE, "a", "b", SPACE + "a", SPACE * 2, "ab", "é"]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(piece, -float(id)) for id, piece in enumerate(pieces)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    """BERT's kind: a space before every token that does not start with `##`, and none before punctuation."""
    pieces = ["[UNK]", "a", "##b", "cat", ".", "'", "##s", "do", "n't"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({piece: id for id, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_ends() -> tokenizers.Tokenizer:
    """The first BPE models' kind: `</w>` is a space, but for the text's last token."""
    pieces = ["<unk>", "a", "b</w>", "ab</w>", "c"]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def no_decoder() -> tokenizers.Tokenizer:
    """Without a decoder, tokens are joined with spaces."""
    pieces = ["<unk>", "a", "b", "c"]
    return tokenizers.Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="<unk>"))


KINDS: list[Callable[[], tokenizers.Tokenizer]] = [
    byte_level,
    sentencepiece,
    metaspace,
    wordpiece,
    word_ends,
    no_decoder,
]


def load(kind: Callable[[], tokenizers.Tokenizer], folder: Path) -> Tokenizer:
    """The tokenizer as it comes out of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kind().save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@cache
def loaded(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that stays as it is, loaded once."""
    return Tokenizer.load(folder)


def load_bytes(folder: Path) -> Tokenizer:
    """The byte tokenizer of `tests.fakes`: the id of a byte is the byte."""
    return Tokenizer.load(write_byte_tokenizer(folder))
