"""A plan becomes tensors: which tokens the step runs, where their keys and values go, and what each of them sees.

A step has a row for each chunk of a prompt, in the order of the plan, and behind these one for each decoding slot. It
is built in two halves:

* `build`, on the host: checks the plan, and uploads in one piece all that only the host knows, which is all there is to
  know of the chunks;
* `assemble`, on the device: the decoding rows, of which the host knows the slots alone. Plans run ahead of results, so
  their tokens and positions are taken from what earlier steps left in `Slots`. A step without chunks needs nothing
  else, so this half can be recorded once and replayed (graphs.py).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka.wire import Plan
from workers.compact import Longs
from workers.groups import Layout, Shared
from workers.scores import Part, Prompts
from workers.slots import BadPlan, Roster, Slots, unpack

_NONE: Longs = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as tensors, on the device unless said otherwise. T tokens in R rows (sequences): P chunks of any number
    of tokens, then D decoding rows of one token each. S of the rows are sampled."""

    tokens: Tensor
    """int64[T]: token ids."""
    positions: Tensor
    """int64[T]: position of each token in its sequence."""
    writes: Tensor
    """int64[T]: flat place in the KV cache (block · page_size + offset) where the token's key and value go. Rows that
    are dead on the device write to the spare block."""
    rows: Tensor
    """int64[R]: the slot of each row, which is its row of `tables`."""
    tables: Tensor
    """int32[slots, blocks]: block ids of every slot; the rest is the spare block."""
    lengths: Tensor
    """int32[R]: keys each row attends to, the ones this step writes included."""
    samples: Tensor
    """int64[S]: the tokens whose logits are sampled."""
    sizes: Longs
    """int64[P], on the host: tokens of each chunk."""
    ends: Longs
    """int64[P], on the host: keys each chunk attends to, as in `lengths`."""
    bounds: Longs | None
    """int64[D], on the host: upper bounds of the decoding rows' `lengths`; None where the batch is being recorded, to
    be replayed for any lengths."""
    shared: Shared | None = None
    """Keys that several decoding rows attend to together; None: nothing is to be read so."""

    @property
    def prefilled(self) -> int:
        """Tokens in chunks: the first of the T."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True)
class Chunks:
    """Parts of prompts: P of them with N tokens together, beside D decoding rows."""

    sizes: Longs
    """int64[P], on the host: tokens of each."""
    ends: Longs
    """int64[P], on the host: its slot's tokens that are in the cache once the step has run."""
    slots: Tensor
    """int64[P]."""
    lengths: Tensor
    """int64[P]: `ends`, on the device."""
    tokens: Tensor
    """int64[N]."""
    positions: Tensor
    """int64[N]."""
    owners: Tensor
    """int64[N]: the slot of each token."""
    samples: Tensor
    """int64[S]: see `Batch.samples`."""
    prompts: Prompts | None
    """Tokens of their prompts that are to be scored; None: none."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step, as far as the host knows it."""

    chunks: Chunks | None
    """None: the step only decodes."""
    decode: Roster
    """The decoding rows."""
    bounds: Longs
    """int64[D], on the host: see `Batch.bounds`."""
    roster: Roster
    """The slots that are sampled, in the order of `Batch.samples`: the wire's roster."""
    layout: Layout | None
    """What the decoding rows share; the same object as long as it is the same."""


def build(plan: Plan, slots: Slots) -> Work:
    """The step of a plan that `slots` has applied. Raises BadPlan."""
    decode = slots.decode
    if not plan.chunks:
        slots.extend(decode.host, slots.bound[decode.host] + 1)
        return Work(None, decode, slots.bound[decode.host], decode, slots.layout)
    chunks = unpack(plan.chunks, 3)
    owners, starts, sizes = chunks.T
    ends = starts + sizes
    _check(chunks, slots)
    finals = np.flatnonzero(ends == slots.needed[owners])
    slots.extend(owners, ends)
    slots.extend(decode.host, slots.bound[decode.host] + 1)

    # Everything that only the host knows travels in one copy.
    first = np.cumsum(sizes) - sizes
    prefilled, decoding = int(sizes.sum()), len(decode.host)
    parts = [
        np.concatenate([_ids(slots, *chunk) for chunk in chunks.tolist()]),
        np.arange(prefilled) - np.repeat(first - starts, sizes),  # the position of each token in its sequence
        np.repeat(owners, sizes),
        owners,
        ends,
        owners[finals],
        np.concatenate([(first + sizes - 1)[finals], np.arange(prefilled, prefilled + decoding)]),
    ]
    sent = slots.upload(np.concatenate(parts))
    tokens, positions, token_slots, chunk_slots, chunk_ends, final_slots, samples = torch.split(
        sent, [len(part) for part in parts]
    )
    prompts = _prompts(chunks, first, slots)
    slots.prefilled(owners[finals])
    roster = decode
    if len(finals):
        roster = slots.roster(np.concatenate([owners[finals], decode.host]), torch.cat([final_slots, decode.slots]))
    return Work(
        chunks=Chunks(
            sizes=sizes,
            ends=ends,
            slots=chunk_slots,
            lengths=chunk_ends,
            tokens=tokens,
            positions=positions,
            owners=token_slots,
            samples=samples,
            prompts=prompts,
        ),
        decode=decode,
        bounds=slots.bound[decode.host],
        roster=roster,
        layout=slots.layout,
    )


def assemble(work: Work, slots: Slots) -> Batch:
    """The step's tensors. From here on `slots.lengths` is what it will be once the step has run."""
    chunks = work.chunks
    shared = work.layout and work.layout.send(slots.upload)
    if chunks is None:
        return assemble_decode(work.decode.slots, slots, work.bounds, shared)
    slots.lengths[chunks.slots] = chunks.lengths
    own = slots.advance(work.decode.slots)
    return Batch(
        tokens=torch.cat([chunks.tokens, own.tokens]),
        positions=torch.cat([chunks.positions, own.positions]),
        writes=torch.cat([slots.places(chunks.owners, chunks.positions), own.writes]),
        rows=torch.cat([chunks.slots, work.decode.slots]),
        tables=slots.tables,
        lengths=torch.cat([chunks.lengths.to(torch.int32), own.lengths]),
        samples=chunks.samples,
        sizes=chunks.sizes,
        ends=chunks.ends,
        bounds=work.bounds,
        shared=shared,
    )


def assemble_decode(rows: Tensor, slots: Slots, bounds: Longs | None, shared: Shared | None = None) -> Batch:
    """A step of decoding rows alone: int64[D] slots, their `Batch.bounds` and what they share."""
    own = slots.advance(rows)
    return Batch(
        tokens=own.tokens,
        positions=own.positions,
        writes=own.writes,
        rows=rows,
        tables=slots.tables,
        lengths=own.lengths,
        samples=slots.numbers[: len(rows)],
        sizes=_NONE,
        ends=_NONE,
        bounds=bounds,
        shared=shared,
    )


def _prompts(chunks: Longs, first: Longs, slots: Slots) -> Prompts | None:
    """What chunks, int64[n, 3], whose tokens begin at `first`, int64[n], of the batch, score of their prompts."""
    asking = np.flatnonzero(slots.prompt_logprobs[chunks[:, 0]] >= 0)
    parts, rows, targets = [], [], []
    for chunk in asking.tolist():
        slot, start, size = chunks[chunk].tolist()
        # A token is scored by the one before it, the last of the prompt by the last but one.
        count = min(size, int(slots.prompt_len[slot]) - 1 - start)
        if count > 0:
            positions = np.arange(start + 1, start + 1 + count)
            parts.append(Part(chunk, positions, int(slots.prompt_logprobs[slot])))
            rows.append(first[chunk] + np.arange(count))
            targets.append(_ids(slots, slot, start + 1, count))
    if not parts:
        return None
    sent = slots.upload(np.stack([np.concatenate(rows), np.concatenate(targets)]))
    return Prompts(parts, sent[0], sent[1])


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
