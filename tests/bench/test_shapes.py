"""Model folders without weights are what servers and workers take."""

from pathlib import Path

import pytest

from bench.shapes import SHAPES, write
from toka.model import ModelFolder
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer
from workers.models.config import Llama3Scaling, ModelConfig


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shapes")
    return {name: write(name, root / name) for name in SHAPES}


@pytest.fixture(scope="module")
def big(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders["1b"])


@pytest.mark.parametrize("name", SHAPES)
def test_engine_and_worker_read_the_same_model(folders: dict[str, Path], name: str) -> None:
    """Vocabulary, context and ends; and the worker's sizes."""
    model, config = ModelFolder.load(folders[name]), ModelConfig.load(folders[name])
    shape = SHAPES[name]
    assert model.vocab_size == config.vocab_size == shape.vocab
    assert model.max_position_embeddings == config.max_model_len == shape.context
    first = shape.vocab - shape.specials
    assert model.eos_ids == (first + 1, first + 8, first + 9)
    assert (config.num_layers, config.hidden_size, config.head_dim) == (shape.layers, shape.hidden, shape.head_dim)
    assert (config.num_heads, config.num_kv_heads) == (shape.heads, shape.kv_heads)


def test_shapes_are_llamas(folders: dict[str, Path]) -> None:
    """As in Llama-3.2-1B and Llama-3.1-8B."""
    one, eight = ModelConfig.load(folders["1b"]), ModelConfig.load(folders["8b"])
    assert (one.num_layers, one.hidden_size, one.intermediate_size, one.head_dim) == (16, 2048, 8192, 64)
    assert (one.num_heads, one.num_kv_heads, one.vocab_size, one.tied_embeddings) == (32, 8, 128_256, True)
    assert one.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert (eight.num_layers, eight.hidden_size, eight.intermediate_size, eight.head_dim) == (32, 4096, 14_336, 128)
    assert (eight.num_heads, eight.num_kv_heads, eight.vocab_size, eight.tied_embeddings) == (32, 8, 128_256, False)
    assert eight.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("name", SHAPES)
def test_tokenizer_covers_the_vocabulary(folders: dict[str, Path], name: str) -> None:
    """Exactly as many tokens as the model has, each of other bytes; the last ones are special."""
    tokenizer, shape = Tokenizer.load(folders[name]), SHAPES[name]
    assert tokenizer.vocab_size == shape.vocab
    assert tokenizer.special_ids == frozenset(range(shape.vocab - shape.specials, shape.vocab))
    assert tokenizer.token_bytes is not None
    ordinary = tokenizer.token_bytes[: shape.vocab - shape.specials]
    assert len(set(ordinary)) == len(ordinary)
    assert all(ordinary)
    assert len({tokenizer.token_of(id) for id in range(shape.vocab)}) == shape.vocab


@pytest.mark.parametrize("text", ["Hello world, again", "né ☃ 你好\n\t", "", " ", "\x00\x7f", "the" * 1000])
def test_any_text_goes_there_and_back(big: Tokenizer, text: str) -> None:
    """Byte level: nothing is lost."""
    assert big.decode(big.encode(text)) == text


def test_words_are_fewer_tokens_than_letters(big: Tokenizer) -> None:
    """Short words are merged, so that texts are not as many tokens as bytes."""
    assert len(big.encode("something")) == 5


def test_chat_template_renders(folders: dict[str, Path]) -> None:
    """In Llama 3's form, whose marks are single tokens."""
    template = ChatTemplate.load(folders["tiny"])
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = Tokenizer.load(folders["tiny"]).encode(text, add_special_tokens=False)
    assert sum(id >= SHAPES["tiny"].vocab - SHAPES["tiny"].specials for id in ids) == 6
