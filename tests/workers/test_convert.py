"""GGUF files become the folders that transformers would make of them."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.fakes import CHATML, SPECIAL, byte_characters
from workers import convert

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 64, 96, 4, 2
TOKENS = [*byte_characters(), *SPECIAL, "th", "Ġt"]
PROJECTIONS = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def write_gguf(path: Path, architecture: str = "llama", extra: str | None = None, cut: int | None = None) -> Path:
    """A small model of random weights, some of them quantized; `extra` names one more tensor."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * 256 + [3] * len(SPECIAL) + [1] * 2)
    writer.add_token_merges(["t h", "Ġ t"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_unk_token_id(256)
    writer.add_chat_template(CHATML)
    random = np.random.default_rng(0)

    def add(name: str, shape: tuple[int, ...], type: gguf.GGMLQuantizationType) -> None:
        values = random.normal(size=shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", quantize(values, type), raw_dtype=type)

    plain, packed = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
    add("token_embd", (len(TOKENS), HIDDEN), packed)
    add("output_norm", (HIDDEN,), plain)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm", (HIDDEN,), plain)
        add(f"blk.{layer}.ffn_norm", (HIDDEN,), plain)
        for name, shape in PROJECTIONS.items():
            add(f"blk.{layer}.{name}", shape, packed)
    if extra is not None:
        add(extra, (HIDDEN,), plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if cut is not None:
        path.write_bytes(path.read_bytes()[:cut])
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    made = file.parent / "made" / "tiny"
    assert convert.main([str(file), str(made)]) == 0
    return made


def test_weights_are_those_of_transformers_bit_for_bit(file: Path, folder: Path) -> None:
    """Dequantized, rounded to bfloat16 and reordered for the rotary embedding in the same way."""
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    theirs.pop("lm_head.weight")  # tied to the embedding
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [
        name for name in ours if ours[name].dtype != torch.bfloat16 or not torch.equal(ours[name], theirs[name])
    ] == []


def test_the_config_means_what_transformers_reads_in_the_file(file: Path, folder: Path) -> None:
    """All that says how the model computes."""
    ours = AutoConfig.from_pretrained(folder).to_dict()
    theirs = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    ignored = {"_name_or_path", "_model_name_or_path", "dtype", "unk_token_id", "transformers_version", "architectures"}
    names = (ours.keys() | theirs.keys()) - ignored
    assert {name: ours.get(name) for name in names} == {name: theirs.get(name) for name in names}


def test_the_tokenizer_comes_along(file: Path, folder: Path) -> None:
    """With its special tokens and its chat template in the usual files."""
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "the 12 é<|im_end|>"
    assert ours(text).input_ids == theirs(text).input_ids
    assert (folder / "chat_template.jinja").read_text() == CHATML
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 258


def test_it_says_how_far_it_has_come(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a tensor, for the engine's progress bar."""
    convert.main([str(file), str(tmp_path / "made")])
    lines = capsys.readouterr().out.splitlines()
    count = 2 + LAYERS * (2 + len(PROJECTIONS))
    assert lines == [f"{done}/{count}" for done in range(1, count + 1)]


def complaint(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr with which it ends."""
    assert convert.main([str(file), str(file.parent / "made")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said.strip()


def test_other_architectures_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only llama's layout of weights is known."""
    assert "architecture falcon; only llama" in complaint(write_gguf(tmp_path / "x.gguf", "falcon"), capsys)


@pytest.mark.parametrize("extra", ["blk.0.attn_q_norm", "rope_freqs"])
def test_tensors_that_llama_lacks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str) -> None:
    """Leaving one out would make another model."""
    assert "cannot be converted" in complaint(write_gguf(tmp_path / "x.gguf", extra=extra), capsys)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, cut short, or something else."""
    assert "does not exist" in complaint(tmp_path / "nothing.gguf", capsys)
    assert "fetch it again" in complaint(write_gguf(tmp_path / "short.gguf", cut=60_000), capsys)
    (tmp_path / "text.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "is not a GGUF file" in complaint(tmp_path / "text.gguf", capsys)


def test_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    """Anything but two arguments gets the usage."""
    assert convert.main(["one"]) == 2
    assert capsys.readouterr().err == "usage: python -m workers convert FILE.gguf FOLDER\n"
