"""Gauges and counters over UDP."""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Iterator

import pytest

from toka.config import Config
from toka.errors import ConfigError
from toka.metrics import statsd as module
from toka.metrics.record import Metrics, State
from toka.metrics.statsd import DATAGRAM, Statsd
from toka.metrics.tasks import attend


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(5)
        yield listener


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics(Config(), "tiny")
    made.state = lambda: State(running=3, blocks_used=10, blocks_free=30, up=True)
    made.counts.generated = 12
    made.answered("/v1/chat/completions", "200", None)
    return made


def received(listener: socket.socket) -> dict[str, str]:
    """All lines that have come."""
    lines: dict[str, str] = {}
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            packet = listener.recv(65536)
            assert len(packet) <= DATAGRAM
            lines |= dict(line.split(":") for line in packet.decode().splitlines())
    return lines


def test_what_is_sent(listening: socket.socket, metrics: Metrics) -> None:
    """Gauges as they are, of counters what has come since the last time."""
    with contextlib.closing(Statsd(listening.getsockname())) as statsd:
        statsd.send(metrics)
        first = received(listening)
        metrics.counts.generated = 20
        statsd.send(metrics)
        second = received(listening)
    assert first["toka.num_requests_running"] == "3|g"
    assert first["toka.kv_cache_blocks.free"] == "30|g"
    assert first["toka.kv_cache_usage_ratio"] == "0.25|g"
    assert first["toka.generation_tokens"] == "12|c"
    assert first["toka.requests.v1_chat_completions.200"] == "1|c"
    assert second["toka.num_requests_running"] == "3|g"
    assert second["toka.generation_tokens"] == "8|c"
    assert "toka.requests.v1_chat_completions.200" not in second
    assert all(re.fullmatch(r"toka(\.[A-Za-z0-9_-]+)+", name) for name in first)


def test_many_lines_are_several_datagrams(listening: socket.socket, metrics: Metrics) -> None:
    """None is longer than what passes every network, and no line is cut."""
    for status in range(200, 500):
        metrics.answered("/v1/chat/completions", str(status), None)
    with contextlib.closing(Statsd(listening.getsockname())) as statsd:
        statsd.send(metrics)
    lines = received(listening)
    assert sum(name.startswith("toka.requests.") for name in lines) == 300


def test_nobody_need_listen(metrics: Metrics) -> None:
    """A server that is not there is no error."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with contextlib.closing(Statsd(address)) as statsd:
        for _ in range(3):
            statsd.send(metrics)


@pytest.mark.parametrize("address", ["statsd", "host:", ":8125", "host:port", "host:70000", "host:0", ""])
def test_a_wrong_address(address: str) -> None:
    """One line that says what to write."""
    with pytest.raises(ConfigError, match=r"^statsd_addr=.* is no address: write HOST:PORT, such as 127.0.0.1:8125$"):
        Statsd.of(address)


def test_a_host_that_nobody_knows() -> None:
    """One line, too."""
    with pytest.raises(ConfigError, match=r"^statsd_addr=nobody\.invalid:8125: no host of the name .* is known$"):
        Statsd.of("nobody.invalid:8125")


def test_addresses() -> None:
    """IPv4, and IPv6 in brackets."""
    for address in ("127.0.0.1:8125", "[::1]:8125"):
        Statsd.of(address).close()


async def test_all_that_runs_beside(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop is watched, statsd gets its lines and the log its own, again and again, until it is cancelled."""
    monkeypatch.setattr(module, "SECONDS", 0.01)
    metrics = Metrics(Config(stats_report_seconds=0.01), "tiny")
    metrics.state = lambda: State(running=3)
    with contextlib.closing(Statsd(listening.getsockname())) as statsd, caplog.at_level(logging.INFO, "toka.stats"):
        task = asyncio.create_task(attend(metrics, statsd))
        async with asyncio.timeout(5):
            while metrics.loop_lag.count < 2 or len(caplog.messages) < 2:  # noqa: ASYNC110 - a histogram sets no event
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert received(listening)["toka.num_requests_running"] == "3|g"
    assert caplog.messages[0].startswith("3 running, 0 waiting; ")


async def test_silence_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """stats_report_seconds=0 is no line at all."""
    metrics = Metrics(Config(stats_report_seconds=0), "tiny")
    metrics.state = lambda: State(running=3)
    with caplog.at_level(logging.INFO, "toka.stats"):
        task = asyncio.create_task(attend(metrics, None))
        async with asyncio.timeout(5):
            while not metrics.loop_lag.count:  # noqa: ASYNC110 - a histogram sets no event
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert caplog.messages == []
