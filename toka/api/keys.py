"""API keys: where they come from, and who may do what with which."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from toka.api.exchange import Exchange
from toka.config import Config
from toka.errors import ConfigError, InvalidApiKey

OPEN = frozenset({"/health", "/ready", "/ping", "/version"})
"""Paths for those who ask whether there is a server. Nobody needs a key for them."""
METRICS = "/metrics"

_SENT = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)
_KEY = re.compile(r"[!-~]+")


class Keys:
    """The keys of which every request must carry one; with none, nobody needs any. They are kept as digests only."""

    __slots__ = ("_digests", "_open")

    def __init__(self, keys: Iterable[str] = (), open_paths: Iterable[str] = OPEN) -> None:
        """`open_paths`: what is answered without a key."""
        self._digests = tuple(sha256(key.encode()).digest() for key in dict.fromkeys(keys))
        self._open = frozenset(open_paths)

    @classmethod
    def load(cls, config: Config) -> "Keys":
        """Those of the options. Raises ConfigError, which repeats no key."""
        keys: list[str] = []
        if config.api_key is not None:
            keys += _checked([key.strip() for key in config.api_key.split(",")], "api_key=…")
        if config.api_key_file is not None:
            keys += _checked(_lines(config.api_key_file), f"api_key_file={config.api_key_file}")
        if not keys and config.cache_isolation == "key":
            raise ConfigError("cache_isolation=key keeps API keys apart, and there are none: give api_key_file=…")
        return cls(keys, OPEN | {METRICS} if config.metrics_without_key else OPEN)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"<Keys: {len(self)}>"

    @property
    def names(self) -> list[str]:
        """What the keys are called, in their order."""
        return [_name(number) for number in range(1, len(self) + 1)]

    def tenant(self, exchange: Exchange) -> str:
        """What the key of a request is called: `key-1` for the first; empty where none is needed.

        Raises InvalidApiKey. The time that takes tells nothing about the keys: digests are compared, with all of them.
        """
        if not self._digests or exchange.method == "OPTIONS" or exchange.path in self._open:
            return ""
        sent = _SENT.fullmatch(exchange.header(b"authorization"))
        digest = sha256(sent[1] if sent else b"").digest()
        number = 0
        for place, known in enumerate(self._digests, 1):
            number += place * hmac.compare_digest(digest, known)
        if number == 0:
            raise InvalidApiKey(
                "Incorrect API key provided."
                if sent
                else "You didn't provide an API key: send the header authorization: Bearer YOUR_KEY."
            )
        return _name(number)


def _name(number: int) -> str:
    return f"key-{number}"


def check_reach(config: Config, keys: Sequence[object] | Keys) -> None:
    """Whoever reaches the server may use it: without keys, only this machine may. Raises ConfigError."""
    if len(keys) or config.allow_unauthenticated or config.uds is not None or is_loopback(config.host):
        return
    raise ConfigError(
        f"host={config.host} serves everybody who reaches this machine, and there is no API key: give one "
        "(api_key_file=…, or TOKA_API_KEY in the environment), or write allow_unauthenticated=T"
    )


def is_loopback(host: str) -> bool:
    """Whether a host to serve on is reached from this machine only. A name is, if all of its addresses are; one that
    leads nowhere is too, and cannot be served on."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"api_key_file={path}: {error.strerror or error}; give a file that the server may read, with a key a line"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file={path}: not a text; give a file with a key a line") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line]


def _checked(keys: list[str], where: str) -> list[str]:
    """Raises ConfigError for what cannot be sent as a key. The message does not repeat it."""
    if not keys:
        raise ConfigError(f"{where}: there is no key in it; write one a line")
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{where}: key {number} is empty, or has a space or a letter that no header can carry")
    return keys
