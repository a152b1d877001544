"""W-CHAT-10 to 15, by a real model: how tokens are chosen and what ends an answer; both endpoints, streamed or not."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.api.asked import WAYS, WAYS_IDS, ask, scored
from tests.api.fakes import FakeServer, post
from tests.api.local import serving
from tests.fakes import IM_END, write_tiny_model
from toka.api.app import App

ways = pytest.mark.parametrize(("path", "stream"), WAYS, ids=WAYS_IDS)
paths = pytest.mark.parametrize("path", ["completions", "chat/completions"])
Logits = Callable[[list[int]], Tensor]
ENDLESS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
A, B = 97, 98


def biased(**ids: float) -> dict[str, float]:
    """A logit bias by letters."""
    return {str(ord(letter)): value for letter, value in ids.items()}


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to which all tokens are the same."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "level")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@ways
async def test_w_chat_10_zero_is_argmax(tiny: Path, logits: Logits, path: str, stream: bool) -> None:
    """At temperature 0 and below 1e-5 each token is transformers' argmax, whatever seed, top_p and top_k say."""
    async with serving(tiny) as (app, _):
        plain = await ask(app, path, stream, temperature=0, **ENDLESS)
        others: list[dict[str, Any]] = [
            {"temperature": 0, "seed": 7, "top_p": 0.1, "top_k": 3},
            {"temperature": 9e-6, "seed": 8, "min_p": 0.5},
        ]
        for fields in others:
            assert (await ask(app, path, stream, **fields, **ENDLESS)).ids == plain.ids
    best = logits(plain.prompt + plain.ids).argmax(-1)
    assert plain.ids == best[len(plain.prompt) - 1 : -1].tolist()


@ways
async def test_w_chat_10_ties_go_to_the_lowest_id(level: Path, path: str, stream: bool) -> None:
    """Of equal logits the first."""
    async with serving(level) as (app, _):
        assert (await ask(app, path, stream, temperature=0, **ENDLESS)).ids == [0] * 16
        tied = await ask(app, path, stream, temperature=0, logit_bias=biased(c=2, b=2, z=1), **ENDLESS)
    assert tied.ids == [B] * 16


@paths
@pytest.mark.parametrize(("value", "side"), [(2.01, "above_max"), (-0.01, "below_min")])
async def test_w_chat_10_range(app: App, server: FakeServer, path: str, value: float, side: str) -> None:
    """0 to 2."""
    body = {"prompt": "Hi"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    error = (await post(app, path, body | {"temperature": value})).error
    assert (error["param"], error["code"]) == ("temperature", f"decimal_{side}_value")
    assert (await post(app, path, body | {"temperature": 2})).status == 200


@paths
@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("top_p", (0.001, 1), (0, 1.001)),
        ("top_k", (-1, 0, 1), (-2,)),
        ("min_p", (0, 1), (-0.1, 1.1)),
        ("repetition_penalty", (0.01, 3), (0, -1)),
        ("presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
    ],
)
async def test_w_chat_11_ranges(app: App, path: str, field: str, good: Any, bad: Any) -> None:
    """The ends of each range are served, and what lies beyond is refused by name."""
    body = {"prompt": "Hi"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    for value in good:
        assert (await post(app, path, body | {field: value})).status == 200
    for value in bad:
        answer = await post(app, path, body | {field: value})
        assert (answer.status, answer.error["param"]) == (400, field)


@ways
async def test_w_chat_11_filters(tiny: Path, logits: Logits, path: str, stream: bool) -> None:
    """top_k −1 and 0 are off; what leaves one token is greedy; what leaves k gives tokens of the k best."""
    async with serving(tiny) as (app, _):
        off = [(await ask(app, path, stream, seed=5, top_k=value, **ENDLESS)).ids for value in (-1, 0)]
        free = (await ask(app, path, stream, seed=5, **ENDLESS)).ids
        greedy = (await ask(app, path, stream, temperature=0, **ENDLESS)).ids
        narrow: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}]
        ones = [(await ask(app, path, stream, seed=5, **fields, **ENDLESS)).ids for fields in narrow]
        five = await ask(app, path, stream, seed=5, top_k=5, temperature=2, **ENDLESS)
    assert off == [free, free]
    assert ones == [greedy] * 3
    assert free != greedy
    best = logits(five.prompt + five.ids).topk(5).indices[len(five.prompt) - 1 : -1]
    assert all(id in row for id, row in zip(five.ids, best.tolist(), strict=True))


@ways
async def test_w_chat_11_penalties(tiny: Path, logits: Logits, path: str, stream: bool) -> None:
    """The repetition penalty goes by prompt and answer, the two others by the answer alone."""
    repetition, presence, frequency = 1.3, 0.9, 0.7
    penalties: dict[str, Any] = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
    }
    async with serving(tiny) as (app, _):
        seen = await ask(app, path, stream, temperature=0, **penalties, **ENDLESS)
        plain = await ask(app, path, stream, temperature=0, **ENDLESS)
    tokens = list(seen.prompt)
    for id in seen.ids:
        row = logits(tokens)[-1]
        there = torch.tensor(sorted(set(tokens)))
        row[there] = torch.where(row[there] < 0, row[there] * repetition, row[there] / repetition)
        answer = torch.bincount(torch.tensor(tokens[len(seen.prompt) :], dtype=torch.int64), minlength=len(row))
        row -= frequency * answer + presence * (answer > 0)
        assert id == int(row.argmax())
        tokens.append(id)
    assert seen.ids != plain.ids


@ways
async def test_w_chat_12_seed(tiny: Path, path: str, stream: bool) -> None:
    """The same seed gives the same ids, alone or in company; choice i has noise of its own, which n does not change."""
    async with serving(tiny, max_seqs_per_forward=4) as (app, _):
        alone = await ask(app, path, stream, seed=11, **ENDLESS)
        crowd = [ask(app, path, stream, seed=seed, **ENDLESS) for seed in (1, 11, 2, 11, 3, 4)]
        ids = [seen.ids for seen in await asyncio.gather(*crowd)]
        choices = [(await ask(app, path, stream, choice=index, seed=11, n=3, **ENDLESS)).ids for index in range(3)]
        unseeded = [(await ask(app, path, stream, **ENDLESS)).ids for _ in range(2)]
    assert ids[1] == ids[3] == alone.ids == choices[0]
    assert len({str(one) for one in (*ids, *choices[1:], *unseeded)}) == 9


@ways
async def test_w_chat_13_logit_bias(tiny: Path, path: str, stream: bool) -> None:
    """−100 bans, 100 forces, and a bias is added before the temperature divides."""
    async with serving(tiny, logprobs_mode="processed") as (app, _):
        greedy = await ask(app, path, stream, temperature=0, **ENDLESS)
        banned = {str(id): -100 for id in set(greedy.ids)}
        other = await ask(app, path, stream, temperature=0, logit_bias=banned, **ENDLESS)
        forced = await ask(app, path, stream, temperature=2, logit_bias=biased(a=100), **ENDLESS)
    assert not set(other.ids) & set(greedy.ids)
    assert forced.ids == [A] * 16


@ways
async def test_w_chat_13_before_the_temperature(level: Path, path: str, stream: bool) -> None:
    """Two tokens whose logits differ by the bias b have log-probabilities that differ by b / temperature."""
    async with serving(level, logprobs_mode="processed") as (app, _):
        fields: dict[str, Any] = {"temperature": 0.5, "allowed_token_ids": [A, B], "logit_bias": biased(a=1), "seed": 1}
        seen = await ask(app, path, stream, top=2, **fields, **ENDLESS)
    assert set(seen.ids) == {A, B}
    for _, (most, least) in scored(seen):
        assert most - least == pytest.approx(2, abs=1e-5)


@ways
async def test_w_chat_14_the_earliest_match_ends(level: Path, path: str, stream: bool) -> None:
    """Stop strings are looked for in the answer's text, across tokens; the one that is complete first is cut off."""
    letters: dict[str, Any] = {"temperature": 0, "logit_bias": biased(a=1), "max_tokens": 12, "ignore_eos": True}
    async with serving(level) as (app, _):
        one = await ask(app, path, stream, stop="aaa", **letters)
        assert (one.text, one.finish, one.stop, one.usage["completion_tokens"]) == ("", "stop", "aaa", 3)
        kept = await ask(app, path, stream, stop=["aaaa", "aa"], include_stop_str_in_output=True, **letters)
        assert (kept.text, kept.stop, kept.usage["completion_tokens"]) == ("aa", "aa", 2)
        # The question ends with "me.": what it says ends nothing.
        other = await ask(app, path, stream, stop=["me.", "e.a", "ab"], **letters)
        assert (other.text, other.finish, other.stop) == ("a" * 12, "length", None)
        fallen = await ask(
            app, path, stream, stop="ba", frequency_penalty=1, **letters | {"logit_bias": biased(a=3, b=1.5)}
        )
        # a 3, 2, 1 against b 1.5, 0.5: a a b a …
        assert (fallen.text, fallen.stop, len(fallen.ids)) == ("aa", "ba", 4)


@paths
@pytest.mark.parametrize(
    ("stop", "param", "code"),
    [
        ("", "stop", "empty_string"),
        (["a", ""], "stop[1]", "empty_string"),
        (["x"] * 17, "stop", "array_above_max_length"),
    ],
)
async def test_w_chat_14_refused(app: App, path: str, stop: object, param: str, code: str) -> None:
    """An empty string would end everything; more than 16 are too many, 16 are not."""
    body = {"prompt": "Hi"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = await post(app, path, body | {"stop": stop})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)
    assert (await post(app, path, body | {"stop": ["x"] * 16})).status == 200


@ways
async def test_w_chat_15_ignore_eos(level: Path, path: str, stream: bool) -> None:
    """An end-of-sequence token ends an answer unless it is to be ignored: then the cap does."""
    eos: dict[str, Any] = {"temperature": 0, "logit_bias": {str(IM_END): 5}, "max_tokens": 6}
    async with serving(level) as (app, _):
        ended = await ask(app, path, stream, **eos)
        capped = await ask(app, path, stream, ignore_eos=True, **eos)
    assert (ended.ids, ended.text, ended.finish, ended.stop) == ([IM_END], "", "stop", None)
    assert (capped.ids, capped.text, capped.finish) == ([IM_END] * 6, "", "length")


@ways
async def test_w_chat_15_stop_token_ids(level: Path, path: str, stream: bool) -> None:
    """An id of the client's own ends an answer and is not part of its text."""
    fields: dict[str, Any] = {
        "temperature": 0,
        "logit_bias": biased(a=3, b=2.5),
        "frequency_penalty": 1,
        "max_tokens": 6,
    }
    async with serving(level) as (app, _):
        seen = await ask(app, path, stream, stop_token_ids=[B, 50], **fields)
    assert (seen.text, seen.ids, seen.finish, seen.stop) == ("a", [A, B], "stop", B)


@ways
async def test_w_chat_15_min_tokens(level: Path, path: str, stream: bool) -> None:
    """Before it neither EOS nor a stop id is sampled, and no stop string is honoured."""
    async with serving(level) as (app, _):
        ends: dict[str, Any] = {"temperature": 0, "logit_bias": {str(IM_END): 9, str(A): 8, str(B): 7}, "max_tokens": 9}
        masked = await ask(app, path, stream, min_tokens=3, stop_token_ids=[A], **ends)
        assert (masked.ids, masked.text, masked.stop) == ([B, B, B, IM_END], "bbb", None)
        strings: dict[str, Any] = {"temperature": 0, "logit_bias": biased(a=9), "max_tokens": 9, "min_tokens": 5}
        late = await ask(app, path, stream, stop="aa", **strings)
        assert (late.text, late.stop, late.usage["completion_tokens"]) == ("a" * 5, "aa", 7)


@paths
async def test_w_chat_15_min_tokens_beyond_the_context(app: App, server: FakeServer, path: str) -> None:
    """More than the context holds cannot be had, whether or not max_tokens is given."""
    body = {"prompt": "Hi"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    for fields in ({}, {"max_tokens": 4}):
        answer = await post(app, path, body | {"min_tokens": 2048} | fields)
        assert (answer.status, answer.error["param"]) == (400, "min_tokens")
    assert not server.requests
