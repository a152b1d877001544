"""One forward pass and what it does to the slots."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from workers import scores
from workers.attention.base import Attention
from workers.batch import Batch, Work, assemble, assemble_decode
from workers.compact import Longs
from workers.groups import Layout
from workers.scores import Asked, Outcome, Scores
from workers.slots import Roster, Slots


class Model(scores.Model, Protocol):
    """What a step needs of a model; `workers.models.decoder.Decoder` is one."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """int64[T], int64[T] → [T, hidden]."""


class Head(Protocol):
    """From hidden states to tokens; `workers.head.TorchHead` is one."""

    def sample(self, hidden: Tensor, roster: Roster) -> tuple[Tensor, tuple[Asked, Scores] | None]:
        """Choose a token for each of a roster's S slots, and let the slots know.

        [S, hidden] → int32[S], an id or NO_TOKEN for a slot that is dead; and the scores of those that ask.
        """


class Decodes(Protocol):
    """Forward passes of decoding rows that were recorded; `workers.graphs.Graphs` are."""

    most: int
    """Rows of the largest."""

    def forward(self, rows: Tensor, bounds: Longs, layout: Layout | None) -> Tensor:
        """int64[D] slots, their `Batch.bounds` and what they share → [D, hidden], which stands until the next call."""


class Mixes(Protocol):
    """Forward passes with chunks that were recorded; `workers.mixed.Mixed` are."""

    def takes(self, batch: Batch) -> bool:
        """Whether there is one for a batch."""

    def forward(self, batch: Batch) -> Tensor:
        """The hidden states of its samples, [S, hidden], which stand until the next call."""


class Step:
    """Runs steps of one model over one set of slots, all in the order of the calls."""

    def __init__(
        self,
        model: Model,
        attention: Attention,
        slots: Slots,
        head: Head,
        recorded: Decodes | None = None,
        mixed: Mixes | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._slots = slots
        self._head = head
        self._recorded = recorded
        self._mixed = mixed

    def run(self, work: Work) -> Outcome:
        """What the step samples and scores."""
        recorded, roster = self._recorded, work.roster
        prompts = None
        if work.chunks is not None:
            batch = assemble(work, self._slots)
            asked = work.chunks.prompts
            if asked is None and self._mixed is not None and self._mixed.takes(batch):
                hidden = self._mixed.forward(batch)
            else:
                hidden = self.forward(batch)
                if asked is not None:
                    # In slices of no more rows than may be sampled at once: so many logits are in the memory's plan.
                    prompts = asked, asked.score(self._model, hidden, self._slots.max_slots)
                hidden = hidden[batch.samples]
        elif recorded is not None and 0 < len(roster.host) <= recorded.most:
            hidden = recorded.forward(roster.slots, work.bounds, work.layout)
        elif len(roster.host):
            hidden = self.forward(assemble(work, self._slots))
        if not len(roster.host):
            return Outcome(torch.empty(0, dtype=torch.int32, device=self._slots.device), prompts=prompts)
        ids, sampled = self._head.sample(hidden, roster)
        return Outcome(ids, sampled=sampled, prompts=prompts)

    def forward(self, batch: Batch) -> Tensor:
        """[T, hidden] of every token of a batch."""
        self._attention.plan(batch)
        return self._model.forward(batch.tokens, batch.positions, self._attention)

    def warm_up(self, tokens: int, rows: int) -> None:
        """Run `rows` equal chunks of `tokens` tokens in all, then as many decoding rows; sample each, and throw the
        result away. All of it is the spare slot's: of the KV cache only the spare block is written.

        Raises what the largest step would raise later: torch.OutOfMemoryError, for one.
        """
        slots = self._slots
        device, page = slots.device, slots.page_size
        length = max(tokens // rows, 1)
        positions = torch.arange(length, device=device).repeat(rows)
        starts = torch.arange(rows + 1, device=device) * length
        spares = torch.full((rows,), slots.max_slots, device=device)
        ends = np.full(rows, length)
        chunks = Batch(
            tokens=torch.zeros(rows * length, dtype=torch.int64, device=device),
            positions=positions,
            writes=slots.spare * page + positions % page,
            rows=spares,
            tables=slots.tables,
            lengths=torch.full((rows,), length, dtype=torch.int32, device=device),
            samples=starts[1:] - 1,
            sizes=ends,
            ends=ends,
            bounds=np.zeros(0, np.int64),
        )
        decodes = assemble_decode(spares, slots, bounds=np.ones(rows, np.int64))
        full = Roster(np.full(rows, slots.max_slots), spares, greedy_only=False, plain=False, shape=None, asked=None)
        for batch in (chunks, decodes):
            self._head.sample(self.forward(batch)[batch.samples], full)
