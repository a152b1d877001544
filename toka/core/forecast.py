"""What the running sequences are predicted to do: how long each will become, and what that makes of the KV cache."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from toka.core.blocks import Ints
from toka.core.limits import Limits
from toka.core.predictor import Predictor
from toka.core.seats import Seats
from toka.core.sequence import Sequence
from toka.core.usage import Future, Usage, future_of


class Forecast:
    """Each seat's future, their sum as a curve, and the predictor behind both. There is one prediction of a sequence,
    and everybody uses it.

    A block that several sequences share is on the curve once: the one that is predicted to end last answers for it
    (`until` is when), so a newcomer that ends later borrows it from there on.
    """

    __slots__ = ("_limits", "_looked", "_owners", "_predictor", "_seats", "_until", "usage")

    def __init__(self, limits: Limits, seats: Seats, owners: Ints, learn: bool) -> None:
        """`owners`: how many sequences own each block, int32[num_blocks], kept by the pool. Without `learn` every
        sequence is predicted to reach its limit."""
        self._limits = limits
        self._seats = seats
        self._owners = owners
        self._predictor = Predictor(learn)
        self._looked = 0
        self._until: NDArray[np.int64] = np.zeros(limits.num_blocks, dtype=np.int64)
        # A future starts when it is added or a few chunks later, and has at most max_len steps.
        self.usage = Usage(2 * limits.max_len)

    def advance(self, step: int) -> None:
        """The next step to be planned is `step`."""
        self.usage.advance(step)

    def look(self, decoding: Ints) -> None:
        """Learn from those that run on, and give those that outran their prediction another."""
        seats, now = self._seats, self.usage.now
        if now >= self._looked + self._predictor.pause:
            self._looked = now
            open_ended = decoding[seats.open_ended[decoding]]
            self._predictor.look(seats.scheduled[open_ended], seats.limit[open_ended])
        for seat in decoding[seats.end[decoding] <= now].tolist():
            self._renew(seat)

    def of(self, sequence: Sequence, fill: int, hit: Ints, new: int, budget: int, running: int) -> Future:
        """What a waiting sequence would use if it started now, with `fill` tokens to have in the cache, of which the
        blocks `hit` are there and `new` blocks are not. This step has room for `budget` tokens of it, and the next ones
        for what `running` sequences leave."""
        limits = self._limits
        later = max(fill - len(hit) * limits.page_size - budget, 0)
        start = self.usage.now + 1 - (-later // max(limits.max_tokens - running, 1))
        steps = self._steps(sequence, sequence.kept + 1)
        owned = hit[self._owners[hit] > 0]
        until = Counter(self._until[owned].tolist())
        return future_of(
            start=start,
            length=fill,
            row=len(hit) + new,
            steps=steps,
            page=limits.page_size,
            blocks=new + len(hit) - len(owned),
            borrowed=tuple((step, count) for step, count in until.items() if step < start + steps),
        )

    def left(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence is predicted to generate when it runs again."""
        return max(self._steps(sequence, sequence.kept), 1)

    def start(self, seat: int, future: Future) -> None:
        """A sequence has taken a seat, with the row of blocks that `future` was made for."""
        answered_for = future.blocks + sum(count for _, count in future.borrowed)
        self._seats.lent[seat] = self._seats.blocks[seat] - answered_for
        self._set(seat, future)

    def filled(self, seat: int, step: int) -> None:
        """A sequence decodes from `step` on: if that is later than thought, it will end later too."""
        seats, future = self._seats, self._seats.futures[seat]
        assert future is not None
        if future.grows != step + seats.blocks[seat] * self._limits.page_size - seats.fill[seat]:
            self._renew(seat, step)

    def drop(self, seat: int) -> None:
        """A sequence has given everything back."""
        self._set(seat, None)

    def ended(self, generated: int, limit: int) -> None:
        """Learn from a sequence that could have gone on to `limit`."""
        self._predictor.ended(generated, limit)

    def _renew(self, seat: int, step: int | None = None) -> None:
        """A sequence that decodes from `step` (now, if not said) on has another future than was thought."""
        seats, old = self._seats, self._seats.futures[seat]
        assert old is not None
        row = int(seats.blocks[seat])
        borrowed = sum(count for _, count in old.borrowed)
        self._set(
            seat,
            future_of(
                start=self.usage.now if step is None else step,
                length=int(seats.length[seat]),
                row=row,
                steps=self._steps(seats.who(seat), int(seats.scheduled[seat])),
                page=self._limits.page_size,
                blocks=row - int(seats.lent[seat]) - borrowed,
                borrowed=old.borrowed,
            ),
        )

    def _steps(self, sequence: Sequence, generated: int) -> int:
        """How many more tokens a sequence is predicted to generate, at least one unless it has all. One that no stop id
        can end generates all that it may."""
        if not sequence.stops:
            return sequence.limit - generated
        return self._predictor.predict(generated, sequence.limit) - generated

    def _set(self, seat: int, future: Future | None) -> None:
        """Put a seat's future on the curve, in the place of the one it had."""
        seats = self._seats
        if (old := seats.futures[seat]) is not None:
            self.usage.remove(old)
        seats.futures[seat] = future
        if future is not None:
            self.usage.add(future)
            seats.end[seat] = future.end
            row = seats.row(seat)
            self._until[row] = np.maximum(self._until[row], future.end)
