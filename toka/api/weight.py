"""How much work it is to parse a body. Long texts are next to none; millions of tiny values hold up everybody."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from toka.api.aside import aside
from toka.errors import BodyTooLarge

T = TypeVar("T")

INLINE_BYTES = 65536
"""Smaller bodies are parsed at once, whatever is in them: it takes a few milliseconds at most."""
MAX_WEIGHT = 3_000_000
"""About what is parsed in a tenth of a second. A decoder gives no other thread a turn before it is done."""
STRING = 3
MEMBER = 6
CONTAINER = 10
"""Parsing them takes so many times as long as a number."""
CHUNK = 1 << 20
"""Bytes that are looked at together: a few milliseconds, most of which other threads may use."""

QUOTE, COMMA, COLON, BACKSLASH = (ord(letter) for letter in '",:\\')
BRACKETS = tuple(ord(letter) for letter in "[{")


async def apart(body: bytes, work: Callable[[], T]) -> T:
    """What `work` makes of a body: a large one is weighed first, and worked on in a thread.

    Raises BodyTooLarge for one of more than MAX_WEIGHT, and what `work` raises.
    """
    if len(body) <= INLINE_BYTES:
        return work()

    def weighed() -> T:
        if weight(body) > MAX_WEIGHT:
            raise BodyTooLarge(
                "The body of your request holds more values than this server parses at once: a body may have about "
                f"{MAX_WEIGHT:,} numbers, {MAX_WEIGHT // STRING:,} strings or {MAX_WEIGHT // CONTAINER:,} arrays and "
                "objects. Send it as several requests."
            )
        return work()

    return await aside(weighed)


def weight(body: bytes) -> int:
    """Values, as numbers that would take as long to parse. What stands inside a string does not count."""
    total = 0
    inside = escaped = False
    for start in range(0, len(body), CHUNK):
        part = np.frombuffer(body, np.uint8, min(CHUNK, len(body) - start), start)
        quotes = part == QUOTE
        skipped = _escaped(part, escaped)
        quotes &= ~skipped[:-1]
        escaped = bool(skipped[-1])
        # Odd: an odd number of quotes up to here, so that this is the inside of a string, or the quote that opens it.
        odd = np.cumsum(quotes, dtype=np.uint8)
        outside = (odd & 1) == inside
        total += int(np.count_nonzero(outside & (part == COMMA)))
        total += MEMBER * int(np.count_nonzero(outside & (part == COLON)))
        for bracket in BRACKETS:
            total += CONTAINER * int(np.count_nonzero(outside & (part == bracket)))
        total += STRING * int(np.count_nonzero(quotes)) // 2
        inside ^= bool(odd[-1] & 1)
    return total


def _escaped(part: NDArray[np.uint8], first: bool) -> NDArray[np.bool_]:
    """Which bytes a backslash escapes, and at the end whether the byte after the part is; `first`: the first one is."""
    escaped = np.zeros(len(part) + 1, np.bool_)
    escaped[0] = first
    slashes = np.flatnonzero(part == BACKSLASH)
    if len(slashes):
        # Of a run of backslashes every other one escapes what follows it, from the first on that is not escaped itself.
        begins = np.diff(slashes, prepend=-2) != 1
        numbers = np.arange(len(slashes))
        place = numbers - np.maximum.accumulate(np.where(begins, numbers, 0))
        if first and slashes[0] == 0:
            run = np.flatnonzero(begins)
            place[: run[1] if len(run) > 1 else None] += 1
        escaped[slashes[place % 2 == 0] + 1] = True
    return escaped
