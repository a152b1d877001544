"""Gauges and counters to a statsd server, over UDP: what is lost on the way is lost."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Self

from toka.errors import ConfigError
from toka.metrics.catalogue import CATALOGUE, Metric
from toka.metrics.page import number
from toka.metrics.record import Metrics

SECONDS = 1.0
"""Between reports."""
DATAGRAM = 1400
"""Bytes that pass every network in one piece."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


class Statsd:
    """Lines such as `toka.prompt_tokens.cached:48|c`: a metric's name without `_total`, and its labels' values."""

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily = socket.AF_INET) -> None:
        """`address`: host and port, resolved."""
        self._address = address
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._sent: dict[str, float] = {}

    @classmethod
    def of(cls, address: str) -> Self:
        """Of the option `statsd_addr`. Raises ConfigError."""
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
            raise ConfigError(f"statsd_addr={address} is no address: write HOST:PORT, such as 127.0.0.1:8125")
        try:
            family, *_, found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        except (OSError, UnicodeError):
            raise ConfigError(f"statsd_addr={address}: no host of the name {host} is known") from None
        return cls((str(found[0]), int(found[1])), family)

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    async def run(self, metrics: Metrics) -> None:
        """Send for ever."""
        while True:
            await asyncio.sleep(SECONDS)
            self.send(metrics)

    def send(self, metrics: Metrics) -> None:
        """All gauges, and what the counters have gained since the last call."""
        packet = b""
        for line in self.lines(metrics):
            if packet and len(packet) + len(line) >= DATAGRAM:
                self._say(packet)
                packet = b""
            packet += line
        if packet:
            self._say(packet)

    def lines(self, metrics: Metrics) -> Iterator[bytes]:
        """A line each, with its end. What they tell of counters is taken as sent."""
        for metric in CATALOGUE:
            if metric.kind not in ("counter", "gauge"):
                continue
            for labels, value in metric.read(metrics):
                name, now = path(metric, labels), number(value)
                if metric.kind == "gauge":
                    yield f"{name}:{now:.12g}|g\n".encode()
                elif gained := now - self._sent.get(name, 0.0):
                    self._sent[name] = now
                    yield f"{name}:{gained:.12g}|c\n".encode()

    def _say(self, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody listens, or the buffer is full
            self._socket.sendto(packet, self._address)


def path(metric: Metric, labels: tuple[str, ...]) -> str:
    """A metric's name for statsd."""
    name = metric.name.removeprefix("toka_").removesuffix("_total")
    return ".".join(["toka", name, *(_UNSAFE.sub("_", label).strip("_") for label in labels)])
