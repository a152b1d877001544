"""The worker's end of the wire: joining the engine, talking to it, and noticing that it is gone."""

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NoReturn, Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from toka.wire import (
    Agreed,
    Attached,
    Beat,
    Hello,
    Loading,
    Message,
    Plan,
    Refused,
    Stop,
    Tokens,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode,
)
from workers.config import OptionError

log = logging.getLogger("worker")

_serial = itertools.count()
"""Names sockets inside the process. A name is not free at once when its socket closes, so none is used twice."""

BEAT = 1.0
"""Seconds between two signs of life."""
GRACE = 10.0
"""Seconds the main thread has to leave by itself once the engine is gone."""
LINGER = 1000
"""Milliseconds that last words have to get out."""
SEND_TIMEOUT = 30_000
"""Milliseconds after which an engine that takes nothing more is taken for lost."""
CONNECT_TIMEOUT = 10_000
"""Milliseconds for the connection that `Welcome` names."""
PROGRESS = 0.1
"""Seconds between two messages about a long start."""
PATIENCE = 1000
"""Milliseconds of silence after which a person hears what the worker waits for."""


class Refusal(Exception):
    """The engine does not take this worker; `str(error)` says why."""


class EngineLost(Exception):
    """The engine is gone without a Stop."""


class Stopped(Exception):
    """The engine said Stop before the worker was ready."""


class BadMessage(Exception):
    """The engine said something that has no place here, or left something out."""


def join(context: zmq.Context[zmq.Socket[bytes]], engine: str, hello: Hello, stdin: int | None = None) -> Welcome:
    """Ask the engine to be let in, for as long as it takes: the worker may be started first.

    `stdin`, if given, is a file descriptor whose end means that nobody waits for this worker any more. Raises Refusal,
    EngineLost, BadMessage, and OptionError for an address that is none.
    """
    with context.socket(zmq.DEALER) as control:
        control.linger = 0
        # A Hello belongs to one connection: it is said again after a reconnect, and never queued for one.
        control.immediate = True
        control.reconnect_ivl_max = 1000
        with _monitor(context, control, zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            try:
                control.connect(engine)
            except zmq.ZMQError as error:
                raise OptionError(f"engine={engine} is no address: {error}") from None
            poller = zmq.Poller()
            poller.register(monitor, zmq.POLLIN)
            poller.register(control, zmq.POLLIN)
            if stdin is not None:
                poller.register(stdin, zmq.POLLIN)
            patience: int | None = PATIENCE
            while True:
                ready = dict(poller.poll(patience))
                if not ready:
                    log.info("waiting for the engine at %s", engine)
                    patience = None
                if stdin in ready and _ended(stdin):
                    raise EngineLost("whoever started this worker is gone")
                if monitor in ready:
                    recv_monitor_message(monitor)
                    control.send(encode(hello))
                if control in ready:
                    return _welcome(control.recv(), engine)


class Link:
    """Both data sockets, once the engine has let the worker in. Belongs to the main thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        welcome: Welcome,
        *,
        stdin: int | None = None,
        die: Callable[[int], object] = os._exit,
    ) -> None:
        """Connects and says Attached. Raises EngineLost."""
        self.epoch = welcome.epoch
        self.rank = welcome.rank
        self.dropped = 0
        """Messages of another epoch."""
        self._step = 0
        self._told = 0.0
        self._lost = ""
        with ExitStack() as undo:
            self._results = undo.enter_context(_results(context, welcome))
            self._plans = undo.enter_context(context.socket(zmq.PULL))
            monitor = undo.enter_context(_connect(context, self._plans, welcome.plans))
            # The engine may send as soon as it has heard Attached, so its way here is open by now.
            try:
                self._results.send(encode(Attached(epoch=self.epoch, rank=self.rank)))
            except zmq.Again:
                raise EngineLost(f"the engine does not answer at {welcome.results}") from None
            self._pulse = Pulse(context, welcome, monitor, stdin, die)
            self._pulse.start()
            undo.pop_all()
        self._poller = zmq.Poller()
        self._poller.register(self._plans, zmq.POLLIN)
        self._poller.register(self._pulse.lost, zmq.POLLIN)
        self._ways_out = zmq.Poller()
        self._ways_out.register(self._results, zmq.POLLOUT)
        self._ways_out.register(self._pulse.lost, zmq.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Gives what was said a bounded time to get out."""
        self._pulse.end()
        self._plans.close()
        self._results.close(0 if self._lost else LINGER)

    def say(self, message: Message) -> None:
        """Tell the engine; what one that is gone cannot hear is dropped, since a Stop may still lie among what it sent.
        Raises EngineLost if it is there and takes nothing more."""
        data = encode(message)
        while not self._lost:
            try:
                self._results.send(data, zmq.NOBLOCK)
                break
            except zmq.Again:
                ready = dict(self._ways_out.poll(SEND_TIMEOUT))
            if not ready:
                raise EngineLost("the engine has stopped reading what this worker says")
            if self._pulse.lost in ready:
                self._lost = self._pulse.lost.recv().decode()
        if isinstance(message, Tokens):
            self._pulse.step = message.step

    def progress(self, phase: str, done: int, total: int) -> None:
        """How far the start has come; may be called as often as one likes. Raises Stopped and EngineLost, so that a
        long start does not outlive its purpose."""
        now = time.monotonic()
        if now - self._told < PROGRESS and done < total:
            return
        self._told = now
        self.say(Loading(epoch=self.epoch, rank=self.rank, phase=phase, done=done, total=total))
        if (message := self._take(wait=False)) is not None:
            self._not_ready(message)

    def agreed(self) -> Agreed:
        """Wait for what follows Ready. Raises Stopped, EngineLost and BadMessage."""
        message = self._take(wait=True)
        if not isinstance(message, Agreed):
            self._not_ready(message)
        return message

    def receive(self, wait: bool) -> Plan | Stop | None:
        """The next plan; None, unless `wait`, if none is there. Raises EngineLost once everything the engine sent has
        been received, and BadMessage for a gap in the steps or anything that is no plan."""
        match self._take(wait):
            case Plan() as plan:
                if plan.step != self._step:
                    raise BadMessage(f"the engine sent step {plan.step} where step {self._step} was due")
                self._step += 1
                return plan
            case Stop() | None as other:
                return other
            case message:
                raise BadMessage(f"the engine sent {type(message).__name__} where a plan was due")

    def _take(self, wait: bool) -> ToWorker | None:
        while True:
            try:
                data = self._plans.recv(zmq.NOBLOCK)
            except zmq.Again:
                if self._lost:
                    raise EngineLost(self._lost) from None
                with suppress(zmq.Again):
                    # What came before the loss is read first, so look at the plans once more.
                    self._lost = self._pulse.lost.recv(zmq.NOBLOCK).decode()
                    continue
                if not wait:
                    return None
                self._poller.poll()
                continue
            message = _decode(data)
            if isinstance(message, Stop):
                self._pulse.code = 0
            elif isinstance(message, Agreed | Plan) and message.epoch != self.epoch:
                self.dropped += 1
                log.warning("dropped a message of epoch %d, this is epoch %d", message.epoch, self.epoch)
                continue
            return message

    def _not_ready(self, message: ToWorker | None) -> NoReturn:
        """Before the first plan, Stop ends the start and anything else is out of place."""
        if isinstance(message, Stop):
            raise Stopped(message.reason)
        raise BadMessage(f"the engine sent {type(message).__name__} before the worker was ready")


class Pulse(threading.Thread):
    """A thread of its own, so that a long load or step does not look like death: it says Beat, and it sees that the
    engine is gone when the main thread is busy.

    The two threads talk over a pair of sockets: this one says on `lost` why the engine is gone, the main thread says
    there that it is over. If it does not within GRACE seconds of the loss, the process ends here.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        welcome: Welcome,
        monitor: zmq.Socket[bytes],
        stdin: int | None,
        die: Callable[[int], object],
    ) -> None:
        super().__init__(name="pulse", daemon=True)
        self.step = -1
        """The last step done; written by the main thread."""
        self.code = 1
        """Exit code if the engine is gone; written by the main thread."""
        self._welcome = welcome
        self._monitor = monitor
        self._stdin = stdin
        self._die = die
        self.lost, self._main = _pair(context)
        self._beats = _results(context, welcome)

    def run(self) -> None:
        with self._monitor, self._main, self._beats:
            try:
                reason = self._watch()
            except Exception:
                log.exception("the thread that watches the engine failed")
                self._die(1)
                raise
            if reason is None:
                return
            self._main.send(reason.encode())
            if not self._main.poll(int(GRACE * 1000)):
                log.error("%s; leaving", reason)
                self._die(self.code)

    def end(self) -> None:
        """Called by the main thread: nothing is to be watched any more."""
        with suppress(zmq.Again):
            self.lost.send(b"", zmq.NOBLOCK)
        self.join()
        self.lost.close(0)

    def _watch(self) -> str | None:
        """Beats until the engine is lost (says why) or the main thread is over (None)."""
        poller = zmq.Poller()
        poller.register(self._main, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if self._stdin is not None:
            poller.register(self._stdin, zmq.POLLIN)
        due = time.monotonic()
        while True:
            if (now := time.monotonic()) >= due:
                due = now + BEAT
                beat = Beat(epoch=self._welcome.epoch, rank=self._welcome.rank, step=self.step)
                # A beat that does not get out is no loss: the engine counts on the next.
                with suppress(zmq.Again):
                    self._beats.send(encode(beat), zmq.NOBLOCK)
            ready = dict(poller.poll(int((due - now) * 1000)))
            if self._main in ready:
                return None
            if self._monitor in ready:
                return "the engine is gone"
            if self._stdin in ready and _ended(self._stdin):
                return "whoever started this worker is gone"


def _results(context: zmq.Context[zmq.Socket[bytes]], welcome: Welcome) -> zmq.Socket[bytes]:
    results = context.socket(zmq.PUSH)
    results.linger = 0
    results.reconnect_ivl = -1
    results.sndtimeo = SEND_TIMEOUT
    results.connect(welcome.results)
    return results


def _connect(context: zmq.Context[zmq.Socket[bytes]], plans: zmq.Socket[bytes], endpoint: str) -> zmq.Socket[bytes]:
    """Connect, wait until the connection stands, and return its monitor: whatever that says next is the end of it."""
    # One connection for the life of this epoch. A later one would be somebody else's.
    plans.reconnect_ivl = -1
    plans.linger = 0
    # So that a host which vanished without a word is noticed as well.
    plans.heartbeat_ivl = 5000
    plans.heartbeat_timeout = 30_000
    monitor = _monitor(context, plans, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)
    plans.connect(endpoint)
    if monitor.poll(CONNECT_TIMEOUT) and recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return monitor
    monitor.close()
    raise EngineLost(f"the engine does not answer at {endpoint}")


def _monitor(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """A socket that reports what becomes of another one's connections."""
    address = f"inproc://monitor-{next(_serial)}"
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.connect(address)
    return monitor


def _pair(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.linger = other.linger = 0
    address = f"inproc://pair-{next(_serial)}"
    one.bind(address)
    other.connect(address)
    return one, other


def _ended(stdin: int | None) -> bool:
    """A readable descriptor has reached its end; what it says instead is of no interest."""
    return stdin is not None and not os.read(stdin, 4096)


def _decode(data: bytes) -> ToWorker:
    try:
        return decode_to_worker(data)
    except msgspec.DecodeError as error:
        raise BadMessage(f"the engine sent what is no message of this protocol: {error}") from None


def _welcome(data: bytes, engine: str) -> Welcome:
    match _decode(data):
        case Welcome() as welcome:
            return welcome
        case Refused(reason=reason):
            raise Refusal(reason)
        case message:
            raise BadMessage(f"{engine} answered {type(message).__name__} to Hello: is it the control address?")
