"""The engine's end of the wire, played by hand: real sockets, scripted words."""

import time
from typing import Self

import zmq

from toka.wire import Attached, Beat, Hello, Message, ToEngine, Welcome, decode_to_engine, encode

PATIENCE = 10.0
"""Seconds after which a test that waits for a word gives up."""


class Engine:
    """Binds the control, plan and result sockets, on loopback or on ipc:// if a folder is given."""

    def __init__(self, folder: str = "") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control, self.address = self._bind(zmq.ROUTER, folder, "control")
        self.plans, self._plans_at = self._bind(zmq.PUSH, folder, "plans")
        self.results, self._results_at = self._bind(zmq.PULL, folder, "results")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.crash()

    def _bind(self, kind: int, folder: str, name: str) -> tuple[zmq.Socket[bytes], str]:
        bound = self.context.socket(kind)
        bound.linger = 500
        bound.bind(f"ipc://{folder}/{name}" if folder else "tcp://127.0.0.1:*")
        return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)

    def crash(self) -> None:
        """Close every socket, and send what was said before."""
        for bound in (self.control, self.plans, self.results):
            bound.close()
        self.context.term()

    def greet(self) -> tuple[bytes, Hello]:
        """Wait for a Hello and who said it."""
        assert self.control.poll(int(PATIENCE * 1000)), "no Hello came"
        peer, data = self.control.recv_multipart()
        hello = decode_to_engine(data)
        assert isinstance(hello, Hello)
        return peer, hello

    def answer(self, peer: bytes, message: Message) -> None:
        self.control.send_multipart([peer, encode(message)])

    def welcome(self, **fields: object) -> Welcome:
        """What a worker is told, with some fields of the caller's own."""
        usual: dict[str, object] = {
            "epoch": 7,
            "rank": 0,
            "results": self._results_at,
            "plans": self._plans_at,
            "model": "",
            "dtype": "float32",
            "load_format": "auto",
            "page_size": 4,
            "max_slots": 4,
            "max_tokens": 32,
            "max_model_len": 0,
            "kv_tokens": 64,
            "memory_utilization": 0.9,
            "max_ahead": 4,
        }
        return Welcome(**(usual | fields))  # type: ignore[arg-type]  # checked when it is sent

    def admit(self, **fields: object) -> Hello:
        """Let the next worker in and wait until it is attached."""
        peer, hello = self.greet()
        self.answer(peer, self.welcome(**fields))
        assert isinstance(self.hear(), Attached)
        return hello

    def say(self, message: Message) -> None:
        self.plans.send(encode(message), zmq.NOBLOCK)

    def hear(self, beats: bool = False) -> ToEngine:
        """The next word of the worker, leaving out its beats unless asked for them."""
        deadline = time.monotonic() + PATIENCE
        while self.results.poll(int(max(deadline - time.monotonic(), 0) * 1000)):
            message = decode_to_engine(self.results.recv())
            if beats or not isinstance(message, Beat):
                return message
        raise AssertionError("the worker says nothing")
