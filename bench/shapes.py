"""Model folders of known shapes without weights, for `load_format=dummy`: what is measured then is the engine.

    python bench/shapes.py 1b FOLDER        write FOLDER/config.json and what else a server reads
    python bench/shapes.py 8b FOLDER
    python bench/shapes.py tiny FOLDER

`1b` and `8b` have the shapes of Llama-3.2-1B and Llama-3.1-8B, `tiny` runs anywhere. The tokenizer is generated: a
token for every byte, then made-up words of two letters and more, and at the end special tokens with Llama 3's names.
Every id decodes to a text that no other has, and every text can be encoded.
"""

import itertools
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
"""Special tokens by their place after the ordinary ones; the others are `<|reserved_special_token_N|>`."""
ENDS = (1, 8, 9)
"""Of these, the ones that end an answer."""
TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)


class Shape(NamedTuple):
    """A Llama. Sizes count elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    specials: int
    """How many of the vocabulary are special tokens: its last ones."""
    context: int
    tied: bool
    rope_factor: float
    """By which the context was extended from 8,192 tokens ("llama3" scaling); 1: it was not."""


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128_256, 256, 131_072, tied=True, rope_factor=32.0),
    "8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, 256, 131_072, tied=False, rope_factor=8.0),
    "tiny": Shape(2, 64, 4, 2, 16, 128, 512, 16, 8192, tied=True, rope_factor=1.0),
}


def main() -> int:
    """Write the folder that was asked for; returns the exit code."""
    words = sys.argv[1:]
    if len(words) != 2 or words[0] not in SHAPES:
        sys.stdout.write(__doc__ or "")
        return 0 if words == ["--help"] else 2
    sys.stdout.write(f"{write(words[0], Path(words[1]))}\n")
    return 0


def write(name: str, folder: Path) -> Path:
    """Write the shape `name` to `folder`, which is made if need be, and return it."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    names = special_names(shape.specials)
    first = shape.vocab - shape.specials
    tokenizer(shape.vocab, names).save(str(folder / "tokenizer.json"), pretty=False)
    ends = [first + place for place in ENDS]
    _write_json(folder / "config.json", config(shape))
    _write_json(
        folder / "generation_config.json", {"bos_token_id": first, "eos_token_id": ends, "pad_token_id": first + 4}
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": NAMED[0],
            "eos_token": NAMED[9],
            "pad_token": NAMED[4],
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.context,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def config(shape: Shape) -> dict[str, object]:
    """What config.json says."""
    first = shape.vocab - shape.specials
    rope: dict[str, object] = {"rope_theta": 500_000.0, "rope_type": "default"}
    if shape.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": first,
        "eos_token_id": [first + place for place in ENDS],
        "pad_token_id": first + 4,
        "dtype": "bfloat16",
    }


def tokenizer(vocab_size: int, specials: list[str]) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` entries, of which `specials` are the last.

    Words of two and of three letters have merges, so that texts become about half as many tokens as letters; longer
    ones are only decoded.
    """
    words = list(itertools.islice(_words(), vocab_size - len(specials) - 256))
    vocab = {token: id for id, token in enumerate([*_bytes(), *words])}
    merges = [(word[:-1], word[-1]) for word in words if len(word) < 4 and word.isascii()]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    assert made.get_vocab_size() == vocab_size
    return made


def special_names(count: int) -> list[str]:
    """The names of so many special tokens, in order."""
    numbers = itertools.count()
    return [NAMED.get(place) or f"<|reserved_special_token_{next(numbers)}|>" for place in range(count)]


def _words() -> Iterator[str]:
    """Words without end, short ones first; those of four letters and more also behind a space (Ġ)."""
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            word = "".join(letters)
            yield word
            if length > 3:
                yield "\u0120" + word


def _bytes() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
