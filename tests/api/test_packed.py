"""`logprobs_format: "packed"`: log-probabilities as arrays."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.api.asked import QUESTION, WAYS, WAYS_IDS, arrayed, ask
from tests.api.fakes import FakeServer, post
from tests.api.local import serving
from toka.api.app import App

PAGE = Path(__file__).resolve().parents[2] / "docs" / "logprobs.md"
PACKED: dict[str, Any] = {
    "logprobs_format": "packed",
    "temperature": 1,
    "seed": 4,
    "max_tokens": 20,
    "ignore_eos": True,
}


@pytest.fixture
def array() -> Callable[[Any], NDArray[Any]]:
    """The example of the documents, run as it stands there."""
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    decode: Callable[[Any], NDArray[Any]] = names["array"]
    return decode


@pytest.mark.parametrize(("path", "stream"), WAYS, ids=WAYS_IDS)
async def test_the_same_numbers_as_in_lists(tiny: Path, path: str, stream: bool) -> None:
    """A row a token, float for float what the lists say; the chunks' arrays, one behind the other, are the whole."""
    async with serving(tiny) as (app, _):
        listed = await ask(app, "chat/completions", False, top=3, **PACKED | {"logprobs_format": "lists"})
        messages = {"prompt": listed.prompt} if path == "completions" else {}
        packed = await ask(app, path, stream, top=3, **PACKED | messages)
    assert (packed.text, packed.ids) == (listed.text, listed.ids)
    found, entries = packed.logprobs, listed.logprobs["content"]
    assert set(found) == {"token_ids", "token_logprobs", "top_ids", "top_logprobs"}
    assert found["token_ids"].tolist() == listed.ids
    assert found["token_logprobs"].tolist() == [one["logprob"] for one in entries]
    assert found["top_logprobs"].tolist() == [[top["logprob"] for top in one["top_logprobs"]] for one in entries]
    assert found["top_ids"].shape == (20, 3)
    for id, own, ids, top in zip(*found.values(), strict=True):
        assert id not in ids or top[ids.tolist().index(id)] == own
    if stream:
        assert sum(bool(chunk["logprobs"]) for chunk in packed.chunks) > 3


async def test_the_example_decodes_an_answer(tiny: Path, array: Callable[[Any], NDArray[Any]]) -> None:
    """The five lines of the documents are all that a client needs."""
    async with serving(tiny) as (app, _):
        answer = await post(app, "completions", PACKED | {"prompt": QUESTION, "logprobs": 5})
    logprobs = answer.json["choices"][0]["logprobs"]
    top = array(logprobs["top_logprobs"])
    assert top.dtype == np.float32
    assert top.shape == (20, 5)
    assert (np.diff(top) <= 0).all()
    assert array(logprobs["token_ids"]).dtype == array(logprobs["top_ids"]).dtype == np.int32


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_comes_first(tiny: Path, stream: bool) -> None:
    """Its first token has NaN and −1; the others have what the lists say."""
    async with serving(tiny) as (app, _):
        listed = await ask(app, "completions", False, top=2, echo=True, **PACKED | {"logprobs_format": "lists"})
        found = (await ask(app, "completions", stream, top=2, echo=True, **PACKED)).logprobs
    assert found["token_ids"].tolist() == listed.prompt + listed.ids
    assert np.isnan(found["token_logprobs"][0])
    assert np.isnan(found["top_logprobs"][0]).all()
    assert found["top_ids"][0].tolist() == [-1, -1]
    assert found["token_logprobs"][1:].tolist() == listed.logprobs["token_logprobs"][1:]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_prompt_logprobs_are_packed_too(tiny: Path, path: str) -> None:
    """With ranks; as many most probable tokens as were asked for there, which may not be those of the answer."""
    chat = path.startswith("chat")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
    body = body if chat else {"prompt": QUESTION, "logprobs": 1, "echo": True}
    async with serving(tiny) as (app, _):
        lists = (await post(app, path, PACKED | body | {"logprobs_format": "lists", "prompt_logprobs": 4})).json
        arrays = (await post(app, path, PACKED | body | {"prompt_logprobs": 4})).json
    wanted, found = [one if chat else one["choices"][0] for one in (lists, arrays)]
    decoded = {name: arrayed(value) for name, value in found["prompt_logprobs"].items()}
    assert decoded["top_ids"].shape == (len(wanted["prompt_logprobs"]), 4)
    assert arrayed(arrays["choices"][0]["logprobs"]["top_ids"]).shape[1] == 1
    for place, entry in enumerate(wanted["prompt_logprobs"]):
        id = str(decoded["token_ids"][place])
        if place == 0:
            assert entry is None
            assert (decoded["ranks"][0], decoded["top_ids"][0, 0]) == (0, -1)
        else:
            assert decoded["ranks"][place] == entry[id]["rank"]
            assert decoded["token_logprobs"][place] == np.float32(entry[id]["logprob"])
            best = {str(other): rank for rank, other in enumerate(decoded["top_ids"][place].tolist(), 1)}
            assert {other: one["rank"] for other, one in entry.items()} == best | {id: entry[id]["rank"]}


async def test_several_choices_have_their_own(tiny: Path) -> None:
    """Each choice its own rows, among those that the engine ranks for best_of as well."""
    body = PACKED | {"prompt": [[1, 2], [3]], "n": 2, "logprobs": 0}
    async with serving(tiny) as (app, _):
        lists = (await post(app, "completions", body | {"logprobs_format": "lists", "best_of": 3})).json["choices"]
        arrays = (await post(app, "completions", body | {"best_of": 3})).json["choices"]
    for one, other in zip(lists, arrays, strict=True):
        assert arrayed(other["logprobs"]["token_logprobs"]).tolist() == one["logprobs"]["token_logprobs"]
        assert arrayed(other["logprobs"]["top_ids"]).shape == (20, 0)
    assert len({str(one["logprobs"]) for one in arrays}) == 4


async def test_answers_without_tokens_have_no_rows(app: App, server: FakeServer) -> None:
    """max_tokens 0 without echo: arrays of length 0."""
    body = {"prompt": "Hi", "max_tokens": 0, "logprobs": 2, "logprobs_format": "packed"}
    found = (await post(app, "completions", body)).json["choices"][0]["logprobs"]
    assert found["token_logprobs"] == {"dtype": "float32", "shape": [0], "data": ""}
    assert arrayed(found["top_ids"]).shape == (0, 2)
    assert not server.requests


async def test_what_it_is_of_must_be_asked_for(app: App) -> None:
    """And a format that there is not is refused with those that there are."""
    for more in ({}, {"best_of": 2}, {"echo": True}):  # best_of ranks by log-probabilities, and shows none
        alone = await post(app, "completions", {"prompt": "Hi", "logprobs_format": "packed"} | more)
        assert (alone.status, alone.error["param"], alone.error["code"]) == (400, "logprobs_format", "invalid_value")
    other = await post(app, "completions", {"prompt": "Hi", "logprobs": 1, "logprobs_format": "arrays"})
    assert other.error["message"].endswith("supported values are 'lists', 'packed'.")
    usual = await post(app, "completions", {"prompt": "Hi", "logprobs": 1, "logprobs_format": "lists"})
    assert set(usual.json["choices"][0]["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
