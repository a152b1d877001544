"""Log-probabilities of tokens, by the log-softmax of logits."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from toka.wire import LEAST_LOGPROB
from workers import memory
from workers.compact import Longs


class Model(Protocol):
    """The part of a model that choosing and scoring tokens needs."""

    @property
    def vocab_size(self) -> int:
        """Logits a token."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, vocab], in any dtype of floats, the caller's to change."""


class Scores(NamedTuple):
    """Log-probabilities of n tokens, and of the `width` most probable ones in the place of each."""

    chosen: Tensor
    """float32[n]."""
    ids: Tensor
    """int32[n, width], in falling order of their values; of equals the lowest id first."""
    values: Tensor
    """float32[n, width]."""
    ranks: Tensor
    """int32[n]: places of the tokens themselves in the order of `ids`, from 1; int32[0]: nobody asks."""

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, width: int, *, ranked: bool = False) -> "Scores":
        """Of int64[n] tokens, by the log-softmax of float32[n, vocab]. There are no more than vocab most probable ones.
        What is impossible has LEAST_LOGPROB."""
        logprobs = logits.log_softmax(dim=-1).clamp_(min=LEAST_LOGPROB)
        ids = best(logprobs, min(width, logprobs.shape[1]))
        chosen = logprobs.gather(1, tokens[:, None])
        ranks = _ranks(logprobs, tokens, chosen) if ranked else torch.empty(0, dtype=torch.int32, device=logits.device)
        return cls(chosen.squeeze(1), ids.to(torch.int32), logprobs.gather(1, ids), ranks)

    def rows(self, which: Tensor | slice) -> "Scores":
        """Some of the tokens."""
        ranks = self.ranks[which] if len(self.ranks) else self.ranks
        return Scores(self.chosen[which], self.ids[which], self.values[which], ranks)

    @classmethod
    def joined(cls, parts: "list[Scores]") -> "Scores":
        """One after the other. At least one."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Asked:
    """Those rows of a roster (or of a slice of one) whose scores are asked for, in their order. n of them."""

    host: Longs
    """int64[n]: which rows, rising."""
    rows: Tensor
    """int64[n], on the device: the same."""
    width: int
    """The most that any of them asks for."""

    def within(self, first: int, end: int) -> "Asked | None":
        """Those of the roster's rows first … end − 1, counted from `first`; None: there are none."""
        low, high = np.searchsorted(self.host, (first, end)).tolist()
        if low == high:
            return None
        return Asked(self.host[low:high] - first, self.rows[low:high] - first, self.width)


class Part(NamedTuple):
    """What one chunk scores."""

    chunk: int
    """Index into the plan's chunks."""
    positions: Longs
    """int64[m], rising: of the scored tokens, in the prompt."""
    width: int
    """How many most probable tokens are asked for."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens of prompts that one step scores. n of them."""

    parts: list[Part]
    """Together n positions, in the order of the tensors."""
    rows: Tensor
    """int64[n], on the device: the tokens of the batch before them, whose logits tell."""
    targets: Tensor
    """int64[n], on the device: their ids."""

    def score(self, model: Model, hidden: Tensor, most: int) -> Scores:
        """From [T, hidden], at most `most` rows and `memory.MAX_LOGITS` logits at once."""
        step = max(1, min(most, memory.MAX_LOGITS // model.vocab_size))
        width = max(part.width for part in self.parts)
        scores = []
        for rows, targets in zip(torch.split(self.rows, step), torch.split(self.targets, step), strict=True):
            scores.append(Scores.of(model.logits(hidden[rows]).float(), targets, width, ranked=True))
        return Scores.joined(scores)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gives back, on the device."""

    ids: Tensor
    """int32[S]: an id for each row of the roster, or NO_TOKEN for one that was dead before the step."""
    sampled: tuple[Asked, Scores] | None = None
    """Of the rows that ask, dead ones included."""
    prompts: tuple[Prompts, Scores] | None = None


def best(logprobs: Tensor, width: int) -> Tensor:
    """The places of the highest values of each row, in falling order; of equals the lowest place first:
    float32[n, vocab] → int64[n, width]."""
    # A whole number for each value and place, no two equal, so that no order of equals is left to topk: floats compare
    # as their bits do, once those of negative ones are turned round. 0 is added so that −0 becomes 0.
    bits = (logprobs + 0.0).view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.to(torch.int64) << 32) - torch.arange(logprobs.shape[1], device=logprobs.device)
    return keys.topk(width, dim=-1).indices


def _ranks(logprobs: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Places of `tokens`, int64[n], from 1, in the order of `best`: float32[n, vocab], float32[n, 1] → int32[n]."""
    before = (logprobs > chosen).sum(dim=-1)
    equals = logprobs == chosen
    equals &= torch.arange(logprobs.shape[1], device=logprobs.device) < tokens[:, None]
    return (before + equals.sum(dim=-1) + 1).to(torch.int32)
