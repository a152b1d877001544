"""From hidden states to token ids.

A row's token is a draw from softmax(z), z = (logit − highest logit) / temperature over the tokens that top_k, top_p and
min_p leave, −∞ elsewhere. The logits are the model's, after the row's `Shape` if it has one (shaping.py). The draw is
two races, so that noise need not be made for the whole vocabulary. The vocabulary is cut into tiles of `TILE`
consecutive ids, L_j = log Σ exp z over tile j, and all E are exponential noise of the row's own (noise.py):

    tile  = argmax over j of L_j − log E_j
    token = argmax over the tile's i of z_i − log E_i

−log E is a Gumbel variate, so the first race draws tile j with probability exp L_j / Σ exp L, the softmax's mass in it,
and the second, whose noise is independent of the first's, token i with probability exp z_i / exp L_j (the Gumbel-max
trick, over groups and then within one: Maddison, Tarlow and Minka, "A* sampling", NIPS 2014, section 2). The product
is exp z_i / Σ exp z: exactly the softmax. Of equals the lowest index wins. The token depends on the row alone: on its
logits, its parameters and (seed, choice, position); rounding changes it only where a race is nearly a tie.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers import memory, noise
from workers.scores import Asked, Model, Scores
from workers.shaping import Shape

GREEDY_BELOW = 1e-5
"""A lower temperature means the most probable token."""
TILE = 512
"""Consecutive ids whose tokens race as one first; part of what a seed means."""
_CANDIDATES = 256
"""How many of the most probable tokens are looked at first for top_p: far fewer than the vocabulary, mostly enough."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What choosing tokens reads and writes of all slots, on the device; `workers.slots.Slots` owns it."""

    temperature: Tensor
    """float32[slots]."""
    top_k: Tensor
    """int32[slots]; 0: all."""
    top_p: Tensor
    """float32[slots]."""
    min_p: Tensor
    """float32[slots]."""
    seed: Tensor
    """int64[slots]."""
    choice: Tensor
    """int64[slots]."""
    stops: Tensor
    """int64[slots, MAX_STOP_IDS]: ids after which a slot is dead; −1 pads."""
    dead: Tensor
    """bool[slots]: written."""
    last: Tensor
    """int64[slots]: the token chosen last; written."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to choose a token in each of S sampled rows. All tensors are on the device."""

    temperature: Tensor
    """float32[S]."""
    top_k: Tensor
    """int32[S]: among so many most probable tokens; 0: all."""
    top_p: Tensor
    """float32[S]: among the fewest most probable tokens whose probabilities reach this sum; 1: all."""
    min_p: Tensor
    """float32[S]: among the tokens at least this share as probable as the most probable one; 0: all."""
    seed: Tensor
    """int64[S]."""
    choice: Tensor
    """int64[S]."""
    position: Tensor
    """int64[S]: of the token being sampled, which is the number of tokens before it in its sequence."""
    greedy_only: bool
    """Known on the host: every row has temperature 0."""
    plain: bool
    """Known on the host: no row uses top_k, top_p or min_p."""

    def pick(self, which: Tensor | slice) -> "SamplingRows":
        """Some of the rows."""
        return SamplingRows(
            temperature=self.temperature[which],
            top_k=self.top_k[which],
            top_p=self.top_p[which],
            min_p=self.min_p[which],
            seed=self.seed[which],
            choice=self.choice[which],
            position=self.position[which],
            greedy_only=self.greedy_only,
            plain=self.plain,
        )


class Choice(NamedTuple):
    """The tokens of S rows."""

    ids: Tensor
    """int64[S]."""
    scores: Scores | None
    """Of the rows that ask."""


def choose(
    model: Model,
    hidden: Tensor,
    rows: SamplingRows,
    shape: Shape | None = None,
    asked: Asked | None = None,
    *,
    processed: bool = False,
) -> Choice:
    """[S, hidden] of the sampled tokens → a token each. Holds at most `memory.MAX_LOGITS` logits at once.

    Scores are by the model's logits, or if `processed` by what each token was drawn from.
    """
    step = max(1, memory.MAX_LOGITS // model.vocab_size)
    if len(hidden) <= step:
        return _choose(model, hidden, rows, shape, asked, processed)
    parts = []
    for first in range(0, len(hidden), step):
        end = first + step
        part = slice(first, end)
        own, owing = shape and shape.within(first, end), asked and asked.within(first, end)
        parts.append(_choose(model, hidden[part], rows.pick(part), own, owing, processed))
    scores = [part.scores for part in parts if part.scores is not None]
    return Choice(torch.cat([part.ids for part in parts]), Scores.joined(scores) if scores else None)


def _choose(
    model: Model, hidden: Tensor, rows: SamplingRows, shape: Shape | None, asked: Asked | None, processed: bool
) -> Choice:
    logits = model.logits(hidden).float()
    # Shaping changes the logits in place.
    raw = None if asked is None or processed else logits[asked.rows]
    if shape is not None:
        shape.apply(logits, rows.position)
    ids = sample(logits, rows)
    if asked is None:
        return Choice(ids, None)
    told = drawn_from(logits[asked.rows], rows.pick(asked.rows)) if raw is None else raw
    return Choice(ids, Scores.of(told, ids[asked.rows], asked.width))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32[S, vocab] → int64[S] ids. A greedy row takes the lowest id of equal logits."""
    if rows.greedy_only or not len(logits):
        return logits.argmax(dim=-1)
    greedy = (rows.temperature < GREEDY_BELOW) | (rows.top_k == 1)
    if logits.device.type != "cpu":
        # Rows that need no noise get it all the same: to leave them out, the host would have to wait for the device.
        return torch.where(greedy, logits.argmax(dim=-1), _draw(logits, rows))
    if not greedy.any():
        return _draw(logits, rows)
    ids = logits.argmax(dim=-1)
    drawn = (~greedy).nonzero().squeeze(-1)
    if len(drawn):
        ids[drawn] = _draw(logits[drawn], rows.pick(drawn))
    return ids


def drawn_from(logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32[S, vocab] → the same, whose softmax is the distribution of each row's token. A row at temperature 0 draws
    nothing: its logits stay."""
    if rows.greedy_only:
        return logits
    scaled = _scaled(logits, rows.temperature)
    if not rows.plain:
        scaled.masked_fill_(scaled < _floor(scaled, rows), -torch.inf)
    return torch.where((rows.temperature < GREEDY_BELOW)[:, None], logits, scaled)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """float32[S, vocab] and float32[S] → logits at the temperature, the highest of each row 0."""
    # It becomes 0 first: so a low temperature neither overflows nor drowns the noise between near-ties.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= temperature.clamp(min=GREEDY_BELOW)[:, None]
    return scaled


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32[S, vocab] → int64[S], a draw from each row's distribution."""
    vocab = logits.shape[1]
    scaled = _scaled(logits, rows.temperature)
    if not rows.plain:
        scaled.masked_fill_(scaled < _floor(scaled, rows), -torch.inf)
    tiles = -(-vocab // TILE)
    numbers = (rows.seed, rows.choice, rows.position)
    noise_of_tiles = noise.exponentials(*numbers, torch.zeros_like(rows.seed), tiles, noise.TILES)
    # The best tile has a sum of 1 or more. Where another's vanishes, no noise would have let it win.
    tile = (_tile_sums(scaled).log_() - noise_of_tiles.log_()).argmax(dim=-1)
    first = tile * TILE
    ids = first[:, None] + torch.arange(min(TILE, vocab), device=logits.device)
    own = scaled.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, -torch.inf)
    race = own - noise.exponentials(*numbers, first, own.shape[1], noise.TOKENS).log_()
    return first + race.argmax(dim=-1)


def _tile_sums(scaled: Tensor) -> Tensor:
    """Σ exp over each tile: float32[S, vocab] → float32[S, tiles]."""
    weights = scaled.exp()
    whole = scaled.shape[1] // TILE
    sums = weights[:, : whole * TILE].view(len(scaled), whole, TILE).sum(dim=-1)
    if whole * TILE == scaled.shape[1]:
        return sums
    return torch.cat((sums, weights[:, whole * TILE :].sum(dim=-1, keepdim=True)), dim=1)


def _floor(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """The least scaled logit that top_k, then top_p, then min_p leave: float32[S, vocab], at most 0 → float32[S, 1].

    Tokens equal to the last one that stays stay too, so the result does not depend on the order of equals.
    """
    # The most probable token has the logit 0, and top_k and top_p always leave it.
    least = rows.min_p.log()[:, None]
    vocab = scaled.shape[1]
    if scaled.device.type != "cpu":
        floor, _ = _nucleus(scaled.sort(dim=-1, descending=True).values, scaled, rows)
        return torch.maximum(floor, least)
    count = min(vocab, max(_CANDIDATES, int(rows.top_k.max()) + 1))
    floor, enough = _nucleus(scaled.topk(count, dim=-1).values, scaled, rows)
    short = (~enough).nonzero().squeeze(-1)
    if count < vocab and len(short):
        part = scaled[short]
        floor[short] = _nucleus(part.sort(dim=-1, descending=True).values, part, rows.pick(short))[0]
    return torch.maximum(floor, least)


def _nucleus(ranked: Tensor, scaled: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """`_floor` from the highest `count` logits of each row in order, float32[S, count], and whether they were enough
    to find it: bool[S]."""
    count = ranked.shape[1]
    limited, nucleus = rows.top_k > 0, rows.top_p < 1
    last = ranked.gather(1, (rows.top_k.long() - 1).clamp(0, count - 1)[:, None])
    last = last.masked_fill(~limited[:, None], -torch.inf)
    kept = ranked >= last
    sums = (ranked.exp() * kept).cumsum(dim=-1, dtype=torch.float64)
    total = torch.where(limited, sums[:, -1], scaled.exp().sum(dim=-1, dtype=torch.float64))
    goal = rows.top_p.double() * total
    # A token stays if those before it do not reach the goal; the first one always does.
    before = sums[:, :-1] < goal[:, None]
    tokens = (before & kept[:, 1:]).sum(dim=-1)
    least = ranked.gather(1, tokens[:, None])
    floor = torch.where(nucleus[:, None], torch.maximum(least, last), last)
    enough = torch.where(limited, ranked[:, -1] < last[:, 0], ~nucleus | (sums[:, -1] >= goal))
    return floor, enough
