"""What each tenant has been served, so that the next to be served is the one that has had least.

The virtual token counter of Sheng and others, "Fairness in serving large language models" (OSDI 2024, algorithms 2 and
4): a counter a tenant, which rises by the weighted tokens that it is served, divided by the tenant's own weight. The
waiting tenant with the lowest counter is next. One that comes back from idleness is lifted to the lowest counter of
those that wait, so that nobody saves up what they did not ask for. While two tenants have work waiting, what they are
served, by weight, differs by no more than twice a prompt or a cache full of answers, whichever is larger (theorem 4.4).

The batch lane is not part of that. It takes what nobody else wants, gives way when somebody does, and keeps accounts of
its own: work in the background does not cost a tenant its place in the foreground. That alone would let it starve, so
it is owed a small share of what the others are served; when it has had less, its next sequence is paid from that,
starts before all others, and runs to its end.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from toka.core.blocks import Ints
from toka.core.sequence import BATCH, Sequence

PROMPT = 1.0
"""What a token of a prompt that was not in the prefix cache counts."""
GENERATED = 2.0
"""What a generated token counts; both as in section 5 of the paper, after what clients are asked to pay for them."""
BATCH_SHARE = 0.02
"""Of what the others are served, what the batch lane is owed while it waits."""
MOST_OWED = 65536.0
"""Weighted tokens that the batch lane is owed at most; a longer prompt is started for these."""

Floats = NDArray[np.float64]


class Ledger:
    """Counters over accounts; an account is a tenant in one lane, of those whom somebody waits for or of the batch
    lane. It outlives schedulers, and several may share it. There are as many accounts as there are tenants, and they
    are kept."""

    __slots__ = ("_accounts", "_batch", "_last", "_price", "_weights", "counters", "owed")

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` by tenant, above zero; a tenant that is not in it has weight 1."""
        self.counters: Floats = np.zeros(0)
        """Weighted tokens served, over the tenant's weight, float64[accounts]."""
        self.owed = 0.0
        """Weighted tokens that the batch lane should have had by now, and has not."""
        self._weights = dict(weights or {})
        self._accounts: dict[tuple[str, bool], int] = {}
        self._batch: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._price: Floats = np.zeros(0)
        self._last = {False: -1, True: -1}

    def __repr__(self) -> str:
        counters = {name: round(float(self.counters[at])) for (name, batch), at in self._accounts.items() if not batch}
        return f"<Ledger of {len(self._accounts)}: {counters}, {self.owed:.0f} owed to the batch lane>"

    def account(self, sequence: Sequence) -> int:
        """That of a sequence's tenant, in its lane."""
        key = (sequence.tenant, sequence.priority >= BATCH)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = len(self._accounts)
            self.counters = np.append(self.counters, 0.0)
            self._batch = np.append(self._batch, key[1])
            self._price = np.append(self._price, 1 / self._weights.get(sequence.tenant, 1.0))
        return account

    def price(self, sequence: Sequence) -> float:
        """By how much its counter rises when a waiting sequence starts, as far as is known."""
        return 0.0 if sequence.billed else float(PROMPT * len(sequence.prompt) * self._price[sequence.account])

    def lift(self, account: int, rivals: Floats) -> None:
        """A tenant that had nothing waiting has now, beside others whose counters are `rivals`. Without any, the one
        that waited last stands for them."""
        floor = 0.0
        if len(rivals):
            floor = float(rivals.min())
        elif (last := self._last[bool(self._batch[account])]) >= 0:
            floor = float(self.counters[last])
        if floor > self.counters[account]:
            self.counters[account] = floor

    def left(self, account: int) -> None:
        """One of this account's sequences waits no more."""
        self._last[bool(self._batch[account])] = account

    def bill(self, sequence: Sequence, tokens: int) -> None:
        """A sequence starts, and `tokens` tokens of its prompt must be run. Whatever is run again later is not the
        tenant's doing, and costs it nothing."""
        if sequence.billed:
            return
        sequence.billed = True
        account = sequence.account
        self.counters[account] += PROMPT * tokens * self._price[account]
        if not self._batch[account]:
            self._settle(PROMPT * tokens, 0.0)
        elif not sequence.vested:
            self._settle(0.0, PROMPT * tokens)

    def served(self, accounts: Ints, seats: Ints) -> None:
        """One more token has come back for each of `seats`; `accounts` says whose they are, int32[all seats]."""
        if len(self.counters) == 1:
            self.counters[0] += GENERATED * len(seats) * self._price[0]
            return
        tokens = np.bincount(accounts[seats], minlength=len(self.counters))
        self.counters += GENERATED * tokens * self._price
        batch = int(tokens[self._batch].sum())
        self._settle(GENERATED * (len(seats) - batch), GENERATED * batch)

    def _settle(self, others: float, batch: float) -> None:
        """What the lanes were served. What the batch lane has beyond its share was nobody else's, and is forgotten."""
        self.owed = min(max(self.owed + BATCH_SHARE * others - batch, 0.0), MOST_OWED)

    def forget(self) -> None:
        """The batch lane has had nothing waiting, and so is owed nothing."""
        self.owed = 0.0

    def covers(self, sequence: Sequence) -> bool:
        """Whether the batch lane is owed enough to start one of its sequences."""
        return self.owed >= self._cost(sequence)

    def vest(self, sequence: Sequence) -> None:
        """Pay for that. From now on the sequence does not give way."""
        self.owed -= self._cost(sequence)
        sequence.vested = True

    def _cost(self, sequence: Sequence) -> float:
        return min(PROMPT * (len(sequence.prompt) + sequence.kept) + GENERATED, MOST_OWED)

    def check(self) -> None:
        """Raises AssertionError."""
        assert len(self.counters) == len(self._price) == len(self._batch) == len(self._accounts)
        assert (self.counters >= 0).all()
        assert np.isfinite(self.counters).all()
        assert 0 <= self.owed <= MOST_OWED
