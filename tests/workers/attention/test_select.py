"""What is said where a backend cannot be had."""

import dataclasses
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.workers.attention.test_parity import CONFIG
from workers.attention.select import select
from workers.errors import WorkerError
from workers.kvcache import KVCache


def cache(head_dim: int, device: str) -> KVCache:
    """The outline of one, so that a GPU's needs no GPU."""
    shape = (2, 2, 4, CONFIG.num_kv_heads, head_dim)
    layer = SimpleNamespace(shape=shape, dtype=torch.float32, device=torch.device(device), is_cuda=device == "cuda")
    return cast(KVCache, SimpleNamespace(layers=[layer], page_size=4))


@pytest.mark.parametrize(
    ("name", "head_dim", "device", "hydragen", "words"),
    [
        ("auto", 16, "cpu", True, "use_hydragen=T needs a GPU"),
        ("torch", 16, "cuda", True, "attention_backend=auto or triton"),
        ("triton", 16, "cpu", False, "attention_backend=triton needs a GPU"),
        ("flashinfer", 64, "cuda", True, "attention_backend=auto or triton"),
        ("flashinfer", 64, "cuda", False, "bfloat16 or float16"),
        ("auto", 320, "cuda", False, "heads of at most 256 .* attention_backend=torch takes any"),
    ],
)
def test_what_cannot_be_had_is_one_line(name: str, head_dim: int, device: str, hydragen: bool, words: str) -> None:
    """It names the option, and one that would do."""
    config = dataclasses.replace(CONFIG, head_dim=head_dim)
    with pytest.raises(WorkerError, match=words):
        select(name, cache(head_dim, device), config, max_rows=4, hydragen=hydragen)
