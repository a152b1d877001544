"""What steps give back, on its way from the device to the host."""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from toka.wire import NO_TOKEN, Logprobs
from workers.compact import Longs
from workers.scores import Outcome, Scores


class Sampled(NamedTuple):
    """One step's ids and scores on the host, and how the device spent its time."""

    step: int
    ids: bytes
    """int32[S], little-endian."""
    busy: float
    """Seconds the device worked on the step."""
    gap: float
    """Seconds it stood idle before it."""
    logprobs: Logprobs | None = None
    prompts: tuple[tuple[int, Logprobs], ...] = ()


class Pending(Protocol):
    """A step that was launched."""

    def done(self) -> bool:
        """Everything of it has arrived."""

    def result(self) -> Sampled:
        """What arrived, as soon as it has. To be asked for in the order of the steps."""


class Outbox(Protocol):
    """Where steps put what they give back."""

    def begin(self) -> None:
        """The device starts on the next step here."""

    def send(self, step: int, outcome: Outcome) -> Pending:
        """The step that began last ends with this."""


class _Arrived(NamedTuple):
    sampled: Sampled

    def done(self) -> bool:
        return True

    def result(self) -> Sampled:
        return self.sampled


class HostOutbox:
    """For a CPU, where a step has ended when its launch returns."""

    def __init__(self) -> None:
        self._began = self._ended = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def send(self, step: int, outcome: Outcome) -> Pending:
        gap = self._began - self._ended if self._ended else 0.0
        self._ended = time.perf_counter()
        return _Arrived(_sampled(step, outcome, self._ended - self._began, gap))


class _Flight:
    """One place of the ring: a pinned buffer and the events around the step that fills it."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self.buffer = torch.empty(max_slots, dtype=torch.int32, pin_memory=True)
        self.began = torch.Event(device, enable_timing=True)
        self.ended = torch.Event(device, enable_timing=True)
        self.step = -1
        self.outcome: Outcome | None = None
        """On the host once `ended` has come; its ids are in `buffer`."""
        self.before: _Flight | None = None

    def done(self) -> bool:
        return self.ended.query()

    def result(self) -> Sampled:
        self.ended.synchronize()
        busy = self.began.elapsed_time(self.ended) / 1e3
        gap = self.before.ended.elapsed_time(self.began) / 1e3 if self.before is not None else 0.0
        assert self.outcome is not None, "a step that is pending has been sent"
        return _sampled(self.step, self.outcome, busy, gap)


class CudaOutbox:
    """For a GPU: results travel through pinned memory behind the step, and nobody waits for them before `result`.

    `max_pending` bounds the steps between their `begin` and their `result`; the ring has a place more, so that the
    event which the oldest of them counts its gap from still stands.
    """

    def __init__(self, max_slots: int, max_pending: int, device: torch.device) -> None:
        self._ring = [_Flight(max_slots, device) for _ in range(max_pending + 1)]
        self._next = 0

    def begin(self) -> None:
        self._ring[self._next].began.record()

    def send(self, step: int, outcome: Outcome) -> Pending:
        flight, before = self._ring[self._next], self._ring[self._next - 1]
        flight.step = step
        flight.before = before if before.step == step - 1 and step else None
        ids = flight.buffer[: len(outcome.ids)]
        ids.copy_(outcome.ids, non_blocking=True)
        # Scores are rare and of any number: their memory comes from torch's pool of pinned memory.
        flight.outcome = Outcome(ids, _moved(outcome.sampled, _pinned), _moved(outcome.prompts, _pinned))
        flight.ended.record()
        self._next = (self._next + 1) % len(self._ring)
        return flight


T = TypeVar("T")


def _moved(pair: tuple[T, Scores] | None, move: Callable[[Tensor], Tensor]) -> tuple[T, Scores] | None:
    return None if pair is None else (pair[0], Scores(*map(move, pair[1])))


def _pinned(tensor: Tensor) -> Tensor:
    """A copy on the host that is there once the stream has come to it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _sampled(step: int, outcome: Outcome, busy: float, gap: float) -> Sampled:
    """The message's parts, from tensors on the host."""
    ids = outcome.ids.numpy()
    logprobs, prompts = None, []
    if outcome.sampled is not None:
        asked, scores = outcome.sampled
        alive = np.flatnonzero(ids[asked.host] != NO_TOKEN)
        if len(alive):
            logprobs = _logprobs(asked.host[alive], scores.rows(torch.from_numpy(alive)), asked.width)
    if outcome.prompts is not None:
        parts, scores = outcome.prompts[0].parts, outcome.prompts[1]
        first = 0
        for part in parts:
            end = first + len(part.positions)
            own = scores.rows(slice(first, end))
            prompts.append((part.chunk, _logprobs(part.positions, own, part.width)))
            first = end
    return Sampled(step, ids.astype("<i4").tobytes(), busy, gap, logprobs, tuple(prompts))


def _logprobs(rows: Longs, scores: Scores, width: int) -> Logprobs:
    ids, values = scores.ids.numpy()[:, :width], scores.values.numpy()[:, :width]
    return Logprobs(
        rows=rows.astype("<i4").tobytes(),
        chosen=scores.chosen.numpy().astype("<f4").tobytes(),
        width=ids.shape[1],
        ids=ids.astype("<i4").tobytes(),
        values=values.astype("<f4").tobytes(),
        ranks=scores.ranks.numpy().astype("<i4").tobytes(),
    )
