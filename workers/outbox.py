"""Sampled ids on their way from the device to the host."""

import time
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Sampled(NamedTuple):
    """One step's ids on the host, and how the device spent its time."""

    step: int
    ids: bytes
    """int32[S], little-endian."""
    busy: float
    """Seconds the device worked on the step."""
    gap: float
    """Seconds it stood idle before it."""


class Pending(Protocol):
    """A step that was launched."""

    def done(self) -> bool:
        """Its ids have arrived."""

    def result(self) -> Sampled:
        """What arrived, as soon as it has. To be asked for in the order of the steps."""


class Outbox(Protocol):
    """Where steps put what they sampled."""

    def begin(self) -> None:
        """The device starts on the next step here."""

    def send(self, step: int, ids: Tensor) -> Pending:
        """The step that began last ends with `ids`, int32[S] on the device."""


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

    def send(self, step: int, ids: Tensor) -> Pending:
        gap = self._began - self._ended if self._ended else 0.0
        self._ended = time.perf_counter()
        return _Arrived(Sampled(step, _bytes(ids), self._ended - self._began, gap))


class _Flight:
    """One place of the ring: a pinned buffer and the events around the step that fills it."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self.buffer = torch.empty(max_slots, dtype=torch.int32, pin_memory=True)
        self.began = torch.Event(device, enable_timing=True)
        self.ended = torch.Event(device, enable_timing=True)
        self.step = -1
        self.rows = 0
        self.before: _Flight | None = None

    def done(self) -> bool:
        return self.ended.query()

    def result(self) -> Sampled:
        self.ended.synchronize()
        busy = self.began.elapsed_time(self.ended) / 1e3
        gap = self.before.ended.elapsed_time(self.began) / 1e3 if self.before is not None else 0.0
        return Sampled(self.step, _bytes(self.buffer[: self.rows]), busy, gap)


class CudaOutbox:
    """For a GPU: ids travel through pinned memory behind the step, and nobody waits for them before `result`.

    `max_pending` bounds the steps between their `begin` and their `result`; the ring has a place more, so that the
    event which the oldest of them counts its gap from still stands.
    """

    def __init__(self, max_slots: int, max_pending: int, device: torch.device) -> None:
        self._ring = [_Flight(max_slots, device) for _ in range(max_pending + 1)]
        self._next = 0

    def begin(self) -> None:
        self._ring[self._next].began.record()

    def send(self, step: int, ids: Tensor) -> Pending:
        flight, before = self._ring[self._next], self._ring[self._next - 1]
        flight.step, flight.rows = step, len(ids)
        flight.before = before if before.step == step - 1 and step else None
        flight.buffer[: len(ids)].copy_(ids, non_blocking=True)
        flight.ended.record()
        self._next = (self._next + 1) % len(self._ring)
        return flight


def _bytes(ids: Tensor) -> bytes:
    return ids.numpy().astype("<i4").tobytes()
