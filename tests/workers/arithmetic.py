"""A model that can be checked by hand: its next token is a sum over every token before it, read out of the KV cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from toka.wire import Admit, Sampling, pack
from workers.attention.base import Attention
from workers.batch import Batch
from workers.head import TorchHead
from workers.layers.rope import Rotation
from workers.slots import Slots
from workers.step import Step

VOCAB = 97
UNMOVED = Rotation(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))


def following(tokens: Sequence[int]) -> int:
    """The greedy token after `tokens`."""
    return sum((place + 1) * token for place, token in enumerate(tokens)) % VOCAB


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` greedy tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class Sums:
    """Keeps what it is given in a cache of one number a token, and sums up each token's past."""

    tiles = None

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.page_size = page_size
        self.cache = torch.full(((num_blocks + 1) * page_size,), -1_000_003, dtype=torch.int64)
        self.batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        self.batch = batch

    def run(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int) -> Tensor:
        batch = self.batch
        assert batch is not None
        assert batch.bounds is not None
        self.cache[batch.writes] = k
        sums = []
        tables, page = batch.tables[batch.rows].tolist(), self.page_size
        most, sizes = [*batch.ends, *batch.bounds], [*batch.sizes, *[1] * len(batch.bounds)]
        for row, length in enumerate(batch.lengths.tolist()):
            assert length <= most[row]
            places = [tables[row][at // page] * page + at % page for at in range(length)]
            first = length - int(sizes[row])
            keys = self.cache[places].tolist()
            sums += [following(keys[: at + 1]) for at in range(first, length)]
        return torch.tensor(sums, dtype=torch.int64)


class Model:
    """Logits are 10 for the sum and 0 for the rest."""

    vocab_size = VOCAB

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return attention.run(tokens, tokens, tokens, UNMOVED, 0)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.one_hot(hidden, VOCAB).float() * 10


def build(max_slots: int = 4, max_blocks: int = 8, num_blocks: int = 16, page_size: int = 4) -> tuple[Slots, Step]:
    """Slots and a step of the arithmetic model over them."""
    slots = Slots(max_slots, max_blocks, num_blocks, page_size, torch.device("cpu"), VOCAB)
    model = Model()
    return slots, Step(model, Sums(num_blocks, page_size), slots, TorchHead(model, slots))


def admit(slot: int, ids: Sequence[int], blocks: Sequence[int], **fields: Any) -> Admit:
    """A greedy sequence, unless the fields say otherwise."""
    stops = pack(fields.pop("stops", ()))
    chosen = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
    sampling = Sampling(**({"temperature": 0.0} | chosen))
    return Admit(slot=slot, ids=pack(ids), blocks=pack(blocks), stops=stops, sampling=sampling, **fields)
