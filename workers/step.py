"""One forward pass and what it does to the slots."""

from typing import Protocol

import torch
from torch import Tensor

from toka.wire import NO_TOKEN
from workers import scores
from workers.attention.base import Attention
from workers.batch import Batch, Work
from workers.sampling import SamplingRows, choose
from workers.scores import Outcome
from workers.slots import Slots


class Model(scores.Model, Protocol):
    """What a step needs of a model; `workers.models.decoder.Decoder` is one."""

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """int64[T], int64[T] → [T, hidden]."""


class Step:
    """Runs steps of one model over one set of slots, all in the order of the calls."""

    def __init__(self, model: Model, attention: Attention, slots: Slots, *, processed: bool = False) -> None:
        """`processed`: tokens are scored by what they were drawn from, not by the model's logits."""
        self._model = model
        self._processed = processed
        self._attention = attention
        self._slots = slots

    def run(self, work: Work) -> Outcome:
        """What the step samples and scores."""
        slots, roster = self._slots, work.roster
        if not len(work.rows):
            return Outcome(torch.empty(0, dtype=torch.int32, device=slots.device))
        hidden = self._forward(work.batch)
        slots.lengths[work.rows] = work.after
        prompts = None
        if work.prompts is not None:
            # In slices of no more rows than may be sampled at once: so many logits are in the memory's plan.
            prompts = work.prompts, work.prompts.score(self._model, hidden, len(slots.needed))
        if not len(roster.host):
            return Outcome(torch.empty(0, dtype=torch.int32, device=slots.device), prompts=prompts)
        # A token's place in the noise is the number of tokens before it, which preemption does not change.
        parameters = roster.sampling(work.batch.positions[work.batch.samples] + 1)
        ids, scored = choose(
            self._model,
            _sampled(hidden, work.batch),
            parameters,
            shape=roster.shape,
            asked=roster.asked,
            processed=self._processed,
        )
        own = roster.slots
        dead = slots.dead[own]
        if roster.shape is not None:
            roster.shape.count(ids, dead)
        slots.last[own] = ids
        slots.dead[own] = dead | (ids.unsqueeze(1) == slots.stops[own]).any(1)
        return Outcome(
            ids.masked_fill(dead, NO_TOKEN).to(torch.int32),
            sampled=None if roster.asked is None or scored is None else (roster.asked, scored),
            prompts=prompts,
        )

    def warm_up(self, tokens: int, rows: int) -> None:
        """Run `rows` equal chunks of `tokens` tokens in all, sample each, and throw the result away. The KV cache is
        written in its spare block only, and no slot changes.

        Raises what the largest step would raise later: torch.OutOfMemoryError, for one.
        """
        slots = self._slots
        device, page = slots.device, slots.page_size
        length = max(tokens // rows, 1)
        positions = torch.arange(length, device=device).repeat(rows)
        starts = torch.arange(rows + 1, device=device) * length
        batch = Batch(
            tokens=torch.zeros(rows * length, dtype=torch.int64, device=device),
            positions=positions,
            writes=slots.spare * page + positions % page,
            starts=starts.to(torch.int32),
            lengths=torch.full((rows,), length, dtype=torch.int32, device=device),
            tables=torch.full((rows, -(-length // page)), slots.spare, dtype=torch.int32, device=device),
            num_prefill_rows=rows if length > 1 else 0,
            max_length=length,
            samples=starts[1:] - 1,
        )
        parameters = SamplingRows(
            temperature=torch.ones(rows, dtype=torch.float32, device=device),
            top_k=torch.full((rows,), 2, dtype=torch.int32, device=device),
            top_p=torch.full((rows,), 0.5, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
            choice=torch.zeros(rows, dtype=torch.int64, device=device),
            position=batch.positions[batch.samples] + 1,
            greedy_only=False,
            plain=False,
        )
        choose(self._model, _sampled(self._forward(batch), batch), parameters)

    def _forward(self, batch: Batch) -> Tensor:
        self._attention.plan(batch)
        return self._model.forward(batch.tokens, batch.positions, self._attention)


def _sampled(hidden: Tensor, batch: Batch) -> Tensor:
    """[T, hidden] → [S, hidden]."""
    # Where every token is sampled, as in a step of decodes, there is nothing to select.
    return hidden if len(batch.samples) == len(batch.tokens) else hidden[batch.samples]
