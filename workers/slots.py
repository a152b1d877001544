"""What a worker holds of every running sequence between plans, indexed by slot.

Two copies of the truth, each where it is needed without asking the other side:

* on the device, what the next step reads and writes: block tables, lengths, last tokens, sampling parameters;
* on the host, what shapes a step: the ids still to prefill, and upper bounds of the lengths (a sequence that has
  stopped on the device is shorter than its bound, and the host does not wait to learn it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toka.wire import MAX_STOP_IDS, Admit, Plan
from workers.compact import Longs
from workers.groups import BadGroup, Groups, Layout, Tiles
from workers.sampling import GREEDY_BELOW, SamplerState, SamplingRows
from workers.scores import Asked
from workers.shaping import BadSampling, Shape, Shaping
from workers.upload import upload


class BadPlan(Exception):
    """A plan that contradicts what the worker holds. Plans are deltas, so nothing after it would mean anything."""


@dataclass(frozen=True, slots=True)
class Roster:
    """Slots that are sampled in one step, and what the host knows of them. S slots."""

    host: Longs
    slots: Tensor
    """int64[S], on the device: the same as `host`."""
    greedy_only: bool
    """Every row has temperature 0."""
    plain: bool
    """No row uses top_k, top_p or min_p."""
    shape: Shape | None
    """What changes their logits; None: nothing."""
    asked: Asked | None
    """Those whose log-probabilities are asked for; None: none."""


class Decoding(NamedTuple):
    """Decoding rows of a step, one token each. D rows."""

    tokens: Tensor
    """int64[D]."""
    positions: Tensor
    """int64[D]."""
    writes: Tensor
    """int64[D]: see `Batch.writes`."""
    lengths: Tensor
    """int32[D]: see `Batch.lengths`."""


class Slots:
    """The state of `max_slots` slots, for sequences of at most `max_blocks` blocks out of `num_blocks`.

    On the device there is one more, the spare slot. It is dead, empty and nobody's: rows that fill up a recorded batch
    are its own.
    """

    def __init__(
        self, max_slots: int, max_blocks: int, num_blocks: int, page_size: int, device: torch.device, vocab_size: int
    ) -> None:
        self.page_size = page_size
        self.max_slots = max_slots
        """Also the number of the spare slot."""
        self.spare = num_blocks
        """The block that takes unwanted writes and pads the tables."""
        self.device = device
        # On the device.
        count = max_slots + 1
        self.tables = torch.full((count, max_blocks), num_blocks, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)
        """Tokens whose keys and values are in the cache once every step assembled so far has run."""
        self.last = torch.zeros(count, dtype=torch.int64, device=device)
        """The token sampled last; its keys and values are not in the cache yet."""
        self.dead = torch.zeros(count, dtype=torch.bool, device=device)
        """The sequence has returned one of its stop ids."""
        self.dead[max_slots] = True
        self.stops = torch.full((count, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self.seed = torch.zeros(count, dtype=torch.int64, device=device)
        self.choice = torch.zeros(count, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(count, dtype=torch.int32, device=device)
        self.top_p = torch.ones(count, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(count, dtype=torch.float32, device=device)
        self.temperature = torch.ones(count, dtype=torch.float32, device=device)
        self.sampler = SamplerState(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            choice=self.choice,
            stops=self.stops,
            dead=self.dead,
            last=self.last,
        )
        self.numbers = torch.arange(count, device=device)
        """int64[slots]: 0, 1, 2, …"""
        self._advance = _advance_torch
        if device.type == "cuda":
            from workers.kernels.advance import advance

            self._advance = advance
        self.shaping = Shaping(max_slots, vocab_size, self.upload)
        # On the host.
        self.ids: list[Longs | None] = [None] * max_slots
        """What is to be prefilled, until it is."""
        self.needed: Longs = np.zeros(max_slots, np.int64)
        """How many ids the slot's sequence came with; 0: the slot is free."""
        self.ready = np.zeros(max_slots, np.bool_)
        """All of them have been prefilled: the slot may decode."""
        self.bound: Longs = np.zeros(max_slots, np.int64)
        """Upper bound of `lengths`, from a slot's first chunk on."""
        self.blocks: Longs = np.zeros(max_slots, np.int64)
        """Blocks in the slot's row of `tables`."""
        self.prompt_len: Longs = np.zeros(max_slots, np.int64)
        """How many of the ids that the slot's sequence came with are its prompt."""
        self.prompt_logprobs: Longs = np.full(max_slots, -1, np.int64)
        """How many most probable tokens are reported in each place of the prompt; -1: no log-probabilities at all."""
        self._logprobs: Longs = np.full(max_slots, -1, np.int64)
        self._greedy = np.zeros(max_slots, np.bool_)
        self._plain = np.zeros(max_slots, np.bool_)
        self.groups = Groups(max_slots, page_size)
        self._tiles: Tiles | None = None
        self.layout: Layout | None = None
        """What the slots of `decode` share, if there is attention that makes use of it; another object only when it has
        changed."""
        self.decode = self.roster(np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64, device=device))
        """The slots that the plan applied last decodes."""

    def __repr__(self) -> str:
        held, ready = int(np.count_nonzero(self.needed)), int(np.count_nonzero(self.ready))
        return f"<Slots {held} of {len(self.needed)} held, {ready} prefilled, {len(self.decode.host)} decoding>"

    def apply(self, plan: Plan) -> None:
        """Take over the plan's releases, admits, appends and decode roster. Raises BadPlan."""
        if plan.releases:
            self._release(self._check(unpack(plan.releases)))
        if plan.admits:
            self._admit(plan.admits)
        if plan.appends:
            self._append(unpack(plan.appends, 2))
        if plan.decode is not None:
            decode = self._check(unpack(plan.decode))
            if len(np.unique(decode)) < len(decode):
                raise BadPlan("a slot decodes twice")
            self.decode = self.roster(decode, self.upload(decode))
        if not self.ready[self.decode.host].all():
            raise BadPlan("a slot decodes whose prompt has not been prefilled")
        try:
            self.groups.apply(plan.groups, unpack(plan.members, 2))
            if self._tiles is not None and (plan.decode is not None or plan.groups or plan.members or plan.releases):
                self.layout = self.groups.layout(self.decode.host, self._tiles)
        except BadGroup as error:
            raise BadPlan(str(error)) from error

    def share(self, tiles: Tiles) -> None:
        """From here on, lay out what the decoding slots share, in such tiles."""
        self._tiles = tiles

    def roster(self, host: Longs, slots: Tensor) -> Roster:
        """The sampling parameters of some slots, given on the host and on the device."""
        wanted = self._logprobs[host]
        asking = np.flatnonzero(wanted >= 0)
        asked = Asked(asking, self.upload(asking), int(wanted.max())) if len(asking) else None
        return Roster(
            host=host,
            slots=slots,
            greedy_only=bool(self._greedy[host].all()),
            plain=bool(self._plain[host].all()),
            shape=self.shaping.shape(host),
            asked=asked,
        )

    def advance(self, rows: Tensor) -> Decoding:
        """Let slots `rows`, int64[D], run the token sampled last: what their rows are, and from here on their lengths
        count it. A dead row still runs, since the host does not know that it is dead: it reads what it may, writes to
        the spare block and stays where it is."""
        return self._advance(self, rows)

    def places(self, owners: Tensor, positions: Tensor) -> Tensor:
        """Flat places in the KV cache of tokens at `positions` of the sequences in slots `owners`: int64[T] each."""
        blocks = self.tables[owners, positions // self.page_size].to(torch.int64)
        return blocks * self.page_size + positions % self.page_size

    def sampling(self, roster: Roster) -> SamplingRows:
        """How the next token of each slot of a roster is chosen, once the step is assembled."""
        slots = roster.slots
        return SamplingRows(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            seed=self.seed[slots],
            choice=self.choice[slots],
            # A token's place in the noise is the number of tokens before it, which preemption does not change.
            position=self.lengths[slots],
            greedy_only=roster.greedy_only,
            plain=roster.plain,
        )

    def extend(self, slots: Longs, lengths: Longs) -> None:
        """The step being built leaves at most `lengths` tokens of `slots` in the cache. Raises BadPlan if their blocks
        cannot hold them."""
        if (lengths > self.blocks[slots] * self.page_size).any():
            raise BadPlan("a sequence grows beyond its blocks")
        self.bound[slots] = lengths

    def prefilled(self, slots: Longs) -> None:
        """The step being built prefills the last of these slots' ids."""
        self.ready[slots] = True
        for slot in slots.tolist():
            self.ids[slot] = None

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """The array on the device, without waiting for it; the caller gives the array away."""
        return upload(array, self.device)

    def _check(self, slots: Longs) -> Longs:
        if len(slots) and (slots.min() < 0 or slots.max() >= len(self.needed)):
            raise BadPlan(f"it names a slot outside 0 … {len(self.needed) - 1}")
        return slots

    def _release(self, slots: Longs) -> None:
        if not self.needed[slots].all() or len(np.unique(slots)) < len(slots):
            raise BadPlan("it releases a slot that is free")
        self.needed[slots] = 0
        self.ready[slots] = False
        self.shaping.release(slots)
        self.groups.release(slots)
        for slot in slots.tolist():
            self.ids[slot] = None

    def _admit(self, admits: Sequence[Admit]) -> None:
        slots = self._check(np.array([admit.slot for admit in admits], np.int64))
        if self.needed[slots].any() or len(np.unique(slots)) < len(slots):
            raise BadPlan("it admits a sequence to a slot that is taken")
        whole = np.full((len(admits), 4 + MAX_STOP_IDS), -1, np.int64)
        real = np.empty((len(admits), 3), np.float32)
        for row, admit in enumerate(admits):
            ids, stops = unpack(admit.ids), unpack(admit.stops)
            if not len(ids):
                raise BadPlan("it admits a sequence without tokens")
            if len(stops) > MAX_STOP_IDS:
                raise BadPlan(f"it admits a sequence with more than {MAX_STOP_IDS} stop ids")
            self.ids[admit.slot] = ids
            self.needed[admit.slot] = len(ids)
            sampling = admit.sampling
            greedy = sampling.temperature < GREEDY_BELOW
            self._greedy[admit.slot] = greedy
            self._plain[admit.slot] = greedy or (sampling.top_k == 0 and sampling.top_p >= 1 and sampling.min_p <= 0)
            self.prompt_len[admit.slot] = admit.prompt_len
            self.prompt_logprobs[admit.slot] = sampling.prompt_logprobs
            self._logprobs[admit.slot] = sampling.logprobs
            try:
                self.shaping.admit(admit.slot, sampling, ids, admit.prompt_len)
            except BadSampling as error:
                raise BadPlan(f"it admits a sequence with {error}") from error
            whole[row, :4] = admit.slot, admit.seed, admit.choice, sampling.top_k
            whole[row, 4 : 4 + len(stops)] = stops
            real[row] = sampling.temperature, sampling.top_p, sampling.min_p
        self.blocks[slots] = 0
        index, seed, choice, top_k, *_ = (ints := self.upload(whole)).unbind(1)
        temperature, top_p, min_p = self.upload(real).unbind(1)
        self.seed[index] = seed
        self.choice[index] = choice
        self.top_k[index] = top_k.to(torch.int32)
        self.stops[index] = ints[:, 4:]
        self.temperature[index] = temperature
        self.top_p[index] = top_p
        self.min_p[index] = min_p
        self.lengths.index_fill_(0, index, 0)
        self.last.index_fill_(0, index, 0)
        self.dead.index_fill_(0, index, False)
        self.tables.index_fill_(0, index, self.spare)
        blocks = [unpack(admit.blocks) for admit in admits]
        owners = np.repeat(slots, [len(run) for run in blocks])
        self._append(np.stack([owners, np.concatenate(blocks)], axis=1))

    def _append(self, pairs: Longs) -> None:
        """Extend rows of the block tables by (slot, block) pairs, int64[n, 2], in their order."""
        slots, blocks = self._check(pairs[:, 0]), pairs[:, 1]
        if not len(pairs):
            return
        if blocks.min() < 0 or blocks.max() >= self.spare:
            raise BadPlan(f"it names a block outside 0 … {self.spare - 1}")
        if not self.needed[slots].all():
            raise BadPlan("it gives a block to a slot that is free")
        # A pair's place in its row: the blocks already there, and the earlier pairs of the same slot.
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        counts = np.bincount(slots, minlength=len(self.needed))
        earlier = np.arange(len(ordered)) - (np.cumsum(counts) - counts)[ordered]
        places = self.blocks[ordered] + earlier
        width = self.tables.shape[1]
        if places.max() >= width:
            raise BadPlan(f"it gives a slot more than {width} blocks")
        flat = self.upload(np.stack([ordered * width + places, blocks[order]]))
        self.tables.view(-1).index_copy_(0, flat[0], flat[1].to(torch.int32))
        self.blocks += counts


def _advance_torch(slots: Slots, rows: Tensor) -> Decoding:
    positions, dead = slots.lengths[rows], slots.dead[rows]
    writes = slots.places(rows, positions).masked_fill_(dead, slots.spare * slots.page_size)
    slots.lengths[rows] = positions + ~dead
    return Decoding(slots.last[rows], positions, writes, (positions + 1).to(torch.int32))


def unpack(data: bytes, columns: int = 1) -> Longs:
    """The integers in a message, int64[n], or int64[n, columns] if that is more than one. Raises BadPlan if they do not
    come out even."""
    if len(data) % (4 * columns):
        raise BadPlan(f"{len(data)} bytes are no rows of {columns} int32")
    numbers = np.frombuffer(data, "<i4").astype(np.int64)
    return numbers if columns == 1 else numbers.reshape(-1, columns)
