"""The engine's end of the wire, against scripted workers on real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from toka.config import Config
from toka.errors import ConfigError, StartError
from toka.link import Link
from toka.wire import (
    VERSION,
    Attached,
    Beat,
    Hello,
    Message,
    Plan,
    Refused,
    ToEngine,
    Tokens,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode,
)


class Recorder:
    """A peer that remembers what it heard."""

    def __init__(self) -> None:
        self.messages: list[ToEngine] = []
        self.losses: list[str] = []
        self.drains = 0

    def welcome(self, hello: Hello, epoch: int, rank: int, results: str, plans: str) -> Welcome:
        return Welcome(
            epoch=epoch,
            rank=rank,
            results=results,
            plans=plans,
            model="m",
            dtype="float32",
            load_format="auto",
            page_size=16,
            max_slots=8,
            max_tokens=64,
            max_model_len=0,
            kv_tokens=0,
            memory_utilization=0.9,
            max_ahead=16,
        )

    def heard(self, message: ToEngine) -> None:
        self.messages.append(message)

    def drained(self) -> None:
        self.drains += 1

    def lost(self, reason: str) -> None:
        self.losses.append(reason)


class Worker:
    """The other end, by hand."""

    def __init__(self, control: str) -> None:
        self.context: zmq.asyncio.Context = zmq.asyncio.Context()
        self.context.setsockopt(zmq.IPV6, 1)
        self.door = self.context.socket(zmq.DEALER)
        self.door.connect(control)
        self.results = self.context.socket(zmq.PUSH)
        self.plans = self.context.socket(zmq.PULL)
        self.epoch = 0

    async def ask(self, hello: bytes) -> ToWorker:
        await self.door.send(hello)
        return decode_to_worker(await asyncio.wait_for(self.door.recv(), 5))

    async def join(self) -> Welcome:
        answer = await self.ask(encode(Hello(version=VERSION, pid=1, host="there")))
        assert isinstance(answer, Welcome)
        self.results.connect(answer.results)
        self.plans.connect(answer.plans)
        self.epoch = answer.epoch
        await self.say(Attached(epoch=answer.epoch, rank=0))
        return answer

    async def say(self, message: Message) -> None:
        await self.results.send(encode(message))

    async def hear(self) -> ToWorker:
        return decode_to_worker(await asyncio.wait_for(self.plans.recv(), 5))

    def leave(self) -> None:
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def opened(config: Config) -> AsyncIterator[tuple[Link, Recorder]]:
    link, recorder = Link.bind(config), Recorder()
    try:
        link.open(recorder)
        yield link, recorder
    finally:
        link.close()


@contextlib.contextmanager
def worker(link: Link) -> Iterator[Worker]:
    one = Worker(link.control)
    try:
        yield one
    finally:
        one.leave()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the condition is the other side's state
            await asyncio.sleep(0.005)


async def test_a_worker_joins_and_gets_plans() -> None:
    """Hello, Welcome, Attached, Plan, Tokens."""
    async with opened(Config()) as (link, recorder):
        with worker(link) as one:
            await one.join()
            await until(lambda: recorder.messages)
            link.send(Plan(epoch=1, step=0))
            assert await one.hear() == Plan(epoch=1, step=0)
            await one.say(Tokens(epoch=1, step=0, ids=b""))
            await until(lambda: len(recorder.messages) == 2)
            assert recorder.messages == [Attached(epoch=1, rank=0), Tokens(epoch=1, step=0, ids=b"")]


async def test_a_burst_is_taken_in_whole() -> None:
    """A socket's descriptor fires once for many messages; none of them may be left lying."""
    async with opened(Config()) as (link, recorder):
        with worker(link) as one:
            await one.join()
            for step in range(2000):
                await one.say(Tokens(epoch=1, step=step, ids=b""))
            await until(lambda: len(recorder.messages) == 2001)
            assert [message.step for message in recorder.messages if isinstance(message, Tokens)] == list(range(2000))


async def test_a_second_worker_is_refused() -> None:
    """The rank is taken; the second never learns of a plan endpoint, and hears who has it."""
    async with opened(Config()) as (link, _), contextlib.AsyncExitStack() as stack:
        one, two = stack.enter_context(worker(link)), stack.enter_context(worker(link))
        await one.join()
        answer = await two.ask(encode(Hello(version=VERSION, rank=0)))
        assert isinstance(answer, Refused)
        assert "pid 1 on there" in answer.reason


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (encode(Hello(version=VERSION + 1)), "version"),
        (encode(Hello(version=VERSION, rank=3)), "no rank 3"),
        (b"GET / HTTP/1.1", "says Hello first"),
        (encode(Beat(epoch=0, rank=0, step=0)), "says Hello first"),
    ],
    ids=["version", "rank", "noise", "another message"],
)
async def test_strangers_are_refused_with_the_reason(hello: bytes, reason: str) -> None:
    """And the door stays open for others."""
    async with opened(Config()) as (link, _):
        with worker(link) as one:
            answer = await one.ask(hello)
            assert isinstance(answer, Refused)
            assert reason in answer.reason
            await one.join()


async def test_messages_of_another_epoch_are_dropped_and_counted() -> None:
    """A worker of an epoch that is over changes nothing."""
    async with opened(Config()) as (link, recorder):
        with worker(link) as one:
            await one.join()
            await one.say(Tokens(epoch=99, step=0, ids=b""))
            await until(lambda: link.dropped == 1)
            assert recorder.messages == [Attached(epoch=1, rank=0)]


async def test_what_is_not_in_the_protocol_ends_the_epoch() -> None:
    """After an unknown message nothing a worker says means anything."""
    async with opened(Config()) as (link, recorder):
        with worker(link) as one:
            await one.join()
            await until(lambda: recorder.messages)
            await one.results.send(msgspec.msgpack.encode(["nonsense"]))
            await until(lambda: recorder.losses)
            assert "not in the protocol" in recorder.losses[0]


async def test_a_silent_worker_is_lost() -> None:
    """No sign of life for worker_timeout seconds."""
    async with opened(Config(worker_timeout=0.2)) as (link, recorder):
        with worker(link) as one:
            await one.join()
            await until(lambda: recorder.losses)
            assert "no sign of life" in recorder.losses[0]


async def test_a_worker_that_never_attached_frees_its_rank() -> None:
    """It died between Welcome and Attached: another may come, and the server goes on waiting."""
    async with opened(Config(worker_timeout=0.2)) as (link, recorder):
        with worker(link) as one, worker(link) as two:
            assert isinstance(await one.ask(encode(Hello(version=VERSION))), Welcome)
            await asyncio.sleep(1.2)
            welcome = await two.ask(encode(Hello(version=VERSION)))
            assert isinstance(welcome, Welcome)
            assert welcome.epoch == 2
            assert not recorder.losses


async def test_a_worker_that_takes_no_plans_is_lost() -> None:
    """A send that would block means that nobody is there."""
    async with opened(Config()) as (link, recorder):
        one = Worker(link.control)
        await one.join()
        await until(lambda: recorder.messages)
        one.leave()

        def sent() -> bool:
            link.send(Plan(epoch=1, step=0))
            return bool(recorder.losses)

        await until(sent)
        assert "takes no more plans" in recorder.losses[0]


async def test_the_local_folder_is_private_and_removed() -> None:
    """Nobody else on the machine may join a server's local wire."""
    async with opened(Config()) as (link, _):
        folder = Path(link.control.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.parametrize("control", ["tcp://0.0.0.0:10211", "tcp://192.168.0.1:1", "tcp://example.org:1"])
def test_an_address_open_to_the_network_is_refused(control: str) -> None:
    """Without keys a worker's socket is for this machine only."""
    with pytest.raises(ConfigError, match="keys"):
        Link.bind(Config(workers="manual", control=control))


@pytest.mark.parametrize("control", ["10211", "ipc://x", "tcp://127.0.0.1"])
def test_what_is_no_address_is_refused(control: str) -> None:
    """In one line that shows how to write one."""
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        Link.bind(Config(workers="manual", control=control))


def test_a_control_port_in_use_is_said() -> None:
    """One line that names the address and the option."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(StartError, match="in use"):
            Link.bind(Config(workers="manual", control=f"tcp://127.0.0.1:{port}"))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_manual_workers_come_over_tcp(host: str) -> None:
    """Data sockets take ports of worker_ports, whatever kind of address it is."""
    config = Config(workers="manual", control=f"tcp://{host}:10391", worker_ports="10392-10395")
    async with opened(config) as (link, recorder):
        with worker(link) as one:
            welcome = await one.join()
            assert {welcome.results, welcome.plans} <= {f"tcp://{host}:{port}" for port in range(10392, 10396)}
            await until(lambda: recorder.messages)
