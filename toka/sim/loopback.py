"""A link without sockets or a process: a pretend worker on the engine's own event loop."""

import asyncio
from collections import deque

from toka.link import Peer
from toka.sim.worker import PretendWorker
from toka.wire import VERSION, Agreed, Attached, Hello, Message, Plan, Ready, Stop, Tokens, Welcome

ENDPOINT = "loopback"


class Loopback:
    """The twin of `toka.link.Link`: a worker joins as soon as it is opened, and answers each plan after `step_seconds`.

    `hold()` keeps the worker from answering until `release()`; `break_off(reason)` loses it.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        vocab_size: int = 256,
        max_model_len: int = 131072,
        step_seconds: float = 0.0,
        audit: bool = True,
    ) -> None:
        self.control = ENDPOINT
        self.dropped = 0
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.audit = audit
        self.plans: list[Plan] = []
        self.stopped = False
        self._peer: Peer | None = None
        self._worker: PretendWorker | None = None
        self._answers: deque[Tokens] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._held = False

    def open(self, peer: Peer) -> None:
        """Let the pretend worker in, at the loop's next turn."""
        self._peer = peer
        asyncio.get_running_loop().call_soon(self._join)

    def _join(self) -> None:
        if self._peer is None:
            return
        welcome: Welcome = self._peer.welcome(Hello(version=VERSION), 1, 0, ENDPOINT, ENDPOINT)
        if welcome.kv_tokens:
            self.num_blocks = welcome.kv_tokens // welcome.page_size
        self._worker = PretendWorker(
            max_slots=welcome.max_slots,
            num_blocks=self.num_blocks,
            page_size=welcome.page_size,
            vocab_size=self.vocab_size,
            audit=self.audit,
        )
        self._peer.heard(Attached(epoch=1, rank=0))
        self._peer.heard(
            Ready(
                epoch=1,
                rank=0,
                num_blocks=self.num_blocks,
                max_model_len=self.max_model_len,
                vocab_size=self.vocab_size,
                seconds=0.0,
            )
        )
        self._peer.drained()

    def send(self, message: Message) -> None:
        """Run a plan; its answer comes later."""
        match message:
            case Plan():
                assert self._worker is not None
                self.plans.append(message)
                self._answers.append(self._worker.run(message))
                self._wind()
            case Agreed():
                pass
            case Stop():
                self.stopped = True

    def _wind(self) -> None:
        if self._timer is None and self._answers and not self._held:
            self._timer = asyncio.get_running_loop().call_later(self.step_seconds, self._answer)

    def _answer(self) -> None:
        self._timer = None
        if self._peer is not None and self._answers and not self._held:
            self._peer.heard(self._answers.popleft())
            self._peer.drained()
        self._wind()

    def poll(self) -> None:
        """Nothing is ever left lying."""

    def hold(self) -> None:
        """Give no answers until `release`."""
        self._held = True

    def release(self) -> None:
        """Answer again."""
        self._held = False
        self._wind()

    def break_off(self, reason: str) -> None:
        """Lose the worker."""
        assert self._peer is not None
        self._held = True
        self._peer.lost(reason)

    def close(self) -> None:
        """Nothing is heard any more."""
        self._peer = None
        if self._timer:
            self._timer.cancel()
