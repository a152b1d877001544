"""Which bodies are compressed, and for whom."""

import zlib
from collections.abc import Iterable

from toka.api.aside import aside

LEAST = 1024
"""Bytes of the smallest body that is worth it."""
INLINE_BYTES = 65536
"""Larger bodies are compressed in a thread, which holds nobody up."""
LEVEL = 1
"""Three quarters of the gain for a third of the time."""
GZIP = 31
"""zlib's window and header of a gzip file."""


def accepts_gzip(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the client asks for gzip, and not rather for a body as it is (RFC 9110, section 12.5.3)."""
    asked: dict[str, float] = {}
    for name, value in headers:
        if name == b"accept-encoding":
            for one in value.decode("latin-1").lower().split(","):
                coding, _, parameter = one.partition(";")
                asked[coding.strip()] = _quality(parameter)
    wanted = asked.get("gzip", asked.get("x-gzip", asked.get("*", 0.0)))
    return wanted > 0 and wanted >= asked.get("identity", 0.0)


async def gzipped(body: bytes) -> bytes:
    """The body as a gzip file."""
    return _gzip(body) if len(body) <= INLINE_BYTES else await aside(lambda: _gzip(body))


def _gzip(body: bytes) -> bytes:
    file = zlib.compressobj(LEVEL, wbits=GZIP)
    return file.compress(body) + file.flush()


def _quality(parameter: str) -> float:
    """`q=0.5`; 1 if nothing is said, 0 for what is no number."""
    name, _, value = parameter.partition("=")
    if name.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0
