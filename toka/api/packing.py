"""Numbers as the little-endian bytes in which `Sampling` carries them."""

import struct
from collections.abc import Collection


def int32(numbers: Collection[int]) -> bytes:
    """Numbers that fit 32 bits."""
    return struct.pack(f"<{len(numbers)}i", *numbers)


def float32(numbers: Collection[float]) -> bytes:
    """Rounded to the nearest."""
    return struct.pack(f"<{len(numbers)}f", *numbers)
