"""From logits to token ids and what they do to the slots, on the device alone. `workers.sampling` says what a token is.

The logits of N rows are read in tiles of `sampling.TILE` consecutive ids, by up to four launches:

1. `_tiles` reads all of them once, and leaves each tile's highest logit and Σ exp((logit − highest) / temperature).
2. `FloorSearch` finds the least logit that top_k and top_p leave in a row, from few of its tiles.
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
from workers.kernels.floors import FloorSearch, log_or_low
from workers.sampling import GREEDY_BELOW, TILE, SamplerState
from workers.scores import Scores, best

_GROUP = 4
"""Tiles that one program of `_tiles` takes. Another number may sum in another order."""


class Sampler:
    """Samples up to `max_rows` rows at a time, of `vocab_size` logits each.

    Its workspaces, and those of the search for floors, are made here: about 11 KB a row at
    128,256 tokens. A call allocates nothing and does not wait for the device: it can be recorded in a graph.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.tiles = -(-vocab_size // TILE)
        self._maxima = torch.empty((max_rows, self.tiles), dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._maxima)
        self._floors = torch.empty(max_rows, dtype=torch.float32, device=device)
        self._search = FloorSearch(max_rows, vocab_size, device)
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
        first = (logits, logits.stride(0), rows, state.temperature, state.top_k, state.min_p, state.dead)
        for floored in (False, True) if full else (False,):
            if floored:
                self._search(logits, rows, state, self._maxima, self._sums, self._floors)
            self._sum_tiles(*first, raw=False, floored=floored)
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
        # At temperature 1 nothing of a slot is looked at.
        none = self._floors
        self._sum_tiles(logits, logits.stride(0), tokens, none, none, none, none, raw=True, floored=False)
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

    def _sum_tiles(
        self,
        logits: Tensor,
        stride: int,
        rows: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        min_p: Tensor,
        dead: Tensor,
        *,
        raw: bool,
        floored: bool,
    ) -> None:
        """Launch `_tiles` over N rows."""
        _tiles[(len(rows), triton.cdiv(self.tiles, _GROUP))](
            logits,
            stride,
            rows,
            temperature,
            top_k,
            min_p,
            dead,
            self._maxima,
            self._sums,
            self._floors,
            self.vocab_size,
            self.tiles,
            RAW=raw,
            FLOORED=floored,
            COLD=GREEDY_BELOW,
            TILE=TILE,
            GROUP=_GROUP,
            WIDTH=self._width,
            num_warps=4,
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
            least = log_or_low(share)
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
            race = tl.where(there, (high - top) * scale + log_or_low(sums) + gumbels, float("-inf"))
        # Logits that are not numbers must not lead outside.
        best = tl.minimum(tl.argmax(race, 0), tiles - 1)
        ids = best * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if cold == 0:
            gumbels = _gumbels(seed, best * (TILE // 4), position, choice, TOKENS, TILE)
            z = (x - top) * scale
            if FULL:
                floor = tl.load(floors_ptr + row)
                least = log_or_low(tl.load(min_p_ptr + slot))
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
