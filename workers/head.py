"""From the hidden states of a step to the tokens its slots go on with: the logits, what changes them, the choice, and
what the slots remember of it. Once in torch for any device, and once around the kernels of a GPU."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toka.wire import NO_TOKEN
from workers import memory
from workers.graphs import Graphs
from workers.sampling import choose, drawn_from
from workers.scores import Asked, Model, Scores
from workers.slots import Roster, Slots

if TYPE_CHECKING:
    from workers.kernels.sample import Sampler


_ALIGNED = 16


class TorchHead:
    """See `workers.step.Head`. `processed`: scores are by what tokens were drawn from, not by the model's logits."""

    def __init__(self, model: Model, slots: Slots, processed: bool = False) -> None:
        self._model = model
        self._slots = slots
        self._processed = processed

    def sample(self, hidden: Tensor, roster: Roster) -> tuple[Tensor, tuple[Asked, Scores] | None]:
        """See `workers.step.Head.sample`."""
        slots, own = self._slots, roster.slots
        ids, scored = choose(
            self._model,
            hidden,
            slots.sampling(roster),
            shape=roster.shape,
            asked=roster.asked,
            processed=self._processed,
        )
        dead = slots.dead[own]
        if roster.shape is not None:
            roster.shape.count(ids, dead)
        slots.last[own] = ids
        slots.dead[own] = dead | (ids.unsqueeze(1) == slots.stops[own]).any(1)
        answer = ids.masked_fill(dead, NO_TOKEN).to(torch.int32)
        return answer, None if roster.asked is None or scored is None else (roster.asked, scored)


class DeviceHead:
    """See `workers.step.Head`. Logits stay in the model's dtype unless something changes them; rows are taken in slices
    of so many as the plan of the memory has logits for."""

    def __init__(
        self,
        model: Model,
        slots: Slots,
        sampler: "Sampler",
        recorded: Graphs | None = None,
        processed: bool = False,
    ) -> None:
        """`processed`: see `TorchHead`."""
        self._model = model
        self._processed = processed
        self._slots = slots
        self._sampler = sampler
        self._recorded = recorded

    def recorded(self, graphs: Graphs) -> "DeviceHead":
        """The same, that replays `graphs` where it can."""
        return DeviceHead(self._model, self._slots, self._sampler, graphs, self._processed)

    def sample(self, hidden: Tensor, roster: Roster) -> tuple[Tensor, tuple[Asked, Scores] | None]:
        """See `workers.step.Head.sample`."""
        full = not roster.plain
        if roster.shape is None and roster.asked is None and self._recorded is not None:
            return self._recorded.sample(hidden, roster.slots, full), None
        ids = torch.empty(len(hidden), dtype=torch.int32, device=hidden.device)
        if roster.shape is None and roster.asked is None:
            self.choose(hidden, roster.slots, ids, full)
            return ids, None
        return ids, self._shaped(hidden, roster, ids)

    def choose(self, hidden: Tensor, rows: Tensor, ids: Tensor, full: bool) -> None:
        """Choose from the model's own logits: [S, hidden], int64[S] slots → `ids`, int32[S]. `full`: whether any row
        may use top_k, top_p or min_p. Nothing here waits for the device, so it can be recorded."""
        places = self._slots.lengths[rows]
        for part in _slices(len(rows), memory.MAX_DEVICE_LOGITS // self._model.vocab_size):
            logits = self._model.logits(hidden[part])
            self._sampler(logits, rows[part], places[part], self._slots.sampler, ids[part], full=full)

    def _shaped(self, hidden: Tensor, roster: Roster, ids: Tensor) -> tuple[Asked, Scores] | None:
        """`choose`, where logits are changed or log-probabilities asked for."""
        slots, rows = self._slots, roster.slots
        places = slots.lengths[rows]
        scores = []
        for part in _slices(len(rows), memory.MAX_CHANGED_LOGITS // self._model.vocab_size):
            shape = roster.shape and roster.shape.within(part.start, part.stop)
            asked = roster.asked and roster.asked.within(part.start, part.stop)
            logits = self._model.logits(hidden[part])
            raw = None if asked is None or self._processed else logits[asked.rows]
            if shape is not None:
                logits = logits.float()
                shape.apply(logits, places[part])
            own, chosen = rows[part], ids[part]
            self._sampler(logits, own, places[part], slots.sampler, chosen, full=not roster.plain)
            tokens = slots.last[own]
            if shape is not None:
                shape.count(tokens, chosen == NO_TOKEN)
            if raw is not None and asked is not None:
                scores.append(self._sampler.scores(raw, tokens[asked.rows], asked.width))
            elif asked is not None:
                drawn = drawn_from(logits[asked.rows].float(), slots.sampling(roster).pick(part).pick(asked.rows))
                scores.append(Scores.of(drawn, tokens[asked.rows], asked.width))
        return (roster.asked, Scores.joined(scores)) if roster.asked is not None and scores else None


def _slices(count: int, most: int) -> Iterator[slice]:
    # Whole multiples, so that every slice begins where vector loads may.
    step = max(most - most % _ALIGNED, 1)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))
