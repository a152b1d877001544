"""What the engine reads of a model folder, and which folders it refuses."""

import json
from pathlib import Path

import pytest

from tests.fakes import END_OF_TEXT, IM_END, TINY_VOCAB, write_tiny_model
from toka.errors import StartError
from toka.model import SUPPORTED, ModelFolder
from toka.request import Sampling


def write(folder: Path, **changes: object) -> Path:
    """A folder whose config.json has these fields; None removes one."""
    write_tiny_model(folder, weights=False)
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def generation(folder: Path, **fields: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def refusal(folder: Path) -> str:
    """The one line with which the folder is refused."""
    with pytest.raises(StartError) as caught:
        ModelFolder.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_read(tmp_path: Path) -> None:
    """Shape, ends and name, from its JSON files alone."""
    assert ModelFolder.load(write_tiny_model(tmp_path / "tiny", weights=False)) == ModelFolder(
        path=(tmp_path / "tiny").resolve(),
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        vocab_size=TINY_VOCAB,
        max_position_embeddings=2048,
        eos_ids=(IM_END,),
        generation_defaults=Sampling(),
        unserved_defaults=(),
        served_name="tiny",
    )


def test_ends_come_from_every_place_that_names_one(tmp_path: Path) -> None:
    """config.json, generation_config.json (number or list), the tokenizer's eos_token, the template's end of turn."""
    folder = generation(write(tmp_path, eos_token_id=7), eos_token_id=[9, 8, 7])
    assert ModelFolder.load(folder).eos_ids == (7, 8, 9, IM_END)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["eos_token"] = {"content": "<|endoftext|>", "lstrip": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ModelFolder.load(folder).eos_ids == (7, 8, 9, END_OF_TEXT, IM_END)
    (folder / "chat_template.jinja").unlink()
    assert ModelFolder.load(generation(folder)).eos_ids == (7, END_OF_TEXT)


def test_a_model_may_know_no_end(tmp_path: Path) -> None:
    """Then answers end by length."""
    folder = generation(write(tmp_path, eos_token_id=None))
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        (folder / name).unlink()
    assert ModelFolder.load(folder).eos_ids == ()


def test_sampling_defaults_are_those_of_the_makers(tmp_path: Path) -> None:
    """What generation_config.json leaves out is as OpenAI has it."""
    folder = generation(write(tmp_path), temperature=0.6, top_k=20, do_sample=True)
    assert ModelFolder.load(folder).generation_defaults == Sampling(temperature=0.6, top_k=20)
    folder = generation(folder, top_p=0.9, min_p=0.05, repetition_penalty=1.1, do_sample=False)
    assert ModelFolder.load(folder).generation_defaults == Sampling(top_p=0.9, min_p=0.05, repetition_penalty=1.1)
    assert "'hot' for temperature" in refusal(generation(folder, temperature="hot"))
    assert "0 for repetition_penalty" in refusal(generation(folder, repetition_penalty=0))


def test_what_the_makers_ask_for_in_vain_is_known(tmp_path: Path) -> None:
    """To be said at the start: defaults must not be dropped in silence. Values that ask for nothing are not."""
    folder = generation(write(tmp_path), no_repeat_ngram_size=3, eta_cutoff=0.0, num_beams=1, typical_p=None)
    assert ModelFolder.load(folder).unserved_defaults == ("no_repeat_ngram_size=3",)


def test_a_repository_of_the_hub_keeps_its_name(tmp_path: Path) -> None:
    """Its folder in the cache is named after a commit."""
    folder = write(tmp_path / "models--owner--name" / "snapshots" / "0123abcd")
    assert ModelFolder.load(folder).served_name == "owner/name"


def test_what_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    """Missing, empty, broken."""
    assert refusal(tmp_path / "nowhere").endswith("no such folder")
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type":')
    assert "is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "holds no JSON object" in refusal(tmp_path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    """With those that are served."""
    assert refusal(write(tmp_path, model_type="mamba")).endswith(
        "model_type mamba is not supported; supported are " + ", ".join(SUPPORTED)
    )


@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, "8", True])
def test_sizes_must_be_there(tmp_path: Path, name: str, value: object) -> None:
    """And be numbers."""
    assert f"for {name}, a whole number from 1 on is needed" in refusal(write(tmp_path, **{name: value}))


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """They would be read as something else."""
    assert "quantization_config (awq)" in refusal(write(tmp_path, quantization_config={"quant_method": "awq"}))


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    """auto_map is how a folder asks for trust_remote_code."""
    assert "trust_remote_code" in refusal(write(tmp_path, auto_map={"AutoModel": "modeling.Mine"}))


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": 512},
        {"model_type": "mistral", "max_position_embeddings": 32768},
        {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "qwen3", "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_a_window_that_matters_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    """Attention here sees the whole sequence."""
    assert "sliding-window attention" in refusal(write(tmp_path, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "max_position_embeddings": 4096},
        {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 28},
        {"model_type": "qwen3", "sliding_window": 512, "layer_types": ["full_attention", "full_attention"]},
        {"model_type": "llama", "sliding_window": 512},
    ],
)
def test_a_window_that_is_not_used_does_no_harm(tmp_path: Path, fields: dict[str, object]) -> None:
    """Switched off, as long as the context, or unknown to the architecture."""
    assert ModelFolder.load(write(tmp_path, **fields)).model_type == fields["model_type"]


def test_a_null_window_is_none(tmp_path: Path) -> None:
    """Mistral's newer models write it so; only an absent one stands for 4096."""
    folder = write(tmp_path, model_type="mistral", max_position_embeddings=32768)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    assert ModelFolder.load(folder).max_position_embeddings == 32768


@pytest.mark.model
def test_the_default_model(smollm2: Path) -> None:
    """SmolLM2-135M-Instruct ends its turns with `<|im_end|>`."""
    model = ModelFolder.load(smollm2)
    assert (model.served_name, model.eos_ids, model.vocab_size) == ("SmolLM2-135M-Instruct", (2,), 49152)
    assert model.max_position_embeddings == 8192
