"""A client that costs little: so many completions at once over connections of their own, counted but not parsed.

    python bench/load.py URL MODEL REQUESTS N TOKENS stream|whole

Prints one JSON object: tokens (as `usage` says), chunks (server-sent events with text in them) and seconds.
"""

import asyncio
import json
import re
import sys
import time
from typing import NamedTuple
from urllib.parse import urlsplit

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
EMPTY = re.compile(rb'"text": ?""')
END = b"data: [DONE]\n\n"


class Counted(NamedTuple):
    """What one answer held."""

    tokens: int
    chunks: int


async def ask(address: tuple[str, int], body: bytes, stream: bool) -> Counted:
    """Send one request and count what comes. Raises OSError if it is not an answer."""
    reader, writer = await asyncio.open_connection(*address, limit=2**20)
    head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    data = bytearray()
    while piece := await reader.read(2**18):
        data += piece
    writer.close()
    if not data.startswith(b"HTTP/1.1 200"):
        raise OSError(f"the server answered: {data[:500].decode(errors='replace')}")
    usage = USAGE.findall(data)
    if not usage or (stream and END not in data):
        raise OSError(f"an answer broke off: …{data[-200:].decode(errors='replace')}")
    # The event with the usage has no choices, and so no text.
    chunks = data.count(b'"text":') - len(EMPTY.findall(data)) if stream else 0
    return Counted(int(usage[-1]), chunks)


async def run(url: str, model: str, requests: int, n: int, tokens: int, stream: bool) -> dict[str, float]:
    """All of them together."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    body: dict[str, object] = {"model": model, "max_tokens": tokens, "n": n, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    # No two prompts are alike, so that each is prefilled.
    bodies = [
        json.dumps({**body, "prompt": [index % 100 + 1, index // 100 + 1, *range(1, 31)]}).encode()
        for index in range(requests)
    ]
    started = time.perf_counter()
    answers = await asyncio.gather(*(ask(address, one, stream) for one in bodies))
    return {
        "tokens": sum(answer.tokens for answer in answers),
        "chunks": sum(answer.chunks for answer in answers),
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Load, and print what was counted."""
    url, model, requests, n, tokens, how = sys.argv[1:]
    counted = asyncio.run(run(url, model, int(requests), int(n), int(tokens), how == "stream"))
    sys.stdout.write(json.dumps(counted) + "\n")


if __name__ == "__main__":
    main()
