"""Reading config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.errors import WorkerError
from workers.models.config import Llama3Scaling, ModelConfig, YarnScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def read(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return ModelConfig.load(folder)


def test_sizes_and_defaults(tmp_path: Path) -> None:
    """What config.json leaves out has transformers' defaults."""
    config = read(tmp_path, LLAMA)
    assert (config.head_dim, config.qkv_size, config.max_model_len) == (16, 128, 512)
    assert (config.rope_base, config.rope_scaling, config.norm_eps) == (10_000, None, 1e-6)
    flags = (config.tied_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert not any(flags)


def test_families_set_their_flags(tmp_path: Path) -> None:
    """Qwen2 has biases on queries, keys and values alone; Qwen3 normalises queries and keys and has wide heads."""
    qwen2 = read(tmp_path, QWEN2 | {"attention_bias": False})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, QWEN3)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    llama = read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert llama.qkv_bias
    assert llama.output_bias
    assert llama.mlp_bias


def test_an_absent_architecture_follows_from_the_model_type(tmp_path: Path) -> None:
    """`model_type` alone will do."""
    assert read(tmp_path, LLAMA | {"architectures": None}).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_the_base_of_the_rotation_in_old_places_and_new(tmp_path: Path, fields: dict[str, Any]) -> None:
    """`rope_theta` of older files, `rope_parameters` of transformers 5, which wins."""
    assert read(tmp_path, LLAMA | fields).rope_base == 5e5


def test_scaling_in_old_places_and_new(tmp_path: Path) -> None:
    """`rope_scaling` with `type`, or `rope_parameters` with `rope_type`; the old context length defaults to the new."""
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    want = Llama3Scaling(8.0, 1.0, 4.0, 64)
    assert read(tmp_path, LLAMA | {"rope_scaling": {"type": "llama3"} | llama3}).rope_scaling == want
    assert read(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "llama3"} | llama3}).rope_scaling == want
    yarn = read(tmp_path, LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 1.0}}).rope_scaling
    assert yarn == YarnScaling(1.0, 512, 32, 1, 1.0, True)


def test_dynamic_scaling_is_none_within_the_context(tmp_path: Path) -> None:
    """It only changes sequences longer than max_position_embeddings, which are not served."""
    config = read(tmp_path, LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert config.rope_scaling is None
    assert config.max_model_len == 512


@pytest.mark.parametrize(
    "fields",
    [
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 512},
        MISTRAL,
        QWEN2 | {"sliding_window": 128},
        QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2},
        QWEN3 | {"sliding_window": 128, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_that_changes_nothing_is_accepted(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A window as long as the context, or for no layer."""
    assert read(tmp_path, fields).max_model_len == 512


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (LLAMA | {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported. Supported: Llama"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not"),
        (LLAMA | {"architectures": [], "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        (LLAMA | {"model_type": "qwen2"}, "does not go with model_type 'qwen2'"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        (LLAMA | {"head_dim": 15}, "odd"),
        (LLAMA | {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size is '64'"),
        (LLAMA | {"vocab_size": True}, "vocab_size is True"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA | {"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        (LLAMA | {"rope_parameters": []}, "rope_parameters is"),
        (LLAMA | {"rope_theta": 1}, "rope_theta is 1"),
        (LLAMA | {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between layers"),
        (MISTRAL | {"max_position_embeddings": 8192}, r"sliding-window attention \(over 4096"),
        (MISTRAL | {"sliding_window": 128}, r"sliding-window attention \(over 128"),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, "sliding-window"),
        (QWEN3 | {"sliding_window": 128, "layer_types": ["sliding_attention"]}, "sliding-window"),
    ],
)
def test_what_is_not_computed_right_is_refused(tmp_path: Path, fields: dict[str, Any], what: str) -> None:
    """Each refusal is one line that names the file and the field."""
    with pytest.raises(WorkerError, match=what) as error:
        read(tmp_path, fields)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    """Truncated, empty, binary or hostile files are named."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WorkerError, match=r"config\.json .*download the model again"):
        ModelConfig.load(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    """The message says what kind of folder is wanted."""
    with pytest.raises(WorkerError, match=r"has no config\.json: give the folder of a Hugging Face model"):
        ModelConfig.load(tmp_path)
