"""Data sets are pure functions of a seed, with the lengths that they promise."""

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from bench.dataset import (
    Ids,
    Request,
    Workload,
    custom,
    generated_shared_prefix,
    monkeys,
    prefix_repetition,
    random_ids,
    sharegpt_like,
)
from toka.errors import ConfigError


class Totals(NamedTuple):
    requests: int
    sequences: int
    prompt_tokens: int
    output_tokens: int


def totals(requests: list[Request]) -> Totals:
    return Totals(
        len(requests),
        sum(one.n for one in requests),
        sum(len(one.prompt) for one in requests),
        sum(one.n * one.output_len for one in requests),
    )


def test_sharegpt_like_totals() -> None:
    """The figures that engines are compared by: 2,000 requests of seed 0."""
    assert totals(sharegpt_like()) == Totals(2000, 2000, 425_971, 401_498)


def test_monkeys_totals() -> None:
    """128 prompts × 64 samples of 200 tokens, 1,120 tokens a prompt, of which 1,024 are shared."""
    made = monkeys(seed=1)
    assert totals(made) == Totals(128, 8192, 143_360, 1_638_400)
    assert len({tuple(one.prompt[:1024]) for one in made}) == 1
    assert len({tuple(one.prompt[1024:]) for one in made}) == 128


def test_ids_never_change() -> None:
    """A figure of today is compared with one of last year: the ids are fixed to the last one."""
    digest = hashlib.sha256(msgspec.json.encode([sharegpt_like(50), monkeys(8, 1)])).hexdigest()
    assert digest == "a6e2773da922936a3c3f609b60088bc8af2d7e8833b165cfefffe93ed44cf1f2"


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: random_ids(20, seed, Ids(), input_len=30, output_len=9, range_ratio=0.5, prefix_len=4),
        lambda seed: sharegpt_like(20, seed),
        lambda seed: monkeys(8, seed),
        lambda seed: generated_shared_prefix(seed, Ids(), groups=3, per_group=4),
        lambda seed: prefix_repetition(20, seed, Ids(), prefixes=4),
    ],
    ids=["random", "sharegpt-like", "monkeys", "generated-shared-prefix", "prefix_repetition"],
)
def test_pure_functions_of_the_seed(make: Callable[[int], list[Request]]) -> None:
    """The same seed gives the same requests, another one others; all ids lie in the range."""
    assert make(5) == make(5) != make(6)
    assert all(1000 <= id < 120_000 for one in make(5) for id in one.prompt if isinstance(id, int))


def test_random_lengths_lie_around_what_was_asked() -> None:
    """From (1 - r) to (1 + r) of it, both ends included, and a prefix on top that all share."""
    made = random_ids(2000, 0, Ids(), input_len=10, output_len=4, range_ratio=0.5, prefix_len=3)
    assert {len(one.prompt) for one in made} == set(range(5 + 3, 15 + 3 + 1))
    assert {one.output_len for one in made} == {2, 3, 4, 5, 6}
    assert len({tuple(one.prompt[:3]) for one in made}) == 1
    exact = random_ids(10, 0, Ids(), input_len=10, output_len=4)
    assert {(len(one.prompt), one.output_len) for one in exact} == {(10, 4)}


def test_generated_shared_prefix_groups() -> None:
    """Each system prompt is shared by so many questions; in order, or shuffled; lengths from r · L to L."""
    ordered = generated_shared_prefix(0, Ids(), groups=6, per_group=5, system_len=20, question_len=7, ordered=True)
    systems = [tuple(one.prompt[:20]) for one in ordered]
    assert set(Counter(systems).values()) == {5}
    assert [systems.index(system) // 5 for system in systems] == [index // 5 for index in range(30)]
    shuffled = generated_shared_prefix(0, Ids(), groups=6, per_group=5, system_len=20, question_len=7)
    assert shuffled != ordered
    assert sorted(map(str, shuffled)) == sorted(map(str, ordered))
    ragged = generated_shared_prefix(0, Ids(), groups=40, per_group=20, output_len=10, range_ratio=0.5)
    assert {one.output_len for one in ragged} == {5, 6, 7, 8, 9, 10}


def test_prefix_repetition_shares_each_prefix_evenly() -> None:
    """`num_prompts // num_prefixes` prompts a prefix; fewer prompts than prefixes are refused."""
    made = prefix_repetition(23, 0, Ids(), prefixes=4, prefix_len=8, suffix_len=2)
    assert sorted(Counter(tuple(one.prompt[:8]) for one in made).values()) == [5, 5, 5, 5]
    with pytest.raises(ConfigError, match="has 4 prefixes"):
        prefix_repetition(3, 0, Ids(), prefixes=4)


def test_small_vocabularies() -> None:
    """Ids stay below the vocabulary's size, whatever it is."""
    for size in (8, 128, 49_152, 128_256):
        ids = Ids.of(size)
        drawn = [id for one in sharegpt_like(30, 0, ids) for id in one.prompt]
        assert isinstance(drawn[0], int)
        assert 0 < ids.low <= min(map(int, drawn)) <= max(map(int, drawn)) < size
    assert Ids.of(128_256) == Ids()


def write_lines(path: Path, *rows: object) -> Path:
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows) + b"\n\n")
    return path


def test_custom_rows(tmp_path: Path) -> None:
    """Texts or ids, with answers of one length or of each row's own, repeated or cut to the number that was asked."""
    path = write_lines(
        tmp_path / "rows.jsonl", {"prompt": "Hi", "output_tokens": 3}, {"prompt": [5, 6], "n": 2, "output_tokens": 4}
    )
    rows = custom(path, None, 0, output_len=None, shuffled=False)
    assert rows == [Request("Hi", 3), Request([5, 6], 4, 2)]
    assert {one.output_len for one in custom(path, None, 0)} == {256}
    assert len(custom(path, 7, 0)) == 7
    assert len(custom(path, 7, 0, oversample=False)) == 2
    assert len(custom(path, 1, 0)) == 1


def test_custom_files_that_are_none(tmp_path: Path) -> None:
    """The message names the file, and the line."""
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: No such file"):
        custom(tmp_path / "nowhere.jsonl", None, 0)
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "Hi"}, {"text": "Hi"})
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 2: .*prompt"):
        custom(path, None, 0)
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 1: output_tokens is missing"):
        custom(path, None, 0, output_len=None)
    with pytest.raises(ConfigError, match="no request"):
        custom(write_lines(tmp_path / "empty.jsonl"), None, 0)


def test_options_choose_the_data_set() -> None:
    """Each name with its defaults; `n` and `output_len` go over them."""
    assert totals(Workload(dataset_name="sharegpt-like").requests(Ids())) == totals(sharegpt_like())
    assert totals(Workload(dataset_name="monkeys").requests(Ids())) == Totals(128, 8192, 143_360, 1_638_400)
    assert totals(Workload(dataset_name="monkeys", n=2, output_len=3).requests(Ids())).output_tokens == 128 * 2 * 3
    assert totals(Workload(num_prompts=10).requests(Ids())) == Totals(10, 10, 10_240, 1280)
    assert totals(Workload(num_prompts=10, input_len=3, output_len=2).requests(Ids())) == Totals(10, 10, 30, 20)
    shared = Workload(dataset_name="generated-shared-prefix", gsp_num_groups=2, gsp_prompts_per_group=3)
    assert totals(shared.requests(Ids())) == Totals(6, 6, 6 * (2048 + 128), 6 * 256)
    repeated = Workload(dataset_name="prefix_repetition", num_prompts=20)
    assert totals(repeated.requests(Ids())) == Totals(20, 20, 20 * 512, 20 * 128)


def test_options_that_a_data_set_has_no_use_for() -> None:
    """They are refused, never ignored."""
    with pytest.raises(ConfigError, match="lengths of its own"):
        Workload(dataset_name="sharegpt-like", input_len=5).requests(Ids())
    with pytest.raises(ConfigError, match="gsp_num_groups"):
        Workload(dataset_name="generated-shared-prefix", num_prompts=5).requests(Ids())
    with pytest.raises(ConfigError, match="dataset_path"):
        Workload(dataset_name="custom").requests(Ids())
