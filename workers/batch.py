"""A plan becomes tensors: which tokens the step runs, where their keys and values go, and what each of them sees.

A step has a row for each chunk of a prompt, in the order of the plan, and behind these one for each decoding slot. The
host knows all about the chunks and uploads it in one piece. Of the decoding rows it knows the slots alone: plans run
ahead of results, so their tokens and positions are taken on the device, from what earlier steps left in `Slots`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka.wire import Plan
from workers.slots import BadPlan, Longs, Roster, Slots, unpack


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as tensors, all on the device. T tokens in R rows (sequences); S of the rows are sampled."""

    tokens: Tensor
    """int64[T]: token ids."""
    positions: Tensor
    """int64[T]: position of each token in its sequence."""
    writes: Tensor
    """int64[T]: flat place in the KV cache (block · page_size + offset) where the token's key and value go. Rows that
    are dead on the device write to the spare block."""
    starts: Tensor
    """int32[R + 1]: first token of each row, cumulative."""
    lengths: Tensor
    """int32[R]: keys each row attends to, the ones this step writes included."""
    tables: Tensor
    """int32[R, most blocks of a row in this step]: block ids; the rest is the spare block."""
    num_prefill_rows: int
    """The first rows are chunks of any number of tokens; the rest decode one token each."""
    max_length: int
    """An upper bound of `lengths`, known on the host."""
    samples: Tensor
    """int64[S]: the tokens whose logits are sampled."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch, and what it means for the slots."""

    batch: Batch
    rows: Tensor
    """int64[R]: the slot of each row."""
    after: Tensor
    """int64[R]: tokens of each row that are in the cache once the step has run."""
    roster: Roster
    """The slots that are sampled, in the order of `batch.samples`: the wire's roster."""


def build(plan: Plan, slots: Slots) -> Work:
    """The step of a plan that `slots` has applied. Raises BadPlan."""
    if not plan.chunks:
        return _decode_only(slots)
    chunks = unpack(plan.chunks, 3)
    owners, starts, sizes = chunks.T
    ends = starts + sizes
    _check(chunks, slots)
    finals = np.flatnonzero(ends == slots.needed[owners])
    decode = slots.decode
    slots.extend(owners, ends)
    slots.extend(decode.host, slots.bound[decode.host] + 1)
    max_length = int(max(ends.max(), slots.bound[decode.host].max(initial=0)))

    # Everything that only the host knows travels in one copy.
    first = np.cumsum(sizes) - sizes
    prefilled, decoding = int(sizes.sum()), len(decode.host)
    where = np.arange(prefilled) - np.repeat(first - starts, sizes)  # the position of each token in its sequence
    parts = [
        np.concatenate([_ids(slots, *chunk) for chunk in chunks.tolist()]),
        where,
        np.repeat(owners, sizes),
        owners,
        ends,
        owners[finals],
        np.concatenate([first, np.arange(prefilled, prefilled + decoding + 1)]),
        np.concatenate([(first + sizes - 1)[finals], np.arange(prefilled, prefilled + decoding)]),
    ]
    sent = slots.upload(np.concatenate(parts))
    tokens, positions, token_slots, chunk_slots, chunk_ends, final_slots, row_starts, samples = torch.split(
        sent, [len(part) for part in parts]
    )

    slots.prefilled(owners[finals])
    own = _decoding(slots)
    rows = torch.cat([chunk_slots, decode.slots])
    lengths = torch.cat([chunk_ends, own.positions + 1]).to(torch.int32)
    roster = decode
    if len(finals):
        roster = slots.roster(np.concatenate([owners[finals], decode.host]), torch.cat([final_slots, decode.slots]))
    batch = Batch(
        tokens=torch.cat([tokens, own.tokens]),
        positions=torch.cat([positions, own.positions]),
        writes=torch.cat([_places(slots, token_slots, positions), own.writes]),
        starts=row_starts.to(torch.int32),
        lengths=lengths,
        tables=_tables(slots, rows, max_length),
        num_prefill_rows=len(chunks),
        max_length=max_length,
        samples=samples,
    )
    return Work(batch=batch, rows=rows, after=torch.cat([chunk_ends, own.after]), roster=roster)


def _decode_only(slots: Slots) -> Work:
    decode = slots.decode
    slots.extend(decode.host, slots.bound[decode.host] + 1)
    max_length = int(slots.bound[decode.host].max(initial=0))
    own = _decoding(slots)
    count = torch.arange(len(decode.host) + 1, device=slots.device)
    batch = Batch(
        tokens=own.tokens,
        positions=own.positions,
        writes=own.writes,
        starts=count.to(torch.int32),
        lengths=(own.positions + 1).to(torch.int32),
        tables=_tables(slots, decode.slots, max_length),
        num_prefill_rows=0,
        max_length=max_length,
        samples=count[:-1],
    )
    return Work(batch=batch, rows=decode.slots, after=own.after, roster=decode)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The decode rows of a step, one token each: int64[D]."""

    tokens: Tensor
    positions: Tensor
    writes: Tensor
    after: Tensor


def _decoding(slots: Slots) -> _Decoding:
    own = slots.decode.slots
    positions, dead = slots.lengths[own], slots.dead[own]
    spare = slots.spare * slots.page_size
    # A dead row still runs, since the host does not know that it is dead: it reads what it may, writes to the spare
    # block and stays where it is.
    writes = _places(slots, own, positions).masked_fill_(dead, spare)
    return _Decoding(tokens=slots.last[own], positions=positions, writes=writes, after=positions + ~dead)


def _places(slots: Slots, owners: Tensor, positions: Tensor) -> Tensor:
    """Flat places in the KV cache of tokens at `positions` of the sequences in slots `owners`, both int64[T]."""
    blocks = slots.tables[owners, positions // slots.page_size].to(torch.int64)
    return blocks * slots.page_size + positions % slots.page_size


def _tables(slots: Slots, rows: Tensor, max_length: int) -> Tensor:
    return slots.tables[:, : -(-max_length // slots.page_size)].index_select(0, rows)


def _ids(slots: Slots, slot: int, start: int, size: int) -> Longs:
    ids = slots.ids[slot]
    assert ids is not None, "checked: the slot still has something to prefill"
    return ids[start : start + size]


def _check(chunks: Longs, slots: Slots) -> None:
    owners, starts, sizes = chunks.T
    if owners.min() < 0 or owners.max() >= len(slots.needed):
        raise BadPlan(f"it names a slot outside 0 … {len(slots.needed) - 1}")
    if len(np.unique(owners)) < len(owners):
        raise BadPlan("it has two chunks of one slot")
    if slots.ready[owners].any() or not slots.needed[owners].all():
        raise BadPlan("it prefills a slot that has nothing to prefill")
    if starts.min() < 0 or sizes.min() < 1 or (starts + sizes > slots.needed[owners]).any():
        raise BadPlan("it prefills tokens that its sequence does not have")
