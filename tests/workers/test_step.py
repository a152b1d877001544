"""Whole steps over a model that can be checked by hand, against one sequence at a time in plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from tests.workers.arithmetic import VOCAB, Model, admit, build, greedy
from toka.wire import NO_TOKEN, Admit, Plan, pack
from workers.batch import build as build_batch
from workers.sampling import SamplingRows, sample
from workers.slots import Slots
from workers.step import Step


def run(parts: tuple[Slots, Step], **fields: object) -> list[int]:
    """What one plan samples."""
    slots, step = parts
    plan = Plan(epoch=0, step=0, **fields)  # type: ignore[arg-type]  # each test gives fields of a plan
    slots.apply(plan)
    ids = step.run(build_batch(plan, slots)).ids
    assert ids.dtype == torch.int32
    return [int(token) for token in ids]


def test_a_sequence_from_prompt_to_answer() -> None:
    """Chunks fill the cache, the last one yields a token, and each decode the next, into blocks that come later."""
    parts = build()
    assert run(parts, admits=[admit(1, [3, 1, 4, 1, 5, 9], [2, 0])], chunks=pack([1, 0, 4])) == []
    out = run(parts, chunks=pack([1, 4, 2]))
    out += run(parts, decode=pack([1]))
    out += run(parts)
    out += run(parts, appends=pack([1, 9]))
    assert out == greedy([3, 1, 4, 1, 5, 9], 4)


def test_a_stop_id_is_returned_once() -> None:
    """The stop itself is a token like others; what follows is NO_TOKEN, and the length stands still."""
    parts = build()
    prompt = [3, 1, 4, 1]
    expected = greedy(prompt, 3)
    out = run(parts, admits=[admit(0, prompt, [2, 0], stops=[expected[1]])], chunks=pack([0, 0, 4]))
    for _ in range(4):
        out += run(parts, decode=pack([0]))
    assert out == [*expected[:2], NO_TOKEN, NO_TOKEN, NO_TOKEN]
    assert int(parts[0].lengths[0]) == 5


def test_a_stop_may_end_the_first_token() -> None:
    """A prompt whose first token stops it is dead from the next step on."""
    parts = build()
    (first,) = greedy([3, 1], 1)
    assert run(parts, admits=[admit(0, [3, 1], [2], stops=[first])], chunks=pack([0, 0, 2])) == [first]
    assert run(parts, decode=pack([0])) == [NO_TOKEN]


def test_a_dead_row_leaves_a_shared_step_alone() -> None:
    """Others go on beside it."""
    parts = build()
    stop = greedy([3, 1], 1)
    both = [admit(0, [3, 1], [2], stops=stop), admit(1, [5], [3])]
    out = [run(parts, admits=both, chunks=pack([0, 0, 2, 1, 0, 1]))]
    out += [run(parts, decode=pack([1, 0])), run(parts)]
    first, second, third = greedy([5], 3)
    assert out == [[*stop, first], [second, NO_TOKEN], [third, NO_TOKEN]]


def test_a_slot_without_decode_in_a_step_keeps_its_place() -> None:
    """A sequence may pause for a step, and goes on where it was."""
    parts = build()
    out = run(parts, admits=[admit(0, [3, 1], [2])], chunks=pack([0, 0, 2]))
    assert run(parts, admits=[admit(1, [7], [3])], chunks=pack([1, 0, 1]), decode=b"") == greedy([7], 1)
    out += run(parts, decode=pack([0]))
    assert out == greedy([3, 1], 2)


def test_a_step_without_rows_samples_nothing() -> None:
    """It still runs and answers."""
    assert run(build(), decode=b"") == []


def drawn(tokens: Sequence[int], count: int, **fields: float) -> list[int]:
    """The tokens that sampling one sequence alone gives, one by one."""
    tokens = list(tokens)
    start = len(tokens)
    for _ in range(count):
        logits = Model().logits(torch.tensor(greedy(tokens, 1)))
        rows = SamplingRows(
            temperature=torch.tensor([fields["temperature"]]),
            top_k=torch.tensor([int(fields["top_k"])], dtype=torch.int32),
            top_p=torch.tensor([fields["top_p"]]),
            min_p=torch.zeros(1),
            seed=torch.tensor([int(fields["seed"])]),
            choice=torch.tensor([int(fields["choice"])]),
            position=torch.tensor([len(tokens)]),
            greedy_only=False,
            plain=False,
        )
        tokens.append(int(sample(logits, rows)))
    return tokens[start:]


HOT = {"temperature": 3.0, "top_k": 90, "top_p": 0.95, "seed": 12345, "choice": 3}


def test_noise_depends_on_the_tokens_before_and_nothing_else() -> None:
    """A sampled sequence is the same alone, beside others, in another slot and after a preemption."""
    expected = drawn([3, 1, 4], 6, **HOT)
    parts = build()
    both = [admit(3, [3, 1, 4], [2, 6], **HOT), admit(1, [5], [3, 4])]
    out = [run(parts, admits=both, chunks=pack([1, 0, 1, 3, 0, 3]))[1]]
    out += [run(parts, decode=pack([3, 1]))[0], run(parts)[0]]
    # Preempted: what it has made comes back behind its prompt.
    whole = [3, 1, 4, *out]
    again = admit(0, whole, [7, 8, 9], prompt_len=3, **HOT)
    out += run(parts, releases=pack([3]), admits=[again], chunks=pack([0, 0, len(whole)]), decode=b"")
    out += run(parts, decode=pack([0])) + run(parts)
    assert out == expected
    assert len(set(expected)) > 2


def test_the_warm_up_leaves_nothing_behind() -> None:
    """It writes to the spare block only, and slots are as they were."""
    slots, step = parts = build(page_size=4, num_blocks=16)
    step.warm_up(10, 3)
    step.warm_up(4, 4)
    assert int(slots.lengths.sum()) == int(slots.last[:-1].sum()) == int(slots.dead[:-1].sum()) == 0
    assert (step._attention.cache[: 16 * 4] == -1_000_003).all()  # type: ignore[attr-defined]  # of the fake
    assert run(parts, admits=[admit(0, [3], [0])], chunks=pack([0, 0, 1])) == greedy([3], 1)


@dataclass
class Story:
    """One sequence of the random story: what it should return, and how far it has come."""

    prompt: list[int]
    stops: list[int]
    admitted: Admit
    blocks: list[int]
    expected: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    prefilled: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        tokens = greedy(self.prompt, 30)
        end = next((place for place, token in enumerate(tokens) if token in self.stops), len(tokens))
        self.expected = tokens[: end + 1] + [NO_TOKEN] * 30

    def reach(self, slot: int, length: int, page: int, free: list[int]) -> list[int]:
        """Take what is missing of the blocks for `length` tokens: (slot, block) pairs, flat."""
        more = [free.pop() for _ in range(len(self.blocks), -(-length // page))]
        self.blocks += more
        return [number for block in more for number in (slot, block)]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_story(seed: int) -> None:
    """Sequences come, are prefilled in pieces, decode or pause, get blocks, stop by themselves, and leave; slots and
    blocks are given on within a plan. Each returns what it would have returned alone."""
    random = Random(seed)
    page = random.choice([1, 3, 4])
    slots, step = parts = build(max_slots=5, max_blocks=64, num_blocks=200, page_size=page)
    free_slots, free_blocks = list(range(5)), list(range(200))
    random.shuffle(free_blocks)
    running: dict[int, Story] = {}
    finished = 0
    before: list[int] | None = None
    for _ in range(120):
        releases = [s for s, one in running.items() if one.steps and random.random() < (0.9 if one.steps > 20 else 0.1)]
        for slot in releases:
            gone = running.pop(slot)
            finished += 1
            free_slots.append(slot)
            free_blocks += gone.blocks
        admits, chunks, decode, appends = [], [], [], []
        while free_slots and random.random() < 0.6:
            slot = free_slots.pop()
            prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 15))]
            stops = random.sample(range(VOCAB), random.choice([0, 1, 9]))
            blocks = [free_blocks.pop() for _ in range(random.randint(0, -(-len(prompt) // page)))]
            admits.append(admit(slot, prompt, blocks, stops=stops))
            running[slot] = Story(prompt, stops, admits[-1], blocks)
        finals = []
        for slot in random.sample(sorted(running), len(running)):
            one = running[slot]
            left = len(one.prompt) - one.prefilled
            if left and random.random() < 0.8:
                size = random.randint(1, left)
                appends += one.reach(slot, one.prefilled + size, page, free_blocks)
                chunks += [slot, one.prefilled, size]
                one.prefilled += size
                if size == left:
                    finals.append(slot)
            elif not left and random.random() < 0.8:
                appends += one.reach(slot, len(one.prompt) + one.steps, page, free_blocks)
                decode.append(slot)
        same = decode == before and random.random() < 0.5
        out = run(
            parts,
            releases=pack(releases),
            admits=admits,
            appends=pack(appends),
            chunks=pack(chunks),
            decode=None if same else pack(decode),
        )
        before = decode
        roster = finals + decode
        assert len(out) == len(roster)
        for slot, token in zip(roster, out, strict=True):
            one = running[slot]
            one.out.append(token)
            one.steps += 1
            assert one.out == one.expected[: one.steps]
    assert finished > 10
    assert slots.spare == 200
    assert step is parts[1]


def penalised(prompt: Sequence[int], count: int, presence: float, blocked: int, min_tokens: int) -> list[int]:
    """The greedy answer with a presence penalty, and without `blocked` at first, by hand."""
    tokens: list[int] = []
    for _ in range(count):
        logits = [0.0] * VOCAB
        logits[greedy([*prompt, *tokens], 1)[0]] = 10.0
        for token in set(tokens):
            logits[token] -= presence
        if len(tokens) < min_tokens:
            logits[blocked] = -float("inf")
        tokens.append(logits.index(max(logits)))
    return tokens


def test_penalties_and_min_tokens_go_on_after_a_preemption() -> None:
    """Counts and the number of generated tokens are those of the whole answer, in another slot and beside others."""
    prompt = [0, 0]
    expected = penalised(prompt, 6, presence=20.0, blocked=1, min_tokens=4)
    assert expected != greedy(prompt, 6)
    fields = {"presence_penalty": 20.0, "min_tokens": 4, "blocked": pack([1]), "prompt_len": 2}
    parts = build()
    both = [admit(3, prompt, [2, 6], **fields), admit(1, [5], [3, 4])]
    out = [run(parts, admits=both, chunks=pack([1, 0, 1, 3, 0, 2]))[1]]
    second = run(parts, decode=pack([3, 1]))
    third = run(parts)
    out += [second[0], third[0]]
    assert [second[1], third[1]] == greedy([5], 3)[1:]
    whole = [*prompt, *out]
    again = admit(0, whole, [7, 8, 9], **fields)
    out += run(parts, releases=pack([3]), admits=[again], chunks=pack([0, 0, len(whole)]), decode=b"")
    out += run(parts, decode=pack([0])) + run(parts)
    assert out == expected
