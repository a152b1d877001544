"""Where the server is reached: a port or a unix socket, with or without TLS. What is wrong with it is said at once."""

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from typing import NamedTuple

from toka.config import Config
from toka.errors import ConfigError, StartError
from toka.http import BACKLOG


class Tls(NamedTuple):
    """Files in PEM."""

    cert: str
    """The certificate, and those that vouch for it."""
    key: str


def tls_of(config: Config) -> Tls | None:
    """What the options say, tried; None: plain HTTP. Raises ConfigError."""
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        missing = "tls_cert" if config.tls_cert is None else "tls_key"
        raise ConfigError(f"{missing}=… is missing: TLS takes both tls_cert and tls_key")
    files = Tls(os.path.expanduser(config.tls_cert), os.path.expanduser(config.tls_key))
    for name, path in (("tls_cert", files.cert), ("tls_key", files.key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"{name}={path}: {error.strerror or error}; give a PEM file that the server may read"
            ) from None
    try:
        # Without a password to hand over, OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert, files.key, password=lambda: b"")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or "not readable"
        raise ConfigError(
            f"tls_cert={files.cert} tls_key={files.key}: {reason}; give a certificate chain and the key that belongs "
            "to it, both PEM, the key not encrypted"
        ) from None
    return files


@contextlib.contextmanager
def listening(config: Config) -> Iterator[socket.socket]:
    """A listening socket, so that nobody else takes the address while the model loads. It is gone afterwards, and so
    is a unix socket's file. Raises StartError."""
    if config.uds is None:
        with contextlib.closing(listen(config.host, config.port)) as listener:
            yield listener
        return
    path = os.path.expanduser(config.uds)
    with contextlib.closing(listen_uds(path)) as listener:
        ours = os.stat(path).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == ours:  # else somebody has put another in its place
                    os.unlink(path)


def listen(host: str, port: int) -> socket.socket:
    """On a port. Raises StartError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} on {host} is in use; stop what uses it, or give another: port=…") from None
        raise StartError(f"cannot serve on host={host} port={port}: {error.strerror or error}") from None
    return listener


def listen_uds(path: str) -> socket.socket:
    """On a unix socket. Who may connect is the umask's to say. A file left behind by a server that was killed is
    replaced. Raises StartError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path):
            _clear(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot serve on uds={path}: {error.strerror or error}") from None
    except StartError:
        listener.close()
        raise
    return listener


def address(config: Config, listener: socket.socket) -> str:
    """What a client is told: http://HOST:PORT, https with TLS. On a unix socket any host will do."""
    scheme = "https" if config.tls_cert else "http"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _clear(path: str) -> None:
    """Remove a socket on which nobody listens. Raises StartError for anything else, and OSError."""
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise StartError(f"uds={path} exists and is no socket; give another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise StartError(f"uds={path} is in use; stop what uses it, or give another: uds=…")
