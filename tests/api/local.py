"""The whole engine in one process and on one event loop: a real model behind the API, without sockets."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from toka.api.app import App, create_app
from toka.config import Config
from toka.engine import Engine
from toka.link import Peer
from toka.model import ModelFolder
from toka.text.template import ChatTemplate
from toka.text.tokenizer import Tokenizer
from toka.wire import (
    VERSION,
    Attached,
    Hello,
    Message,
    Plan,
    Ready,
    Tokens,
    Welcome,
    decode_to_engine,
    decode_to_worker,
    encode,
)
from workers.batch import build
from workers.outbox import HostOutbox
from workers.start import Started, start


class Local:
    """The twin of `toka.link.Link` with a worker on a CPU behind it. All that is said is encoded and decoded."""

    def __init__(self) -> None:
        self.control = "local"
        self.dropped = 0
        self.plans: list[Plan] = []
        self._peer: Peer | None = None
        self._worker: Started | None = None
        self._outbox = HostOutbox()
        self._answers: deque[bytes] = deque()

    def open(self, peer: Peer) -> None:
        """Load the model at the loop's next turn."""
        self._peer = peer
        asyncio.get_running_loop().call_soon(self._join, peer)

    def _join(self, peer: Peer) -> None:
        welcome = decode_to_worker(encode(peer.welcome(Hello(version=VERSION), 1, 0, "", "")))
        assert isinstance(welcome, Welcome)
        self._worker = worker = start(welcome, torch.device("cpu"), lambda phase, done, total: None)
        peer.heard(Attached(epoch=1, rank=0))
        peer.heard(
            Ready(
                epoch=1,
                rank=0,
                num_blocks=worker.num_blocks,
                max_model_len=worker.max_model_len,
                vocab_size=worker.vocab_size,
                seconds=0.0,
            )
        )
        peer.drained()

    def send(self, message: Message) -> None:
        """Run a plan; its answer comes at a later turn."""
        if isinstance(message, Plan):
            plan = decode_to_worker(encode(message))
            assert isinstance(plan, Plan)
            self.plans.append(plan)
            self._answers.append(encode(self._run(plan)))
            asyncio.get_running_loop().call_soon(self._answer)

    @torch.inference_mode()
    def _run(self, plan: Plan) -> Tokens:
        assert self._worker is not None
        slots = self._worker.slots
        slots.apply(plan)
        done = self._outbox.send(plan.step, self._worker.step.run(build(plan, slots))).result()
        return Tokens(
            epoch=plan.epoch, step=done.step, ids=done.ids, logprobs=done.logprobs, prompts=list(done.prompts)
        )

    def _answer(self) -> None:
        if self._peer is not None and self._answers:
            self._peer.heard(decode_to_engine(self._answers.popleft()))
            self._peer.drained()

    def poll(self) -> None:
        """Nothing is ever left lying."""

    def close(self) -> None:
        """Nothing is heard any more."""
        self._peer = None


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: object) -> AsyncIterator[tuple[App, Local]]:
    """The API of the model in `folder`, which is called `tiny`."""
    config = Config(**({"kv_cache_num_tokens": 4096} | options))  # type: ignore[arg-type]
    link, model, tokenizer = Local(), ModelFolder.load(folder), Tokenizer.load(folder)
    engine = Engine(config, model, tokenizer, link)
    running = asyncio.create_task(engine.run())
    await engine.wait_ready()
    try:
        yield create_app(config, engine, tokenizer, ChatTemplate.load(folder), ["tiny"], 0), link
    finally:
        engine.stop()
        await running
