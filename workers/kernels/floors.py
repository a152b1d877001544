"""The least logit that top_k and top_p leave in each row, by a search that reads few of its tiles.

Tiles are those of `workers.kernels.sample`, which has found the highest logit and the sum of each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.sampling import GREEDY_BELOW, TILE, SamplerState

LISTED = 8
"""Tiles that are read at once."""
ROOM = 2048
"""Logits among which the last one that stays is looked for, once no more than these can be it."""
_REGISTERS = 64
"""Most registers of a thread: it waits for memory most of the time, so many threads should."""
_OPEN = tl.constexpr(-2139095041)
"""The key of −∞: the lower end of a search that knows none."""


class FloorSearch:
    """For up to `max_rows` rows of `vocab_size` logits each. Its workspaces are made here: 4 · max_rows · (vocab_size /
    TILE + ROOM) bytes."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._tiles = -(-vocab_size // TILE)
        self._listed = torch.empty((max_rows, self._tiles), dtype=torch.int32, device=device)
        self._candidates = torch.empty((max_rows, ROOM), dtype=torch.float32, device=device)

    def __call__(
        self, logits: Tensor, rows: Tensor, state: SamplerState, maxima: Tensor, sums: Tensor, floors: Tensor
    ) -> None:
        """Of N rows: logits [N, vocab], a row's next to each other; rows int64[N], their slots; maxima and sums
        float32[N or more, tiles]: each tile's highest logit and Σ exp((logit − it) / temperature). `floors`, float32[N
        or more], takes the least logit that stays; −∞ where all do."""
        _floors[(len(rows),)](
            logits,
            logits.stride(0),
            rows,
            state.temperature,
            state.top_k,
            state.top_p,
            state.dead,
            maxima,
            sums,
            floors,
            self._listed,
            self._candidates,
            self._vocab_size,
            self._tiles,
            COLD=GREEDY_BELOW,
            TILE=TILE,
            WIDTH=max(triton.next_power_of_2(self._tiles), 16),
            LISTED=LISTED,
            ROOM=ROOM,
            num_warps=8,
            maxnreg=_REGISTERS,
        )


@triton.jit
def _floors(
    logits_ptr,
    stride,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    dead_ptr,
    maxima_ptr,
    sums_ptr,
    floors_ptr,
    listed_ptr,
    candidates_ptr,
    vocab,
    tiles,
    COLD: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The least logit that top_k, and then top_p of what that leaves, leave in a row; −∞: all.

    Both are the least logit v for which F(v) < goal, where F(v) counts the logits above v (top_k), or sums their
    exp((logit − highest) / temperature) (top_p). min_p needs no search, and is applied where logits are read.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    limited = (top_k > 1) & (top_k < vocab)
    run = (tl.load(dead_ptr + slot) == 0) & (temperature >= COLD) & (top_k != 1) & (limited | (top_p < 1.0))
    if run:
        own_ptr = logits_ptr + row * stride
        list_ptr = listed_ptr + row * tiles
        room_ptr = candidates_ptr + row * ROOM
        tile = tl.arange(0, WIDTH)
        high = tl.load(maxima_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        sums = tl.load(sums_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        top = tl.max(high, 0)
        scale = 1.0 / temperature
        reach = tl.maximum(top - tl.min(tl.where(high == float("-inf"), top, high), 0), temperature)
        highest = _key(top).to(tl.int64)
        klo = highest * 0 + _OPEN
        floor = tl.minimum(top, float("-inf"))
        everything = tl.cast(vocab, tl.float32)
        if limited:
            # top_k tiles have a highest logit, each of its own, that is at least the top_k-th highest of these.
            if top_k <= tiles:
                ones = tl.where(tile < tiles, 1.0, 0.0)
                klo = _bisect(high, ones, top_k.to(tl.float32), 0.0, klo, highest) - 1
            floor = _search(
                own_ptr, list_ptr, room_ptr, high, top, scale, reach, klo, everything, top_k.to(tl.float32),
                (top_k <= tiles).to(tl.int32), vocab, True, TILE, WIDTH, LISTED, ROOM,
            )  # fmt: skip
            klo = _key(floor).to(tl.int64) - 1
        if top_p < 1.0:
            total = tl.sum(tl.where(sums > 0, tl.exp((high - top) * scale) * sums, 0.0), 0)
            if limited:
                below = _unkey(klo)
                count = _list(list_ptr, high, below, WIDTH)
                total, _, _, _ = _sums(
                    own_ptr, list_ptr, count, top, scale, below, below, below, below, vocab, False, TILE, LISTED
                )
            # Tokens of a lower probability than this cannot have 1 − top_p together, however many they are.
            bound = top + temperature * log_or_low((1.0 - tl.maximum(top_p, 0.0)) * total / everything)
            klo = tl.maximum(klo, _key(bound).to(tl.int64) - 4)
            floor = _search(
                own_ptr, list_ptr, room_ptr, high, top, scale, reach, klo, total, top_p * total, 0,
                vocab, False, TILE, WIDTH, LISTED, ROOM,
            )  # fmt: skip
        tl.store(floors_ptr + row, floor)
    else:
        tl.store(floors_ptr + row, float("-inf"))


@triton.jit
def _search(
    own_ptr,
    list_ptr,
    room_ptr,
    high,
    top,
    scale,
    reach,
    klo,
    flo,
    goal,
    ready,
    vocab,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The least logit v of a row for which F(v) < goal; see `_floors`. COUNT: F counts.

    It is above the key `klo` and at most `top`; `flo` is at least F there. Each turn reads the tiles that have logits
    above the lower end, finds F at four pivots, and moves both ends; once so few logits can lie between them that
    they have room, these are collected (at once where `ready`), and the rest is done among them. Where floats between
    the ends run out first, many logits are equal, and v is the upper end.
    """
    khi = _key(top).to(tl.int64)
    klo = tl.minimum(klo, khi - 1)
    fhi = goal * 0
    count = _list(list_ptr, high, _unkey(klo), WIDTH)
    found = count * 0 + ROOM + 1
    turn = count * 0
    ready = tl.where(count * TILE <= ROOM, 1, ready)
    while (found > ROOM) & (khi - klo > 1):
        lo = _unkey(klo)
        hi = _unkey(khi)
        if ready != 0:
            found = _collect(own_ptr, list_ptr, room_ptr, count, lo, hi, vocab, TILE, LISTED, ROOM)
            ready = ready * 0
        else:
            gap = khi - klo
            # By turns: evenly over the interval, about where F as a straight line meets the goal, evenly over floats.
            lo = tl.maximum(lo, -1e38)
            wide = hi - lo
            guess = hi - wide * ((goal - fhi) / tl.maximum(flo - fhi, 1e-30))
            k0 = klo + gap // 4
            k1 = klo + gap // 2
            k2 = khi - gap // 4
            k3 = khi - 1
            # Not for ever, since logits may be no numbers: the last way always ends.
            if (klo == _OPEN) & (turn < 8):
                k0 = _key(hi - 4 * reach).to(tl.int64)
                k1 = _key(hi - 2 * reach).to(tl.int64)
                k2 = _key(hi - reach).to(tl.int64)
                k3 = _key(hi - reach / 2).to(tl.int64)
                reach = reach * 8
            elif turn % 3 == 0:
                k0 = _key(lo + wide * 0.2).to(tl.int64)
                k1 = _key(lo + wide * 0.4).to(tl.int64)
                k2 = _key(lo + wide * 0.6).to(tl.int64)
                k3 = _key(lo + wide * 0.8).to(tl.int64)
            elif turn % 3 == 1:
                k0 = _key(guess - wide / 8).to(tl.int64)
                k1 = _key(guess - wide / 64).to(tl.int64)
                k2 = _key(guess + wide / 64).to(tl.int64)
                k3 = _key(guess + wide / 8).to(tl.int64)
            k0 = tl.minimum(tl.maximum(k0, klo + 1), khi - 1)
            k1 = tl.minimum(tl.maximum(k1, klo + 1), khi - 1)
            k2 = tl.minimum(tl.maximum(k2, klo + 1), khi - 1)
            k3 = tl.minimum(tl.maximum(k3, klo + 1), khi - 1)
            f0, f1, f2, f3 = _sums(
                own_ptr, list_ptr, count, top, scale, _unkey(k0), _unkey(k1), _unkey(k2), _unkey(k3),
                vocab, COUNT, TILE, LISTED,
            )  # fmt: skip
            # The pivots rise and F falls, also as it is rounded, since all four are summed in the same order.
            klo = tl.where(f0 >= goal, k0, klo)
            flo = tl.where(f0 >= goal, f0, flo)
            klo = tl.where(f1 >= goal, k1, klo)
            flo = tl.where(f1 >= goal, f1, flo)
            klo = tl.where(f2 >= goal, k2, klo)
            flo = tl.where(f2 >= goal, f2, flo)
            klo = tl.where(f3 >= goal, k3, klo)
            flo = tl.where(f3 >= goal, f3, flo)
            khi = tl.where(f3 >= goal, khi, k3)
            fhi = tl.where(f3 >= goal, fhi, f3)
            khi = tl.where(f2 >= goal, khi, k2)
            fhi = tl.where(f2 >= goal, fhi, f2)
            khi = tl.where(f1 >= goal, khi, k1)
            fhi = tl.where(f1 >= goal, fhi, f1)
            khi = tl.where(f0 >= goal, khi, k0)
            fhi = tl.where(f0 >= goal, fhi, f0)
            count = _list(list_ptr, high, _unkey(klo), WIDTH)
            # What lies between the ends weighs no less than the lower one. Rounding may belie it: then it is collected
            # in vain, and the next turn goes on.
            lightest = 1.0 if COUNT else tl.exp((_unkey(klo) - top) * scale)
            fits = (flo - fhi <= ROOM * lightest) | (count * TILE <= ROOM)
            ready = fits.to(tl.int32)
            turn += 1
    if khi - klo > 1:
        at = tl.arange(0, ROOM)
        x = tl.load(room_ptr + at, mask=at < found, other=float("-inf"))
        weights = tl.where(at < found, 1.0 if COUNT else tl.exp((x - top) * scale), 0.0)
        khi = _bisect(x, weights, goal, fhi, klo, khi)
    return _unkey(khi)


@triton.jit
def _list(list_ptr, high, lo, WIDTH: tl.constexpr):
    """Write down which tiles have logits above `lo`, and return how many."""
    some = (high > lo).to(tl.int32)
    # The barriers: others may still read the old list, and all shall find the new one.
    tl.debug_barrier()
    tl.store(list_ptr + tl.cumsum(some, 0) - 1, tl.arange(0, WIDTH), mask=some > 0)
    tl.debug_barrier()
    return tl.sum(some, 0)


@triton.jit
def _listed_logits(own_ptr, list_ptr, start, count, vocab, TILE: tl.constexpr, LISTED: tl.constexpr):
    """LISTED tiles of the list, from number `start` on: float32[LISTED · TILE / 8, 8], −∞ behind the end.

    Eight neighbours go to one thread, so that what is summed over them takes no exchange.
    """
    part = tl.arange(0, LISTED * TILE // 8)
    number = start + part // (TILE // 8)
    tile = tl.load(list_ptr + number, mask=number < count, other=0)
    ids = (tile * TILE + part % (TILE // 8) * 8)[:, None] + tl.arange(0, 8)[None, :]
    there = (number < count)[:, None] & (ids < vocab)
    return tl.load(own_ptr + ids, mask=there, other=float("-inf")).to(tl.float32)


@triton.jit
def _sums(
    own_ptr,
    list_ptr,
    count,
    top,
    scale,
    p0,
    p1,
    p2,
    p3,
    vocab,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
):
    """F at four pivots, over the listed tiles."""
    f0 = tl.zeros((LISTED * TILE // 8,), tl.float32)
    f1 = tl.zeros((LISTED * TILE // 8,), tl.float32)
    f2 = tl.zeros((LISTED * TILE // 8,), tl.float32)
    f3 = tl.zeros((LISTED * TILE // 8,), tl.float32)
    for start in range(0, count, LISTED):
        x = _listed_logits(own_ptr, list_ptr, start, count, vocab, TILE, LISTED)
        weights = 1.0 if COUNT else tl.exp((x - top) * scale)
        f0 += tl.sum(tl.where(x > p0, weights, 0.0), 1)
        f1 += tl.sum(tl.where(x > p1, weights, 0.0), 1)
        f2 += tl.sum(tl.where(x > p2, weights, 0.0), 1)
        f3 += tl.sum(tl.where(x > p3, weights, 0.0), 1)
    return tl.sum(f0, 0), tl.sum(f1, 0), tl.sum(f2, 0), tl.sum(f3, 0)


@triton.jit
def _collect(
    own_ptr, list_ptr, room_ptr, count, lo, hi, vocab, TILE: tl.constexpr, LISTED: tl.constexpr, ROOM: tl.constexpr
):
    """Write the listed tiles' logits above `lo` and up to `hi` into the room as far as it goes; return how many."""
    found = count * 0
    tl.debug_barrier()
    for start in range(0, count, LISTED):
        x = _listed_logits(own_ptr, list_ptr, start, count, vocab, TILE, LISTED)
        some = ((x > lo) & (x <= hi)).to(tl.int32)
        each = tl.sum(some, 1)
        places = found + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(some, 1) - some
        tl.store(room_ptr + places, x, mask=(some > 0) & (places < ROOM))
        found += tl.sum(each, 0)
    tl.debug_barrier()
    return found


@triton.jit
def _bisect(values, weights, goal, above, klo, khi):
    """The least of the values, as a key, for which `above` and the weights of all higher ones together are less than
    the goal. It is above the key `klo` and at most `khi`."""
    keys = _key(values).to(tl.int64)
    while khi - klo > 1:
        middle = klo + (khi - klo) // 2
        enough = above + tl.sum(tl.where(keys > middle, weights, 0.0), 0) >= goal
        klo = tl.where(enough, middle, klo)
        khi = tl.where(enough, khi, middle)
    return khi


@triton.jit
def log_or_low(value):
    """The logarithm; −∞ of 0."""
    return tl.where(value > 0, tl.log(tl.where(value > 0, value, 1.0)), float("-inf"))


@triton.jit
def _key(value):
    """An int32 for each float32, in the same order; 0 and −0 have one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unkey(key):
    """The float32 of a key, given in int64."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
