"""Tiny random models of every architecture, computed by transformers, for tests to compare with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_CLASSES: dict[str, tuple[type[Any], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_SMALL = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"type": "llama", "num_hidden_layers": 3},
    "llama, tied": {"type": "llama", "tie_word_embeddings": True},
    "llama, biases": {"type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, one head each": {"type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4},
    "llama, linear": {"type": "llama", "rope": {"rope_type": "linear", "factor": 4.0}},
    "llama, dynamic": {"type": "llama", "rope": {"rope_type": "dynamic", "factor": 4.0}},
    "llama, llama3": {
        "type": "llama",
        "rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama, yarn": {
        "type": "llama",
        "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "mistral": {"type": "mistral", "sliding_window": None},
    "qwen2": {"type": "qwen2"},
    "qwen3": {"type": "qwen3", "tie_word_embeddings": True},
    "qwen3, biases": {"type": "qwen3", "attention_bias": True},
}
"""Name → fields of config.json. `rope` goes over a rotation of base 10,000."""


def build(name: str) -> PreTrainedModel:
    """A model in float32, the same weights each time. Biases and norms are random too, so that none can be left out."""
    fields = _SMALL | MODELS[name]
    config_class, model_class = _CLASSES[fields.pop("type")]
    rope = {"rope_theta": 10_000.0, "rope_type": "default"} | fields.pop("rope", {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = model_class(config_class(**fields, rope_parameters=rope)).train(False)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.normal_(1.0 if parameter_name.endswith("norm.weight") else 0.0, 0.2)
    return model


def save(name: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Build and save a model; returns it."""
    model = build(name)
    model.save_pretrained(folder, **options)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """float32[len(tokens), vocab]."""
    result: Tensor = model(torch.tensor([list(tokens)], device=model.device)).logits[0]
    return result
