"""A paged cache and attention around a model, with block ids in no order, for tests that run rows of any lengths."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers import weights
from workers.attention.select import select
from workers.batch import Batch
from workers.kvcache import KVCache
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Decoder:
    """The model of a folder."""
    return weights.load(folder, ModelConfig.load(folder), dtype, device, lambda done, total: None, "auto")


def moved(batch: Batch, device: torch.device) -> Batch:
    """The same batch with its tensors on a device."""
    fields: dict[str, Any] = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    tensors = {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor)}
    return Batch(**(fields | tensors))


class Pages:
    """Block tables of named rows, and what each row holds."""

    def __init__(self, num_blocks: int, page_size: int, seed: int = 0) -> None:
        self.page_size = page_size
        self.spare = num_blocks
        self.lengths: dict[str, int] = {}
        self._tables: dict[str, list[int]] = {}
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def batch(self, chunks: Mapping[str, Sequence[int]], decodes: Mapping[str, int]) -> Batch:
        """One step that extends rows by chunks, and others by one token. The last token of each is sampled."""
        runs = [(row, list(tokens)) for row, tokens in chunks.items()]
        runs += [(row, [token]) for row, token in decodes.items()]
        positions: list[int] = []
        writes: list[int] = []
        for row, tokens in runs:
            past = self.lengths.get(row, 0)
            table = self._tables.setdefault(row, [])
            self.lengths[row] = past + len(tokens)
            while len(table) * self.page_size < self.lengths[row]:
                table.append(self._free.pop())
            own = range(past, self.lengths[row])
            positions += own
            writes += [table[at // self.page_size] * self.page_size + at % self.page_size for at in own]
        tables = [self._tables[row] for row, _ in runs]
        width = max(map(len, tables))
        firsts = np.cumsum([0, *(len(tokens) for _, tokens in runs)])
        lengths = np.array([self.lengths[row] for row, _ in runs])
        count = len(chunks)
        return Batch(
            tokens=torch.tensor([token for _, tokens in runs for token in tokens]),
            positions=torch.tensor(positions),
            writes=torch.tensor(writes),
            rows=torch.arange(len(runs)),
            tables=torch.tensor([table + [self.spare] * (width - len(table)) for table in tables], dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            samples=torch.tensor(firsts[1:] - 1),
            sizes=np.diff(firsts)[:count],
            ends=lengths[:count],
            bounds=lengths[count:],
        )


class Runner:
    """A model over pages, on the model's device."""

    def __init__(
        self, model: Decoder, num_blocks: int = 64, page_size: int = 4, seed: int = 0, attention: str = "torch"
    ) -> None:
        self.model = model
        self.pages = Pages(num_blocks, page_size, seed)
        self.cache = KVCache(model.config, num_blocks, page_size, model.head_VC.dtype, model.head_VC.device)
        self.attention = select(attention, self.cache, model.config, max_rows=64, hydragen=False)

    @torch.inference_mode()
    def step(self, chunks: Mapping[str, Sequence[int]], decodes: Mapping[str, int] | None = None) -> Tensor:
        """float32[T, vocab]: the logits of every token of the step."""
        batch = moved(self.pages.batch(chunks, decodes or {}), self.model.head_VC.device)
        self.attention.plan(batch)
        return self.model.logits(self.model.forward(batch.tokens, batch.positions, self.attention)).float()
