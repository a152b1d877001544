"""Small models and tokenizers for tests, in the shape of real model folders."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = 256
IM_START = 257
IM_END = 258
"""Ids of the byte tokenizer's special tokens. The id of any byte is the byte itself."""
TINY_VOCAB = 259
SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_byte_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `folder`, and return it.

    A token for every byte (its id is the byte) and three special tokens; the template is ChatML.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return folder


def write_tiny_model(
    folder: Path,
    *,
    vocab_size: int = TINY_VOCAB,
    max_position_embeddings: int = 2048,
    seed: int = 0,
    weights: bool = True,
    **changes: object,
) -> Path:
    """Write a Llama of random weights with the byte tokenizer to `folder`, and return it.

    Hidden size 64, 2 layers, 4 heads, 2 of keys and values, float32. The weights are large enough that the best two
    logits are seldom near each other. `changes` replace fields of config.json. Without `weights` neither torch nor
    transformers is imported, and model.safetensors is not written.
    """
    write_byte_tokenizer(folder)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": IM_END,
        "dtype": "float32",
        **changes,
    }
    if weights:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            LlamaForCausalLM(LlamaConfig.from_dict(config)).save_pretrained(folder)
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": IM_START, "eos_token_id": IM_END, "pad_token_id": IM_END}
    _write_json(folder / "generation_config.json", generation)
    return folder


def byte_characters() -> list[str]:
    """The character that stands for each byte in the vocabulary of a byte-level tokenizer (GPT-2's table): the byte's
    own where that is printed, else the next one from U+0100 on."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters, unprinted = [], 0
    for byte in range(256):
        characters.append(chr(byte if byte in printed else 256 + unprinted))
        unprinted += byte not in printed
    return characters


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
