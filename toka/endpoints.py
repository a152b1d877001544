"""Where a link's sockets are bound."""

import contextlib
import errno
import ipaddress
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from toka.config import Config
from toka.errors import ConfigError, StartError


class AddressInUse(StartError):
    """Somebody else listens there."""


@dataclass(slots=True)
class Endpoints:
    """Where a link's sockets are: in a private folder, or on TCP ports."""

    control: str
    folder: Path | None
    host: str = ""
    ports: range = range(0)

    @classmethod
    def of(cls, config: Config) -> "Endpoints":
        """Local workers meet in a folder that only this user may enter; those started by hand come over TCP. Raises
        ConfigError for an address or a range of ports that is none, or that would be open to the network."""
        if config.workers == "local":
            folder = Path(tempfile.mkdtemp(prefix="toka-"))
            return cls(control=f"ipc://{folder}/control", folder=folder)
        address = urlsplit(config.control)
        if address.scheme != "tcp" or not address.hostname or address.port is None:
            raise ConfigError(f"control={config.control} is no address: write tcp://HOST:PORT")
        if not _is_loopback(address.hostname):
            raise ConfigError(
                f"control={config.control} would be open to the network, which needs keys, and keys are not supported "
                "yet: use a loopback address such as tcp://127.0.0.1:10211"
            )
        first, _, last = config.worker_ports.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"worker_ports={config.worker_ports} is no range of ports: write it like 10212-10299")
        host = f"[{address.hostname}]" if ":" in address.hostname else address.hostname
        return cls(config.control, None, host, range(int(first), int(last or first) + 1))

    def bind(self, socket: "zmq.Socket[bytes]", name: str) -> str:
        """Bind a data socket; returns its endpoint. Raises StartError if there is no place left."""
        if self.folder:
            endpoint = f"ipc://{self.folder}/{name}"
            listen(socket, endpoint)
            return endpoint
        for port in self.ports:
            endpoint = f"tcp://{self.host}:{port}"
            with contextlib.suppress(AddressInUse):
                listen(socket, endpoint)
                return endpoint
        raise StartError(
            f"no port of worker_ports={self.ports.start}-{self.ports.stop - 1} is free on {self.host}: "
            "give another range"
        )

    def remove(self) -> None:
        """Remove the folder."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def listen(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Bind a socket to an endpoint that was asked for. Raises StartError if it is taken or not of this machine."""
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{endpoint} is in use: give another address, control=tcp://127.0.0.1:PORT") from error
        raise StartError(f"cannot listen on {endpoint}: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
