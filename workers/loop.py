"""The life of a step, from the plan that comes to the tokens that go:

    wire.receive   Plan                                     workers/link.py
    slots.apply    what changed since the plan before       workers/slots.py
    build          Plan + slots → tensors                   workers/batch.py
    step.run       model, attention, sampling: launched     workers/step.py
    outbox.send    the sampled ids begin to leave           workers/outbox.py
    wire.say       Tokens, once they are on the host

Everything up to `send` returns before the device has done its work, so the host prepares one step while another runs.
"""

import time
from collections import deque
from typing import Protocol

import torch

from toka.wire import Plan, Stop, Tokens
from workers.batch import build
from workers.outbox import Outbox, Pending
from workers.slots import Slots
from workers.step import Step

PAUSE = 50e-6
"""Seconds between two looks at the device while neither a result nor a plan has come."""


class Wire(Protocol):
    """What the loop needs of the link; `workers.link.Link` is one."""

    epoch: int

    def receive(self, wait: bool) -> Plan | Stop | None:
        """The next plan; None, unless `wait`, if none is there."""

    def say(self, tokens: Tokens) -> None:
        """Tell the engine."""


class Loop:
    """Runs plans in the order they come until the engine says Stop.

    At most two steps are under way: while the device runs one, the host prepares and launches the next. A result leaves
    as soon as it is there, whether or not another plan has come.
    """

    def __init__(self, wire: Wire, slots: Slots, step: Step, outbox: Outbox) -> None:
        self._wire = wire
        self._slots = slots
        self._step = step
        self._outbox = outbox
        self._pending: deque[Pending] = deque()
        self.steps = 0
        """Steps that have been answered."""
        self.busy = self.idle = 0.0
        """Seconds the device worked on them, and stood idle between them."""

    @torch.inference_mode()
    def run(self) -> None:
        """Raises BadPlan, and whatever the link and the device raise."""
        pending = self._pending
        while not isinstance(message := self._next(), Stop):
            if message is not None:
                self._slots.apply(message)
                work = build(message, self._slots)
                self._outbox.begin()
                pending.append(self._outbox.send(message.step, self._step.run(work)))
            while pending and (len(pending) > 1 or pending[0].done()):
                self._say(pending.popleft())
        while pending:
            self._say(pending.popleft())

    def _next(self) -> Plan | Stop | None:
        """The next message; None if the step under way ends before one comes."""
        while self._pending:
            if (message := self._wire.receive(wait=False)) is not None:
                return message
            if self._pending[0].done():
                return None
            time.sleep(PAUSE)
        return self._wire.receive(wait=True)

    def _say(self, pending: Pending) -> None:
        done = pending.result()
        self.steps, self.busy, self.idle = self.steps + 1, self.busy + done.busy, self.idle + done.gap
        self._wire.say(
            Tokens(
                epoch=self._wire.epoch,
                step=done.step,
                ids=done.ids,
                busy=done.busy,
                gap=done.gap,
                logprobs=done.logprobs,
                prompts=list(done.prompts),
            )
        )
