"""The proof that a scheduler's books balance. Tests ask for it after every step."""

from typing import TYPE_CHECKING

import numpy as np

from toka.core.seats import NO_SLOT

if TYPE_CHECKING:
    from toka.core.scheduler import Scheduler


def check(scheduler: "Scheduler") -> None:
    """Everything taken is owned by somebody, and by as many as count; nothing is lost. Raises AssertionError."""
    seats = scheduler.seats
    scheduler.pool.check(seats.row(seat) for seat in seats.taken())
    scheduler.tree.check()
    begun = scheduler._prefill.begun
    assert set(scheduler._prefill.leads.values()) <= set(begun), "waiting for a block that nobody will compute"
    running = sorted([*begun, *scheduler._decoding.tolist()])
    assert len(set(running)) == len(running), "a sequence is prefilling and decoding"
    slotted = [seat for seat in seats.taken() if seats.slot[seat] != NO_SLOT]
    assert running == slotted, "a slot without a running sequence, or the reverse"
    slots = sorted(seats.slot[running].tolist() + scheduler._prefill.slots)
    assert slots == list(range(scheduler.limits.max_seqs)), "slots lost or given twice"
    flying = np.zeros(seats.count, dtype=np.int32)
    for flight in scheduler._flights:
        np.add.at(flying, flight.roster, 1)
    assert (flying == seats.flying).all(), "rows in flight miscounted"
    for seat in seats.taken():
        sequence = seats.who(seat)
        assert sequence.seat == seat
        assert seats.account[seat] == sequence.account == scheduler.ledger.account(sequence)
        assert sequence.billed, f"{sequence} runs for nothing"
        assert seats.alive[seat] == (sequence.end is None), f"{sequence} is over and alive, or neither"
        if seats.alive[seat]:
            assert seats.scheduled[seat] - seats.returned[seat] == seats.flying[seat], f"{sequence} lost a result"
            assert seats.scheduled[seat] <= seats.limit[seat], f"{sequence} ran past its limit"
        else:
            assert seats.flying[seat] > 0, f"{sequence} drained and kept its seat"
        if seats.slot[seat] == NO_SLOT:
            assert seats.blocks[seat] == 0
            assert seats.flying[seat] > 0, f"{sequence} has neither a slot nor a result to come"
        else:
            assert scheduler.limits.blocks_for(int(seats.length[seat])) <= seats.blocks[seat], (
                f"{sequence} outgrew its blocks"
            )
    scheduler._waiting.check()
    for sequence in scheduler._waiting:
        assert sequence.end is None
        assert sequence.seat < 0, f"{sequence} waits and has a seat"
