"""Numbers as little-endian bytes: those that `Sampling` carries, and those of log-probabilities sent as arrays."""

import struct
from collections.abc import Collection

import numpy as np
from msgspec import UNSET

from toka.api.schemas import Array, PackedLogprobs
from toka.request import Scores

NO_ID = b"\xff\xff\xff\xff"
NAN = struct.pack("<f", float("nan"))


def int32(numbers: Collection[int]) -> bytes:
    """Numbers that fit 32 bits."""
    return np.fromiter(numbers, "<i4", len(numbers)).tobytes()


def float32(numbers: Collection[float]) -> bytes:
    """Rounded to the nearest."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def packed_logprobs(ids: Collection[int], scores: Scores, *, ranks: bool = False) -> PackedLogprobs:
    """Of tokens and the rows of `scores` that tell of them: as many, or one less if the first is a prompt's first."""
    count, width = len(ids), scores.width
    first = count - len(scores)
    assert first in (0, 1)
    ranked = Array("int32", [count], bytes(4) * first + scores.ranks) if ranks else UNSET
    return PackedLogprobs(
        Array("int32", [count], int32(ids)),
        Array("float32", [count], NAN * first + scores.chosen),
        Array("int32", [count, width], NO_ID * (first * width) + scores.ids),
        Array("float32", [count, width], NAN * (first * width) + scores.values),
        ranked,
    )
