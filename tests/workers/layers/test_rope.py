"""Rotary embeddings against transformers' own."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.workers.models.test_config import LLAMA
from workers.layers.rope import Rope
from workers.models.config import ModelConfig
from workers.models.fields import Fields

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "rope_theta": 500_000.0},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.0},
        LLAMA3 | {"original_max_position_embeddings": 100},
        LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0},
        LLAMA3,
        YARN,
        YARN | {"rope_theta": 1_000_000.0, "beta_fast": 8.0, "beta_slow": 2.0},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
        YARN | {"truncate": False},
    ],
    ids=str,
)
def test_rotations_are_those_of_transformers(rope: dict[str, Any]) -> None:
    """Every scaling, at positions from the first to the last of the context."""
    fields = LLAMA | {"head_dim": 64, "rope_parameters": {"rope_theta": 10_000.0} | rope}
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(dict(fields)))
    positions = torch.tensor([0, 1, 2, 30, 255, 511])
    x = torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(x, positions[None])
    want, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    config = ModelConfig.parse(Fields(Path("config.json"), fields))
    got = Rope.build(config, torch.device("cpu"))(positions)(x)
    torch.testing.assert_close(got, want[0], atol=1e-5, rtol=1e-5)


def test_the_rotation_is_computed_in_float32() -> None:
    """Half-precision heads are rotated by exact angles and rounded once."""
    config = ModelConfig.parse(Fields(Path("config.json"), LLAMA))
    rotation = Rope.build(dataclasses.replace(config, rope_base=100.0), torch.device("cpu"))(torch.tensor([499]))
    x = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = rotation(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, rotation(x.float()).to(torch.bfloat16), atol=0, rtol=0)
