"""What changes logits before a token is chosen from them: bias, penalties, and tokens that may not come.

Of all this a slot holds state only while its sequence uses it (compact.py), and a roster none of whose sequences do has
no `Shape`. The order is: bias, penalties, then the two masks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toka.wire import MAX_BIAS, Sampling
from workers.compact import Longs, Places, Upload, Users, resized

_LEAST_WIDTH = 8
"""Entries of the shortest row of `_Lists`."""


class BadSampling(ValueError):
    """Parameters that no engine should send."""


class _Lists:
    """A short list of token ids for some slots, with a number each."""

    def __init__(self, max_slots: int, vocab_size: int, upload: Upload) -> None:
        self.places = Places(max_slots)
        self._vocab_size = vocab_size
        self._upload = upload
        device = upload(np.zeros(0, np.int64)).device
        self.ids = torch.empty((0, 0), dtype=torch.int64, device=device)
        """int64[rows, width]: the lists, padded with `vocab_size`, which is no id."""
        self.values = torch.empty((0, 0), dtype=torch.float32, device=device)
        """float32[rows, width]: the numbers, padded with 0."""

    def put(self, slot: int, ids: Longs, values: npt.NDArray[np.float32] | None = None) -> None:
        """The slot's list, from here to its release."""
        row = self.places.take(slot)
        width = self.ids.shape[1]
        while width < len(ids):
            width = max(_LEAST_WIDTH, 2 * width)
        self._resize(width)
        self.ids[row] = self._vocab_size
        self.ids[row, : len(ids)] = self._upload(ids)
        if values is not None:
            self.values[row] = 0
            self.values[row, : len(ids)] = self._upload(values)

    def release(self, slots: Longs) -> None:
        """Their lists are no longer needed."""
        self.places.give(slots)
        if not self.places.size:
            self._resize(0)

    def _resize(self, width: int) -> None:
        if (self.places.size, width) != tuple(self.ids.shape):
            self.ids = resized(self.ids, self.places.size, width, self._vocab_size)
            self.values = resized(self.values, self.places.size, width)


class _Penalties:
    """Factors of some slots, and what their sequences consist of."""

    def __init__(self, max_slots: int, vocab_size: int, upload: Upload) -> None:
        self.places = Places(max_slots)
        self._vocab_size = vocab_size
        self._upload = upload
        device = upload(np.zeros(0, np.int64)).device
        self.factors = torch.empty((0, 3), dtype=torch.float32, device=device)
        """float32[rows, 3]: repetition, presence, frequency."""
        self.counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        """int32[rows, vocab]: how often each token is in the answer."""
        self.prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)
        """bool[rows, vocab]: whether it is in the prompt."""

    def put(self, slot: int, sampling: Sampling, ids: Longs, prompt_len: int) -> None:
        """The slot's factors, and all that its sequence consists of so far."""
        row = self.places.take(slot)
        self._resize()
        factors = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.factors[row] = self._upload(np.array(factors, np.float32))
        sent = self._upload(ids)
        self.prompt[row] = False
        self.prompt[row].index_fill_(0, sent[:prompt_len], True)
        answer = sent[prompt_len:]
        self.counts[row] = 0
        self.counts[row].index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))

    def release(self, slots: Longs) -> None:
        """Their counts are no longer needed."""
        self.places.give(slots)
        if not self.places.size:
            self._resize()

    def _resize(self) -> None:
        size = self.places.size
        if size != len(self.counts):
            self.factors = resized(self.factors, size, 3)
            self.counts = resized(self.counts, size, self._vocab_size)
            self.prompt = resized(self.prompt, size, self._vocab_size)


class Shaping:
    """The state of `max_slots` slots, over a vocabulary of `vocab_size` tokens."""

    def __init__(self, max_slots: int, vocab_size: int, upload: Upload) -> None:
        self.vocab_size = vocab_size
        self._upload = upload
        self.bias = _Lists(max_slots, vocab_size, upload)
        self.blocked = _Lists(max_slots, vocab_size, upload)
        self.allowed = _Lists(max_slots, vocab_size, upload)
        self.penalties = _Penalties(max_slots, vocab_size, upload)
        self.until: Longs = np.zeros(max_slots, np.int64)
        """The first position at which the slot's `blocked` tokens may come."""

    def admit(self, slot: int, sampling: Sampling, ids: Longs, prompt_len: int) -> None:
        """A sequence takes the slot, with `ids` of which the first `prompt_len` are its prompt. Raises BadSampling."""
        if sampling.bias_ids or sampling.bias:
            places, values = self._ids("bias_ids", sampling.bias_ids), _floats(sampling.bias)
            if len(places) != len(values):
                raise BadSampling(f"{len(places)} ids have {len(values)} biases")
            self.bias.put(slot, places, values)
        if sampling.allowed:
            self.allowed.put(slot, self._ids("allowed", sampling.allowed))
        if sampling.blocked and prompt_len + sampling.min_tokens > len(ids):
            self.blocked.put(slot, self._ids("blocked", sampling.blocked, self.vocab_size))
            self.until[slot] = prompt_len + sampling.min_tokens
        if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0):
            if sampling.repetition_penalty <= 0:
                raise BadSampling(f"a repetition penalty of {sampling.repetition_penalty}")
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise BadSampling(f"the sequence has a token outside 0 … {self.vocab_size - 1}")
            self.penalties.put(slot, sampling, ids, prompt_len)

    def release(self, slots: Longs) -> None:
        """The sequences of these slots are gone."""
        for part in (self.bias, self.blocked, self.allowed, self.penalties):
            part.release(slots)

    def shape(self, roster: Longs) -> "Shape | None":
        """What is to be done with the logits of some slots; None: nothing."""
        bias = self.bias.places.users(roster, self._upload)
        penalties = self.penalties.places.users(roster, self._upload)
        allowed = self.allowed.places.users(roster, self._upload)
        blocked = self.blocked.places.users(roster, self._upload)
        if bias is penalties is allowed is blocked is None:
            return None
        until = None if blocked is None else self._upload(self.until[roster[blocked.host]])
        return Shape(state=self, bias=bias, penalties=penalties, allowed=allowed, blocked=blocked, until=until)

    def _ids(self, name: str, data: bytes, most: int = MAX_BIAS) -> Longs:
        if len(data) % 4:
            raise BadSampling(f"{name} of {len(data)} bytes")
        ids = np.frombuffer(data, "<i4").astype(np.int64)
        if len(ids) > most:
            raise BadSampling(f"{name} of more than {most} ids")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise BadSampling(f"{name} outside 0 … {self.vocab_size - 1}")
        return ids


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rows of one roster use."""

    state: Shaping
    bias: Users | None
    penalties: Users | None
    allowed: Users | None
    blocked: Users | None
    until: Tensor | None
    """int64[users of `blocked`]: the first position at which those tokens may come."""

    def within(self, first: int, end: int) -> "Shape | None":
        """Of the roster's rows first … end − 1; None: they use nothing."""
        bias, penalties, allowed, blocked = (
            users and users.within(first, end) for users in (self.bias, self.penalties, self.allowed, self.blocked)
        )
        if bias is penalties is allowed is blocked is None:
            return None
        until = self.until
        if self.blocked is not None and until is not None:
            low, high = np.searchsorted(self.blocked.host, (first, end)).tolist()
            until = until[low:high]
        return Shape(state=self.state, bias=bias, penalties=penalties, allowed=allowed, blocked=blocked, until=until)

    def apply(self, logits: Tensor, position: Tensor) -> None:
        """Change float32[S, vocab] in place; `position`, int64[S], is that of the token to be chosen."""
        if self.bias is not None:
            logits[self.bias.rows] += self._spread(self.bias, self.state.bias)
        if self.penalties is not None:
            logits[self.penalties.rows] = self._penalised(logits[self.penalties.rows], self.penalties.keys)
        if self.allowed is not None:
            listed = self._listed(self.allowed, self.state.allowed)
            logits[self.allowed.rows] = logits[self.allowed.rows].masked_fill_(~listed, -torch.inf)
        if self.blocked is not None and self.until is not None:
            own = logits[self.blocked.rows]
            early = position[self.blocked.rows] < self.until
            listed = self._listed(self.blocked, self.state.blocked) & early[:, None]
            rest = own.masked_fill(listed, -torch.inf)
            # Where every allowed token is blocked, those allowed win: something has to come.
            none = rest.amax(dim=-1, keepdim=True) == -torch.inf
            logits[self.blocked.rows] = torch.where(none, own, rest)

    def count(self, ids: Tensor, dead: Tensor) -> None:
        """The rows have sampled `ids`, int64[S]; those that are `dead`, bool[S], have not."""
        if self.penalties is not None:
            alive = (~dead[self.penalties.rows]).to(torch.int32)
            # No two rows are of the same slot, so no place is written twice.
            self.state.penalties.counts[self.penalties.keys, ids[self.penalties.rows]] += alive

    def _penalised(self, logits: Tensor, keys: Tensor) -> Tensor:
        """float32[n, vocab] → the same, changed."""
        penalties = self.state.penalties
        repetition, presence, frequency = penalties.factors[keys].unbind(1)
        counts = penalties.counts[keys]
        there = counts > 0
        by = repetition[:, None]
        weaker = torch.where(logits < 0, logits * by, logits / by)
        logits = torch.where(there | penalties.prompt[keys], weaker, logits)
        return logits - counts * frequency[:, None] - there * presence[:, None]

    def _listed(self, users: Users, lists: _Lists) -> Tensor:
        """bool[n, vocab]: the token is in the row's list."""
        vocab = self.state.vocab_size
        marks = torch.zeros((len(users.host), vocab + 1), dtype=torch.bool, device=users.keys.device)
        return marks.scatter_(1, lists.ids[users.keys], True)[:, :vocab]

    def _spread(self, users: Users, lists: _Lists) -> Tensor:
        """float32[n, vocab]: the row's number for each token, 0 where it has none."""
        vocab = self.state.vocab_size
        sums = torch.zeros((len(users.host), vocab + 1), dtype=torch.float32, device=users.keys.device)
        return sums.scatter_add_(1, lists.ids[users.keys], lists.values[users.keys])[:, :vocab]


def _floats(data: bytes) -> npt.NDArray[np.float32]:
    if len(data) % 4:
        raise BadSampling(f"bias of {len(data)} bytes")
    return np.frombuffer(data, "<f4").astype(np.float32)
