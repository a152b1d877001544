"""The decoding rows of a step in one launch; `workers.slots.Slots.advance` says what it does."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from workers.slots import Decoding, Slots

_ROWS = 128


def advance(slots: "Slots", rows: Tensor) -> "Decoding":
    """See `workers.slots.Slots.advance`. Rows of the spare slot may come any number of times: they change nothing."""
    from workers.slots import Decoding

    count = len(rows)
    tokens, positions, writes = torch.empty((3, count), dtype=torch.int64, device=rows.device)
    lengths = torch.empty(count, dtype=torch.int32, device=rows.device)
    if count:
        _advance[(triton.cdiv(count, _ROWS),)](
            rows,
            slots.lengths,
            slots.dead,
            slots.last,
            slots.tables,
            tokens,
            positions,
            writes,
            lengths,
            count,
            slots.tables.stride(0),
            slots.spare * slots.page_size,
            PAGE=slots.page_size,
            ROWS=_ROWS,
        )
    return Decoding(tokens, positions, writes, lengths)


@triton.jit(do_not_specialize=["count"])
def _advance(
    rows_ptr,
    held_ptr,
    dead_ptr,
    last_ptr,
    tables_ptr,
    tokens_ptr,
    positions_ptr,
    writes_ptr,
    lengths_ptr,
    count,
    width,
    spare,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    slot = tl.load(rows_ptr + row, mask=there, other=0)
    held = tl.load(held_ptr + slot, mask=there, other=0)
    dead = tl.load(dead_ptr + slot, mask=there, other=1) != 0
    block = tl.load(tables_ptr + slot * width + held // PAGE, mask=there & ~dead, other=0).to(tl.int64)
    place = tl.where(dead, spare, block * PAGE + held % PAGE)
    tl.store(tokens_ptr + row, tl.load(last_ptr + slot, mask=there, other=0), mask=there)
    tl.store(positions_ptr + row, held, mask=there)
    tl.store(writes_ptr + row, place, mask=there)
    tl.store(lengths_ptr + row, (held + 1).to(tl.int32), mask=there)
    tl.store(held_ptr + slot, held + 1, mask=there & ~dead)
