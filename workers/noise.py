"""Noise that depends on nothing but (seed, choice, position) and what it is for: a token of the vocabulary, or a tile
of consecutive tokens (sampling.py).

The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3): a key of two 32-bit words turns a counter of four into four words of noise. Here

    key     = (seed mod 2³², seed div 2³²), of the seed's two's complement
    counter = (number div 4, position, choice, lane), each mod 2³²
    noise   = word number mod 4

where lane 0 is for tokens, whose number is their id, and lane 1 for tiles, which are numbered from 0. So the noise of
one can be found without that of any other. This layout is fixed: a test holds its vectors.

It is written three times: with numpy for the CPU, where its unsigned words and small pieces take much less time than
torch's, with torch for any device, and with Triton (kernels/sample.py). Tests hold all to the same published vectors.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Longs = npt.NDArray[np.int64]

ROUNDS = 10
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 2**32 - 1
_LOW, _HALF = np.uint64(_MASK), np.uint64(32)
_COUNTERS = 16384
"""At once in numpy: what is in work then stays within a core's cache."""
TOKENS, TILES = 0, 1
"""Lanes: what noise is for."""


def exponentials(seed: Tensor, choice: Tensor, position: Tensor, first: Tensor, count: int, lane: int) -> Tensor:
    """Standard exponential noise of the `count` tokens or tiles (by `lane`) from number `first`, a multiple of 4, on:
    int64[S] each → float32[S, count].

    −log1p(−u), of u = (word + ½) · 2⁻³² in float32, at most 1 − 2⁻²⁴: so it is between 2⁻³³ and 16.7.
    """
    if seed.device.type == "cpu":
        own = (seed.numpy(), choice.numpy(), position.numpy(), first.numpy())
        words = torch.from_numpy(words_numpy(*own, count, lane))
    else:
        words = words_torch(seed, choice, position, first, count, lane)
    uniform = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def words_numpy(
    seed: Longs, choice: Longs, position: Longs, first: Longs, count: int, lane: int
) -> npt.NDArray[np.uint32]:
    """The noise of S rows, as in `exponentials`: int64[S] each → uint32[S, count]."""
    quarter = -(-count // 4)
    out = np.empty((len(seed), quarter, 4), np.uint32)
    index = np.arange(quarter, dtype=np.uint64)[None]
    last = np.full((1, 1), lane, np.uint64)
    seeds, choices, positions, firsts = (row.astype(np.uint64)[:, None] for row in (seed, choice, position, first // 4))
    rows = max(1, _COUNTERS // max(quarter, 1))
    for start in range(0, len(seed), rows):
        part = slice(start, start + rows)
        # What belongs to a row stays a column until it meets the rest: numpy spreads it out there.
        counter = (index + firsts[part], positions[part] & _LOW, choices[part] & _LOW, last)
        for word, found in enumerate(philox_numpy(counter, (seeds[part] & _LOW, seeds[part] >> _HALF))):
            out[part, :, word] = found
    return out.reshape(len(seed), quarter * 4)[:, :count]


def philox_numpy(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four words of noise. 32-bit words in uint64 arrays of any shapes that broadcast."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        product, other = a * np.uint64(_MULTIPLY[0]), c * np.uint64(_MULTIPLY[1])
        a, c = (other >> _HALF) ^ (b ^ low), (product >> _HALF) ^ (d ^ high)
        b, d = other & _LOW, product & _LOW
        low, high = (low + np.uint64(_WEYL[0])) & _LOW, (high + np.uint64(_WEYL[1])) & _LOW
    return a, b, c, d


def words_torch(seed: Tensor, choice: Tensor, position: Tensor, first: Tensor, count: int, lane: int) -> Tensor:
    """The noise of S rows on any device, as in `exponentials`: int64[S] each → int64[S, count] of 32-bit words."""
    index = torch.arange(-(-count // 4), device=seed.device) + (first // 4)[:, None]
    last = torch.full_like(index[:, :1], lane)
    counter = (index, (position & _MASK)[:, None], (choice & _MASK)[:, None], last)
    key = ((seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None])
    words = torch.stack(philox_torch(counter, key), dim=-1)
    return words.view(len(seed), -1)[:, :count]


def philox_torch(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of noise. 32-bit words in int64 tensors of any shapes that broadcast; products wrap as they should."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        product, other = a * _MULTIPLY[0], c * _MULTIPLY[1]
        a, c = ((other >> 32) & _MASK) ^ (b ^ low), ((product >> 32) & _MASK) ^ (d ^ high)
        b, d = other & _MASK, product & _MASK
        low, high = (low + _WEYL[0]) & _MASK, (high + _WEYL[1]) & _MASK
    return a, b, c, d
