"""Which of two kernels a step's chunks go to."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.paged import Pages
from workers.attention.by_length import LONG, ByLength
from workers.batch import Batch


class Named:
    """A half that writes down its name."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def plan(self, batch: Batch) -> None:
        self.told.append(f"plan {self.name}")

    def run(self, q: Tensor, layer: int, out: Tensor) -> None:
        self.told.append(f"run {self.name}")


@pytest.mark.parametrize(
    ("sizes", "ends", "name"),
    [
        ([256] * 32, [256] * 32, "short"),
        ([2 * LONG - 2], [2 * LONG - 2], "short"),
        ([2 * LONG], [2 * LONG], "long"),
        ([64], [64 + LONG], "long"),
        ([1000, 24], [1000, 50_000], "long"),
    ],
)
def test_long_rows_go_to_the_kernel_for_them(sizes: list[int], ends: list[int], name: str) -> None:
    """By the keys that a query of the step attends to on average; every layer goes where the plan went."""
    batch = Pages(4, 4).batch({"a": [1]}, {})
    batch = dataclasses.replace(batch, sizes=np.array(sizes), ends=np.array(ends))
    told: list[str] = []
    half = ByLength(Named("short", told), Named("long", told))
    half.plan(batch)
    half.run(torch.empty(0), 0, torch.empty(0))
    assert told == [f"plan {name}", f"run {name}"]
