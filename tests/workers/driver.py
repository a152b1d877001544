"""An engine in small: plans steps for a worker's slots until every sequence has its tokens, and gives these back."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from toka.wire import NO_TOKEN, Admit, Plan, Sampling, pack
from workers.batch import build
from workers.slots import Slots
from workers.step import Step

GREEDY = Sampling(temperature=0.0)


@dataclass
class Ask:
    """A sequence that is wanted."""

    prompt: Sequence[int]
    count: int
    """Tokens of its answer."""
    sampling: Sampling = GREEDY
    seed: int = 0
    answer: list[int] = field(default_factory=list)


class Driver:
    """Runs sequences over `slots` and `step`, in chunks of at most `tokens` a step, beside decodes, in blocks whose ids
    are in no order."""

    def __init__(self, slots: Slots, step: Step, tokens: int = 48, seed: int = 0) -> None:
        self.slots, self.step, self.tokens = slots, step, tokens
        self.random = Random(seed)
        self.free_blocks = list(range(slots.spare))
        self.random.shuffle(self.free_blocks)
        self.numbers = itertools.count()

    @torch.inference_mode()
    def run(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The answers, in the order of the asks."""
        waiting = list(asks)
        free = list(range(self.slots.max_slots))
        running: dict[int, Ask] = {}
        filled: dict[int, int] = {}
        planned: dict[int, int] = {}
        blocks: dict[int, list[int]] = {}
        ended: list[int] = []  # in the step before
        while waiting or running:
            admits, chunks, roster, appends = [], [], [], []
            for slot in ended:
                self.free_blocks += blocks.pop(slot)
            releases, ended = ended, []
            free += releases
            while waiting and free and self.random.random() < 0.7:
                slot = free.pop(self.random.randrange(len(free)))
                running[slot], filled[slot], planned[slot] = waiting.pop(0), 0, 0
                blocks[slot] = self._take(len(running[slot].prompt))
                admits.append(self._admit(slot, running[slot], blocks[slot]))
            room = self.tokens
            decode = [slot for slot in running if planned[slot]]
            for slot, ask in running.items():
                if not planned[slot] and room:
                    size = min(self.random.randint(1, room), len(ask.prompt) - filled[slot])
                    chunks += [slot, filled[slot], size]
                    filled[slot], room = filled[slot] + size, room - size
                    if filled[slot] == len(ask.prompt):
                        roster.append(slot)
            for slot in decode:
                need = len(running[slot].prompt) + planned[slot]
                while len(blocks[slot]) * self.slots.page_size < need:
                    (block,) = self._take(1)
                    blocks[slot].append(block)
                    appends += [slot, block]
            self.random.shuffle(decode)
            roster += decode
            plan = Plan(
                epoch=0,
                step=next(self.numbers),
                releases=pack(releases),
                admits=admits,
                appends=pack(appends),
                chunks=pack(chunks),
                decode=pack(decode),
            )
            self.slots.apply(plan)
            ids = self.step.run(build(plan, self.slots)).ids.tolist()
            for slot, token in zip(roster, ids, strict=True):
                assert token != NO_TOKEN, "nothing stops here"
                running[slot].answer.append(token)
                planned[slot] += 1
                if planned[slot] == running[slot].count:
                    del running[slot]
                    ended.append(slot)
        return [ask.answer for ask in asks]

    def _take(self, tokens: int) -> list[int]:
        """Blocks for so many tokens."""
        count = -(-tokens // self.slots.page_size)
        assert count <= len(self.free_blocks), "the cache is large enough for every test"
        return [self.free_blocks.pop() for _ in range(count)]

    def _admit(self, slot: int, ask: Ask, blocks: list[int]) -> Admit:
        return Admit(
            slot=slot,
            ids=pack(ask.prompt),
            blocks=pack(blocks),
            seed=ask.seed,
            prompt_len=len(ask.prompt),
            sampling=ask.sampling,
        )
