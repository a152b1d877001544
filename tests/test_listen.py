"""Where the server is reached: ports, unix sockets, TLS, and what a person reads when one of them cannot be."""

import asyncio
import contextlib
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
import uvloop
from starlette.types import Receive, Scope, Send

from toka.config import Config
from toka.errors import ConfigError, StartError
from toka.http import Http
from toka.listen import Tls, address, listening, tls_of


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate for localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for part in issued.cert_chain_pems:
        part.write_to_path(folder / "cert.pem", append=True)
    return Tls(str(folder / "cert.pem"), str(folder / "key.pem"))


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """A stream of two chunks."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-scheme", scope["scheme"].encode())]})
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


@contextlib.contextmanager
def served(config: Config) -> Iterator[socket.socket]:
    """The application as these options say, on uvloop in a thread."""
    http = Http(app, tls=tls_of(config))
    with listening(config) as listener:

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(http.serve(sockets=[listener]))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener
        finally:
            http.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(self._path)


def test_tls(files: Tls, authority: trustme.CA) -> None:
    """Who trusts the authority gets an answer, over https and no other way."""
    config = Config(port=0, tls_cert=files.cert, tls_key=files.key)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with served(config) as listener:
        where = address(config, listener)
        assert where.startswith("https://127.0.0.1:")
        port = listener.getsockname()[1]
        with contextlib.closing(http.client.HTTPSConnection("localhost", port, timeout=10, context=trust)) as client:
            for _ in range(2):
                client.request("GET", "/")
                response = client.getresponse()
                assert (response.read(), response.headers["x-scheme"]) == (b"one two", "https")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP/1.1" not in plain.recv(100)


def test_a_unix_socket(tmp_path: Path) -> None:
    """It answers, several times on a connection; its file is gone afterwards; a client is told any host will do."""
    path = tmp_path / "toka.sock"
    config = Config(uds=str(path))
    with served(config) as listener:
        assert address(config, listener) == "http://localhost"
        with contextlib.closing(UnixConnection(str(path))) as client:
            for _ in range(2):
                client.request("GET", "/")
                assert client.getresponse().read() == b"one two"
    assert not path.exists()


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    """A server that was killed leaves its file; nobody listens on it."""
    path = str(tmp_path / "toka.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with served(Config(uds=path)), contextlib.closing(UnixConnection(path)) as client:
        client.request("GET", "/")
        assert client.getresponse().status == 200


def test_a_socket_in_use_is_one_line(tmp_path: Path) -> None:
    """The other server is left alone."""
    path = str(tmp_path / "toka.sock")
    with listening(Config(uds=path)), pytest.raises(StartError) as caught, listening(Config(uds=path)):
        pass
    assert str(caught.value) == f"uds={path} is in use; stop what uses it, or give another: uds=…"


def test_what_cannot_be_a_socket_is_one_line(tmp_path: Path) -> None:
    """A file that is none is not removed; a folder that is not there, a path that is too long."""
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, tmp_path / "none" / "x.sock", tmp_path / ("x" * 200)):
        with pytest.raises(StartError, match=f"uds={path}") as caught, listening(Config(uds=str(path))):
            pass
        assert "\n" not in str(caught.value)
    assert file.read_text() == "mine"


def test_a_socket_of_somebody_else_stays(tmp_path: Path) -> None:
    """A file that has been put in the place of ours is not ours to remove."""
    path = tmp_path / "toka.sock"
    with listening(Config(uds=str(path))):
        path.rename(tmp_path / "moved")
        path.write_text("new")
    assert path.read_text() == "new"


def test_without_tls_there_is_none() -> None:
    """Plain HTTP is the default."""
    assert tls_of(Config()) is None


def wrong_key(folder: Path, files: Tls) -> Tls:
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(folder / "other.pem")
    return Tls(files.cert, str(folder / "other.pem"))


def no_pem(folder: Path, files: Tls) -> Tls:
    (folder / "text.pem").write_text("no certificate")
    return Tls(str(folder / "text.pem"), files.key)


def encrypted(folder: Path, files: Tls) -> Tls:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    (folder / "locked.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return Tls(files.cert, str(folder / "locked.pem"))


@pytest.mark.parametrize("spoil", [wrong_key, no_pem, encrypted])
def test_a_wrong_certificate_is_one_line(tmp_path: Path, files: Tls, spoil: Callable[[Path, Tls], Tls]) -> None:
    """A key of another certificate, no PEM, a key behind a password: nothing is asked on the terminal."""
    cert, key = spoil(tmp_path, files)
    with pytest.raises(ConfigError, match="give a certificate chain and the key that belongs to it") as caught:
        tls_of(Config(tls_cert=cert, tls_key=key))
    assert str(caught.value).startswith(f"tls_cert={cert} tls_key={key}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, files: Tls) -> None:
    """The line names the option. Half of the pair is refused too."""
    none = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=f"^tls_cert={none}: No such file"):
        tls_of(Config(tls_cert=none, tls_key=files.key))
    with pytest.raises(ConfigError, match=f"^tls_key={os.path.dirname(none)}: Is a directory"):
        tls_of(Config(tls_cert=files.cert, tls_key=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"^tls_key=… is missing"):
        tls_of(Config(tls_cert=files.cert))
    with pytest.raises(ConfigError, match=r"^tls_cert=… is missing"):
        tls_of(Config(tls_key=files.key))
