"""From logits to token ids and what they do to the slots, on the device alone. `workers.sampling` says what a token is.

The logits of N rows are read in tiles of `sampling.TILE` consecutive ids, by up to four launches:

1. `_tiles` reads all of them once, and leaves each tile's highest logit and Σ exp((logit − highest) / temperature).
2. `_floors` finds the least logit that top_k and top_p leave in a row, from few of its tiles.
3. `_tiles` sums the tiles of rows with filters again, without what these take away.
4. `_rows` races the tiles, reads the winner again, races its tokens, and writes the id and the slot's state.

Rows without filters need 1 and 4 only. Every program works on one row, in an order that nothing else decides, and
nothing is summed by atomics: so a row gets the same bits alone as among others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka.wire import LEAST_LOGPROB
from workers import noise
from workers.sampling import GREEDY_BELOW, TILE, SamplerState
from workers.scores import Scores, best

_GROUP = 4
"""Tiles that one program of `_tiles` takes. Another number may sum in another order."""
_LISTED = 8
"""Tiles that `_floors` reads at once."""
_ROOM = 2048
"""Logits among which `_floors` looks for the last one that stays, once no more than these can be it."""
_REGISTERS = 64
"""Most registers of a thread of `_floors`: it waits for memory most of the time, so many threads should."""
_OPEN = tl.constexpr(-2139095041)
"""The key of −∞: the lower end of a search that knows none."""


class Sampler:
    """Samples up to `max_rows` rows at a time, of `vocab_size` logits each.

    Its workspaces are made here: 4 · max_rows · (3 · vocab_size / TILE + 1 + _ROOM) bytes, about 11 KB a row at
    128,256 tokens. A call allocates nothing and does not wait for the device: it can be recorded in a graph.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.tiles = -(-vocab_size // TILE)
        self._maxima = torch.empty((max_rows, self.tiles), dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._maxima)
        self._listed = torch.empty((max_rows, self.tiles), dtype=torch.int32, device=device)
        self._floors = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._candidates = torch.empty((max_rows, _ROOM), dtype=torch.float32, device=device)
        # Philox makes four words at a time, and a block has a power of two of elements.
        self._width = max(triton.next_power_of_2(self.tiles), 16)

    def __call__(
        self, logits: Tensor, rows: Tensor, positions: Tensor, state: SamplerState, ids_out: Tensor, *, full: bool
    ) -> None:
        """Sample a token for each of N rows.

        logits [N, vocab] in any float dtype, a row's next to each other; rows int64[N], their slots; positions
        int64[N], the place of the token being sampled in its sequence; ids_out int32[N] takes the ids, or NO_TOKEN for
        a row whose slot is dead. `state.last` of the other slots becomes their id, and `state.dead` whether it is one
        of their stop ids. No two rows may be of one slot unless it is dead. `full`: some row may use top_k, top_p or
        min_p; otherwise those are not looked at, but for a top_k of 1.

        Raises ValueError if the shapes are not the sampler's.
        """
        count = len(rows)
        self._check(logits, count)
        if not count:
            return
        groups = triton.cdiv(self.tiles, _GROUP)
        first = (logits, logits.stride(0), rows, state.temperature, state.top_k, state.min_p, state.dead)
        for floored in (False, True) if full else (False,):
            if floored:
                _floors[(count,)](
                    logits,
                    logits.stride(0),
                    rows,
                    state.temperature,
                    state.top_k,
                    state.top_p,
                    state.dead,
                    self._maxima,
                    self._sums,
                    self._floors,
                    self._listed,
                    self._candidates,
                    self.vocab_size,
                    self.tiles,
                    COLD=GREEDY_BELOW,
                    TILE=TILE,
                    WIDTH=self._width,
                    LISTED=_LISTED,
                    ROOM=_ROOM,
                    num_warps=8,
                    maxnreg=_REGISTERS,
                )
            _tiles[(count, groups)](
                *first,
                self._maxima,
                self._sums,
                self._floors,
                self.vocab_size,
                self.tiles,
                RAW=False,
                FLOORED=floored,
                COLD=GREEDY_BELOW,
                TILE=TILE,
                GROUP=_GROUP,
                WIDTH=self._width,
                num_warps=4,
            )
        _rows[(count,)](
            *first,
            positions,
            state.seed,
            state.choice,
            state.stops,
            state.last,
            self._maxima,
            self._sums,
            self._floors,
            ids_out,
            self.vocab_size,
            self.tiles,
            FULL=full,
            COLD=GREEDY_BELOW,
            TILE=TILE,
            WIDTH=self._width,
            STOPS=state.stops.shape[1],
            STOPS_WIDTH=triton.next_power_of_2(state.stops.shape[1]),
            TOKENS=noise.TOKENS,
            TILES=noise.TILES,
            num_warps=4,
        )

    def scores(self, logits: Tensor, tokens: Tensor, width: int) -> Scores:
        """What `Scores.of(logits.float(), tokens, width)` is, from [n, vocab] in any float dtype and int64[n].

        The `width` most probable tokens lie in the `width` tiles of the highest maxima, of equals the first: each of
        these has a token that comes before any of another tile. So no more than those are ranked.
        """
        count = len(tokens)
        self._check(logits, count)
        if not count:
            return Scores.of(logits.float(), tokens, width)
        _tiles[(count, triton.cdiv(self.tiles, _GROUP))](
            logits,
            logits.stride(0),
            tokens,
            self._floors,
            self._listed,
            self._floors,
            self._floors,
            self._maxima,
            self._sums,
            self._floors,
            self.vocab_size,
            self.tiles,
            RAW=True,
            FLOORED=False,
            COLD=GREEDY_BELOW,
            TILE=TILE,
            GROUP=_GROUP,
            WIDTH=self._width,
            num_warps=4,
        )
        maxima, sums = self._maxima[:count], self._sums[:count]
        top = maxima.amax(dim=-1, keepdim=True)
        rest = ((maxima - top).exp() * sums).sum(dim=-1, keepdim=True).log()
        chosen = logits.gather(1, tokens[:, None]).float() - top - rest
        # In rising order, so that of equals the first in place has the lowest id.
        tiles = best(maxima - top - rest, min(width, self.tiles)).sort(dim=-1).values
        ids = (tiles[:, :, None] * TILE + torch.arange(TILE, device=logits.device)).flatten(1)
        own = logits.gather(1, ids.clamp(max=self.vocab_size - 1)).float() - top - rest
        own.clamp_(min=LEAST_LOGPROB).masked_fill_(ids >= self.vocab_size, -torch.inf)
        places = best(own, min(width, self.vocab_size))
        none = torch.empty(0, dtype=torch.int32, device=logits.device)
        return Scores(
            chosen.squeeze(1).clamp_(min=LEAST_LOGPROB),
            ids.gather(1, places).to(torch.int32),
            own.gather(1, places),
            none,
        )

    def _check(self, logits: Tensor, count: int) -> None:
        if count > self.max_rows or logits.shape != (count, self.vocab_size) or (count and logits.stride(1) != 1):
            raise ValueError(
                f"{count} rows and logits {tuple(logits.shape)} of strides {logits.stride()}, "
                f"for a sampler of {self.max_rows} × {self.vocab_size}"
            )


@triton.jit
def _tiles(
    logits_ptr,
    stride,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    min_p_ptr,
    dead_ptr,
    maxima_ptr,
    sums_ptr,
    floors_ptr,
    vocab,
    tiles,
    RAW: tl.constexpr,
    FLOORED: tl.constexpr,
    COLD: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The highest logit of each tile, and Σ exp((logit − it) / temperature). RAW: at temperature 1, whatever the slot's
    is. FLOORED: the sums alone, of what the row's filters leave, and only for rows that have any."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    there = tile < tiles
    ids = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    at = logits_ptr + row * stride + ids
    wanted = there[:, None] & (ids < vocab)
    if not FLOORED:
        # Before anything is known of the slot, since that takes two loads one after the other.
        x = tl.load(at, mask=wanted, other=float("-inf")).to(tl.float32)
    if RAW:
        run = True
        scale = 1.0
    else:
        slot = tl.load(rows_ptr + row)
        temperature = tl.load(temperature_ptr + slot)
        run = (temperature >= COLD) & (tl.load(top_k_ptr + slot) != 1)
        scale = 1.0 / tl.maximum(temperature, COLD)
    if FLOORED:
        floor = tl.load(floors_ptr + row)
        share = tl.load(min_p_ptr + slot)
        run = run & ((floor > float("-inf")) | (share > 0)) & (tl.load(dead_ptr + slot) == 0)
        if run:
            every = tl.arange(0, WIDTH)
            top = tl.max(tl.load(maxima_ptr + row * tiles + every, mask=every < tiles, other=float("-inf")), 0)
            least = _log(share)
            high = tl.load(maxima_ptr + row * tiles + tile, mask=there, other=float("-inf"))
            some = (high >= floor) & ((high - top) * scale >= least)
            x = tl.load(at, mask=wanted & some[:, None], other=float("-inf")).to(tl.float32)
            x = tl.where((x >= floor) & ((x - top) * scale >= least), x, float("-inf"))
            tl.store(sums_ptr + row * tiles + tile, _weigh(x, high, scale), mask=there)
    else:
        high = tl.max(x, 1)
        tl.store(maxima_ptr + row * tiles + tile, high, mask=there)
        if run:
            tl.store(sums_ptr + row * tiles + tile, _weigh(x, high, scale), mask=there)


@triton.jit
def _weigh(x, high, scale):
    """Σ exp((x − high) · scale) of each row of a block; 0 where all is −∞."""
    base = tl.where(high == float("-inf"), 0.0, high)
    return tl.sum(tl.exp((x - base[:, None]) * scale), 1)


@triton.jit
def _rows(
    logits_ptr,
    stride,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    min_p_ptr,
    dead_ptr,
    positions_ptr,
    seed_ptr,
    choice_ptr,
    stops_ptr,
    last_ptr,
    maxima_ptr,
    sums_ptr,
    floors_ptr,
    ids_ptr,
    vocab,
    tiles,
    FULL: tl.constexpr,
    COLD: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Both races of a row, or the argmax where it is greedy; then what the id does to the slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    if tl.load(dead_ptr + slot) != 0:
        tl.store(ids_ptr + row, -1)
    else:
        temperature = tl.load(temperature_ptr + slot)
        cold = (temperature < COLD) | (tl.load(top_k_ptr + slot) == 1)
        tile = tl.arange(0, WIDTH)
        there = tile < tiles
        high = tl.load(maxima_ptr + row * tiles + tile, mask=there, other=float("-inf"))
        top = tl.max(high, 0)
        scale = 1.0 / tl.maximum(temperature, COLD)
        seed = tl.load(seed_ptr + slot)
        position = tl.load(positions_ptr + row)
        choice = tl.load(choice_ptr + slot)
        race = high
        if cold == 0:
            sums = tl.load(sums_ptr + row * tiles + tile, mask=there, other=0.0)
            gumbels = _gumbels(seed, 0, position, choice, TILES, WIDTH)
            race = tl.where(there, (high - top) * scale + _log(sums) + gumbels, float("-inf"))
        # Logits that are not numbers must not lead outside.
        best = tl.minimum(tl.argmax(race, 0), tiles - 1)
        ids = best * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if cold == 0:
            gumbels = _gumbels(seed, best * (TILE // 4), position, choice, TOKENS, TILE)
            z = (x - top) * scale
            if FULL:
                floor = tl.load(floors_ptr + row)
                least = _log(tl.load(min_p_ptr + slot))
                z = tl.where((x >= floor) & (z >= least), z, float("-inf"))
            x = z + gumbels
        token = tl.minimum(best * TILE + tl.argmax(x, 0), vocab - 1)
        tl.store(ids_ptr + row, token)
        tl.store(last_ptr + slot, token.to(tl.int64))
        at = tl.arange(0, STOPS_WIDTH)
        stops = tl.load(stops_ptr + slot * STOPS + at, mask=at < STOPS, other=-1)
        if tl.sum((stops == token).to(tl.int32), 0) > 0:
            tl.store(dead_ptr + slot, 1)


@triton.jit
def _gumbels(seed, first, position, choice, LANE: tl.constexpr, COUNT: tl.constexpr):
    """−log of the exponential noise of COUNT tokens or tiles, from the counter `first` on: see `workers.noise`."""
    counter = (first + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zero = counter * 0
    a, b, c, d = tl.philox(seed, counter, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero + LANE)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # 1 − u has lost what a small u was: there −log(1 − u) is the sum of uⁿ / n.
    low = uniform < 0.0625
    u = uniform
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    exponentials = tl.where(low, series, -tl.log(1 - tl.where(low, 0.5, u)))
    return -tl.log(exponentials)


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
            bound = top + temperature * _log((1.0 - tl.maximum(top_p, 0.0)) * total / everything)
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
def _log(value):
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
