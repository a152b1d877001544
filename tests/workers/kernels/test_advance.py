"""Decoding rows by the kernel, against those by torch."""

import torch

from workers.kernels.advance import advance
from workers.slots import Slots, _advance_torch


def filled(device: torch.device) -> Slots:
    """Four slots in the midst of their sequences, the second of them dead."""
    slots = Slots(4, 6, 32, 4, torch.device("cpu"), vocab_size=97)
    slots.tables[:4] = torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(4, 6).to(torch.int32)
    slots.lengths[:4] = torch.tensor([0, 7, 8, 23])
    slots.last[:4] = torch.tensor([70, 71, 72, 73])
    slots.dead[1] = True
    for name in ("tables", "lengths", "last", "dead"):
        setattr(slots, name, getattr(slots, name).to(device))
    return slots


def test_the_rows_of_torch(device: torch.device) -> None:
    """Tokens, positions, places and lengths, in any order of rows; and the slots are advanced alike."""
    for rows in ([], [2], [3, 1, 0, 2], [0, 4, 4, 4], [1, 4] * 90):
        ours, theirs = filled(device), filled(device)
        own = torch.tensor(rows, dtype=torch.int64, device=device)
        got, want = advance(ours, own), _advance_torch(theirs, own)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()
        assert ours.lengths.tolist() == theirs.lengths.tolist()
