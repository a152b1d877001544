"""The engine's end of the wire: the only place in toka/ where ZeroMQ is spoken.

A ZeroMQ socket's file descriptor is edge-triggered: it becomes readable once, not while there is something to read, and
a send may swallow the edge. So every wake-up and every send on a socket that is also read drains it to EAGAIN.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from toka.config import Config
from toka.endpoints import Endpoints, listen
from toka.errors import StartError
from toka.wire import (
    ANY_RANK,
    VERSION,
    Attached,
    Hello,
    Message,
    Refused,
    ToEngine,
    Welcome,
    decode_to_engine,
    encode,
)

RANK = 0
LINGER_MS = 1000
"""How long the last messages may take to leave when the link closes."""


class Peer(Protocol):
    """Who hears what comes over a link. Called on the event loop."""

    def welcome(self, hello: Hello, epoch: int, rank: int, results: str, plans: str) -> Welcome:
        """The terms for a worker that may join."""

    def heard(self, message: ToEngine) -> None:
        """A message of the live epoch."""

    def drained(self) -> None:
        """Nothing more has come for now."""

    def lost(self, reason: str) -> None:
        """The worker is gone, or can no longer be understood."""


class Wire(Protocol):
    """What the engine needs of a link; `toka.sim.loopback` has a twin without sockets."""

    control: str
    """Where workers say Hello."""
    dropped: int
    """Messages of epochs that are over."""

    def open(self, peer: Peer) -> None:
        """Start listening, on the running event loop."""

    def send(self, message: Message) -> None:
        """To the worker of the live epoch. One that cannot take it is lost; without a worker nothing happens."""

    def poll(self) -> None:
        """Take in all that has arrived, now."""

    def close(self) -> None:
        """Let the last messages leave, and give everything back."""


@dataclass(slots=True)
class _Worker:
    """One that was let in."""

    epoch: int
    host: str
    pid: int
    plans: "zmq.Socket[bytes]"
    heard_at: float
    attached: bool = False

    def __str__(self) -> str:
        return f"worker {RANK} (pid {self.pid} on {self.host or 'this host'})"


class Link:
    """The sockets of one replica of one rank. Built by `bind`, closed by `close`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoints: Endpoints, timeout: float) -> None:
        self._context = context
        self._endpoints = endpoints
        self._timeout = timeout
        self._door = context.socket(zmq.ROUTER)
        self._results = context.socket(zmq.PULL)
        self._worker: _Worker | None = None
        self._epochs = 0
        self._peer: Peer | None = None
        self._clock: asyncio.TimerHandle | None = None
        self.control = endpoints.control
        self.results = ""
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<Link {self.control}, {self._worker or 'no worker'}>"

    @classmethod
    def bind(cls, config: Config) -> "Link":
        """Open the control and result sockets. Raises StartError if an address is taken, ConfigError for one that would
        be open to the network."""
        endpoints = Endpoints.of(config)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = cls(context, endpoints, config.worker_timeout)
        try:
            listen(link._door, link.control)
            link.results = link._endpoints.bind(link._results, "results")
        except StartError:
            link.close()
            raise
        return link

    def open(self, peer: Peer) -> None:
        """Start listening, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._peer = peer
        loop.add_reader(self._door.fileno(), self._at_the_door)
        loop.add_reader(self._results.fileno(), self.poll)
        self._clock = loop.call_later(1, self._look_at_the_clock)
        # What came before the readers were there made its edge already.
        loop.call_soon(self._at_the_door)

    def send(self, message: Message) -> None:
        """To the worker of the live epoch. One that cannot take it is lost; without a worker nothing happens."""
        if self._worker is None or not self._worker.attached:
            return
        try:
            self._worker.plans.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._lose(f"{self._worker} takes no more plans")

    def poll(self) -> None:
        """Take in all that has arrived, now."""
        if self._peer is None:
            return
        while True:
            try:
                data = self._results.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(data)
        self._peer.drained()

    def close(self) -> None:
        """Let the last messages leave, and give everything back."""
        if self._peer is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._door.fileno())
            loop.remove_reader(self._results.fileno())
            self._peer = None
        if self._clock:
            self._clock.cancel()
        self._context.destroy(linger=LINGER_MS)
        self._endpoints.remove()

    def _take(self, data: bytes) -> None:
        """One message from the results socket."""
        assert self._peer is not None
        try:
            message = decode_to_engine(data)
        except msgspec.DecodeError as error:
            if self._worker:
                self._lose(f"{self._worker} sent what is not in the protocol: {error}")
            return
        worker = self._worker
        if worker is None or isinstance(message, Hello) or message.epoch != worker.epoch:
            self.dropped += 1
            return
        worker.heard_at = asyncio.get_running_loop().time()
        if isinstance(message, Attached):
            worker.attached = True
        self._peer.heard(message)

    def _at_the_door(self) -> None:
        """Answer everybody who says Hello."""
        if self._peer is None:
            return
        while True:
            try:
                sender, *frames = self._door.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._door.send_multipart([sender, encode(self._answer(frames[-1] if frames else b""))])

    def _answer(self, data: bytes) -> Welcome | Refused:
        """Let a worker in, or tell it why not."""
        assert self._peer is not None
        try:
            hello = decode_to_engine(data)
        except msgspec.DecodeError:
            hello = None
        if not isinstance(hello, Hello):
            return Refused(reason="this is toka's control address; a worker says Hello first")
        if hello.version != VERSION:
            return Refused(
                reason=f"the server speaks version {VERSION} of the protocol, this worker {hello.version}: "
                "install the same toka on both"
            )
        if hello.rank not in (ANY_RANK, RANK):
            return Refused(reason=f"there is no rank {hello.rank}: the server waits for rank {RANK} only")
        if self._worker:
            return Refused(reason=f"rank {RANK} is taken by {self._worker}")
        self._epochs += 1
        plans = self._context.socket(zmq.PUSH)
        try:
            endpoint = self._endpoints.bind(plans, f"plans-{self._epochs}")
        except StartError as error:
            plans.close(0)
            return Refused(reason=str(error))
        now = asyncio.get_running_loop().time()
        self._worker = _Worker(self._epochs, hello.host, hello.pid, plans, now)
        return self._peer.welcome(hello, self._epochs, RANK, self.results, endpoint)

    def _look_at_the_clock(self) -> None:
        """Once a second: has the worker given a sign of life?"""
        loop = asyncio.get_running_loop()
        self.poll()
        self._clock = loop.call_later(1, self._look_at_the_clock)
        worker = self._worker
        if worker and loop.time() - worker.heard_at > self._timeout:
            if worker.attached:
                self._lose(f"{worker} has given no sign of life for {self._timeout:g} s")
            else:
                self._forget()

    def _lose(self, reason: str) -> None:
        assert self._peer is not None
        self._forget()
        self._peer.lost(reason)

    def _forget(self) -> None:
        """The rank is free again; what was queued for its worker must never reach another."""
        if self._worker:
            self._worker.plans.close(0)
            self._worker = None
