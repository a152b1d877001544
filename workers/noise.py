"""Noise that depends on nothing but (seed, choice, position) and the token's id.

The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3): a key of two 32-bit words turns a counter of four into four words of noise. Here

    key     = (seed mod 2³², seed div 2³²), of the seed's two's complement
    counter = (id div 4, position, choice, 0), each mod 2³²
    noise   = word id mod 4

so that a token's noise can be found without that of any other. This layout is fixed: a test holds its vectors.

It is written twice: with numpy for the CPU, where its unsigned words and small pieces take much less time than torch's,
and with torch for every other device. Tests hold both to the same published vectors.
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
_LANES = 16384
"""Counters at once in numpy: what is in work then stays within a core's cache."""


def exponentials(seed: Tensor, choice: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard exponential noise, float32[S, vocab], from int64[S] each of seed, choice and position.

    −log1p(−u), of u = (word + ½) · 2⁻³² in float32, at most 1 − 2⁻²⁴: so it is between 2⁻³³ and 16.7.
    """
    if seed.device.type == "cpu":
        noise = torch.from_numpy(words_numpy(seed.numpy(), choice.numpy(), position.numpy(), vocab))
    else:
        noise = words_torch(seed, choice, position, vocab)
    uniform = noise.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def words_numpy(seed: Longs, choice: Longs, position: Longs, vocab: int) -> npt.NDArray[np.uint32]:
    """The noise of S rows: int64[S] each → uint32[S, vocab]."""
    quarter = -(-vocab // 4)
    out = np.empty((len(seed), quarter, 4), np.uint32)
    index = np.arange(quarter, dtype=np.uint64)[None]
    zero = np.zeros((1, 1), np.uint64)
    seeds, choices, positions = (row.astype(np.uint64)[:, None] for row in (seed, choice, position))
    rows = max(1, _LANES // quarter)
    for first in range(0, len(seed), rows):
        part = slice(first, first + rows)
        # A counter's words belong to a row or to a column at first: numpy spreads them out where they meet.
        counter = (index, positions[part] & _LOW, choices[part] & _LOW, zero)
        for word, lane in enumerate(philox_numpy(counter, (seeds[part] & _LOW, seeds[part] >> _HALF))):
            out[part, :, word] = lane
    return out.reshape(len(seed), quarter * 4)[:, :vocab]


def philox_numpy(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four words of noise. 32-bit words in uint64 arrays of any shapes that broadcast."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        product, other = a * np.uint64(_MULTIPLY[0]), c * np.uint64(_MULTIPLY[1])
        a, c = (other >> _HALF) ^ (b ^ low), (product >> _HALF) ^ (d ^ high)
        b, d = other & _LOW, product & _LOW
        low, high = (low + np.uint64(_WEYL[0])) & _LOW, (high + np.uint64(_WEYL[1])) & _LOW
    return a, b, c, d


def words_torch(seed: Tensor, choice: Tensor, position: Tensor, vocab: int) -> Tensor:
    """The noise of S rows on any device: int64[S] each → int64[S, vocab] of 32-bit words."""
    index = torch.arange(-(-vocab // 4), device=seed.device)[None]
    counter = (index, (position & _MASK)[:, None], (choice & _MASK)[:, None], torch.zeros_like(index[:, :1]))
    key = ((seed & _MASK)[:, None], ((seed >> 32) & _MASK)[:, None])
    words = torch.stack(philox_torch(counter, key), dim=-1)
    return words.view(len(seed), -1)[:, :vocab]


def philox_torch(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of noise. 32-bit words in int64 tensors of any shapes that broadcast; products wrap as they should."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        product, other = a * _MULTIPLY[0], c * _MULTIPLY[1]
        a, c = ((other >> 32) & _MASK) ^ (b ^ low), ((product >> 32) & _MASK) ^ (d ^ high)
        b, d = other & _MASK, product & _MASK
        low, high = (low + _WEYL[0]) & _MASK, (high + _WEYL[1]) & _MASK
    return a, b, c, d
