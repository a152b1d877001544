"""W-LP, by a real model: the numbers are those that transformers has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.api.asked import WAYS, WAYS_IDS, Seen, ask, scored
from tests.api.fakes import post
from tests.api.local import serving
from workers import memory
from workers.models.decoder import Decoder

ways = pytest.mark.parametrize(("path", "stream"), WAYS, ids=WAYS_IDS)
LETTERS = list(range(97, 123))
Logits = Callable[[list[int]], Tensor]
"""Token ids to float32[n, vocab]: transformers' logits after each."""


def wanted(logits: Logits, seen: Seen) -> Tensor:
    """float32[answer, vocab]: the log-softmax in the place of each token of an answer."""
    return logits(seen.prompt + seen.ids).log_softmax(-1)[len(seen.prompt) - 1 : -1]


@ways
async def test_w_lp_1_by_a_real_model(tiny: Path, logits: Logits, path: str, stream: bool) -> None:
    """An entry for each sampled token, k most probable ones in falling order. W-LP-10: of the raw logits."""
    shaping: dict[str, Any] = {
        "temperature": 1.7,
        "logit_bias": {"97": 9},
        "presence_penalty": 1.5,
        "top_p": 0.9,
        "seed": 3,
    }
    async with serving(tiny) as (app, _):
        seen = await ask(app, path, stream, top=4, max_tokens=24, ignore_eos=True, **shaping)
    assert len(seen.ids) == len(scored(seen)) == 24
    rows = wanted(logits, seen)
    outside = 0
    for id, row, (own, top) in zip(seen.ids, rows, scored(seen), strict=True):
        assert own == pytest.approx(float(row[id]), abs=1e-4)
        assert top[:4] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
        assert top[:4] == sorted(top[:4], reverse=True)
        outside += id not in row.topk(4).indices
        # W-LP-5: completions have the sampled token as one more where it is not among them.
        assert len(top) == 4 + (path == "completions" and id not in row.topk(4).indices)
    assert 0 < outside < 24


@pytest.mark.parametrize("stream", [False, True])
async def test_w_lp_3_bytes_of_the_untrimmed_text(tiny: Path, stream: bool) -> None:
    """The bytes of all tokens join to the text and the stop string that was cut off, fragments of characters too."""
    chat = "chat/completions"
    cut: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "top": 0}
    async with serving(tiny) as (app, _):
        whole = await ask(app, chat, stream, **cut)
        data = b"".join(bytes(one["bytes"]) for one in whole.logprobs["content"])
        assert data.decode("utf-8", "replace") == whole.text
        assert "\ufffd" in whole.text
        letters = await ask(app, chat, stream, **cut, logit_bias={str(id): 50 for id in LETTERS})
        stop = letters.text[30:33]
        stopped = await ask(app, chat, stream, **cut, logit_bias={str(id): 50 for id in LETTERS}, stop=[stop])
    data = b"".join(bytes(one["bytes"]) for one in stopped.logprobs["content"])
    assert data.decode() == stopped.text + stop == letters.text[: len(stopped.text) + 3]
    assert len(stopped.logprobs["content"]) == len(stopped.ids) == stopped.usage["completion_tokens"]


@ways
async def test_w_lp_4_no_infinity(tiny: Path, path: str, stream: bool) -> None:
    """What cannot come has -9999.0, and JSON stays JSON."""
    async with serving(tiny, logprobs_mode="processed") as (app, _):
        seen = await ask(app, path, stream, top=5, max_tokens=4, ignore_eos=True, allowed_token_ids=[97, 98], seed=1)
    for _, top in scored(seen):
        assert top[2:] == [-9999.0] * 3
        assert min(top[:2]) > -9999.0


@pytest.mark.parametrize("stream", [False, True])
async def test_w_lp_6_echo_by_a_real_model(tiny: Path, logits: Logits, stream: bool) -> None:
    """The prompt's tokens first, scored as transformers scores them; offsets are places in the text that came."""
    async with serving(tiny, max_tokens_per_forward=5) as (app, _):
        seen = await ask(app, "completions", stream, top=2, echo=True, max_tokens=4, ignore_eos=True, seed=2)
    tokens = seen.prompt + seen.ids
    rows = logits(tokens).log_softmax(-1)
    found = seen.logprobs
    assert {len(column) for column in found.values()} == {len(tokens)}
    assert (found["token_logprobs"][0], found["top_logprobs"][0], found["text_offset"][0]) == (None, None, 0)
    for place in range(1, len(tokens)):
        row = rows[place - 1]
        assert found["token_logprobs"][place] == pytest.approx(float(row[tokens[place]]), abs=1e-4)
        best = sorted(found["top_logprobs"][place].values(), reverse=True)[:2]
        assert best == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    assert seen.text.startswith("Tell me.")
    for place in range(len(seen.prompt)):
        assert seen.text[found["text_offset"][place]] == found["tokens"][place]


@pytest.mark.parametrize("stream", [False, True])
async def test_w_lp_7_prompt_only_by_a_real_model(tiny: Path, logits: Logits, stream: bool) -> None:
    """echo with max_tokens 0: nothing is answered, and the prompt is scored."""
    async with serving(tiny) as (app, _):
        seen = await ask(app, "completions", stream, top=1, echo=True, max_tokens=0)
    assert (seen.text, seen.ids, seen.finish) == ("Tell me.", [], "length")
    assert seen.usage["completion_tokens"] == 0
    rows = logits(seen.prompt).log_softmax(-1)
    wanted = rows[:-1].gather(1, torch.tensor(seen.prompt[1:])[:, None]).squeeze(1)
    assert seen.logprobs["token_logprobs"][1:] == pytest.approx(wanted.tolist(), abs=1e-4)


async def test_w_lp_8_greedy_by_float_equality(tiny: Path, logits: Logits) -> None:
    """lm-eval calls a continuation greedy if each token's float equals the best one's; so does transformers' argmax."""
    greedy = [1, 2, 3]
    for _ in range(8):
        greedy.append(int(logits(greedy)[-1].argmax()))
    prompts = [greedy, [1, 2, 3, *range(40, 48)]]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    async with serving(tiny) as (app, _):
        choices = (await post(app, "completions", body)).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, prompt, expected in zip(choices, prompts, (True, False), strict=True):
        own, tops = choice["logprobs"]["token_logprobs"][3:-1], choice["logprobs"]["top_logprobs"][3:-1]
        assert len(own) == 8
        assert all(one == max(top.values()) for one, top in zip(own, tops, strict=True)) is expected
        best = logits(prompt).argmax(-1)[2:-1].tolist()
        assert [one == max(top.values()) for one, top in zip(own, tops, strict=True)] == [
            a == b for a, b in zip(prompt[3:], best, strict=True)
        ]


@ways
async def test_w_lp_10_processed(tiny: Path, logits: Logits, path: str, stream: bool) -> None:
    """With logprobs_mode=processed they are of what was drawn from: bias, penalties, temperature and masks."""
    fields: dict[str, Any] = {"temperature": 0.7, "logit_bias": {"97": 3, "98": -100}, "frequency_penalty": 0.5}
    async with serving(tiny, logprobs_mode="processed") as (app, _):
        seen = await ask(app, path, stream, top=3, max_tokens=12, ignore_eos=True, top_k=20, seed=9, **fields)
    rows = logits(seen.prompt + seen.ids)[len(seen.prompt) - 1 : -1].clone()
    for place, (own, top) in enumerate(scored(seen)):
        row = rows[place]
        row[97] += 3
        row[98] -= 100
        row -= 0.5 * torch.bincount(torch.tensor(seen.ids[:place], dtype=torch.int64), minlength=len(row))
        row /= 0.7
        row[row < row.topk(20).values[-1]] = -torch.inf
        row = row.log_softmax(-1)
        assert own == pytest.approx(float(row[seen.ids[place]]), abs=1e-4)
        assert top[:3] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_w_lp_11_entries_come_with_their_text(tiny: Path, path: str) -> None:
    """Text that may become a stop string is held back, and with it the entries of its tokens."""
    fields: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "logit_bias": {str(id): 50 for id in LETTERS},
    }
    async with serving(tiny) as (app, _):
        whole = await ask(app, path, False, top=1, **fields)
        never = whole.text[10:13] + "!"
        streamed = await ask(app, path, True, top=1, stop=[never, whole.text[20:22] + "?"], **fields)
    assert streamed.text == whole.text
    assert streamed.logprobs == whole.logprobs
    held = 0
    for chunk in streamed.chunks:
        text = chunk["text"] if "text" in chunk else chunk["delta"].get("content", "")
        found = chunk["logprobs"] or {"content": [], "tokens": []}
        names = found["tokens"] if "tokens" in found else [one["token"] for one in found["content"]]
        assert "".join(names) == text
        held += len(text) > 1
    assert held


async def test_w_lp_12_bounded_and_uncached(tiny: Path, logits: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are scored in slices of a bounded number of logits, and take nothing from the prefix cache."""
    monkeypatch.setattr(memory, "MAX_LOGITS", 7 * 259)
    most, original = 0, Decoder.logits

    def watched(self: Decoder, hidden: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return original(self, hidden)

    monkeypatch.setattr(Decoder, "logits", watched)
    prompt = [(7 * place) % 250 for place in range(200)]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    async with serving(tiny, max_tokens_per_forward=64) as (app, _):
        plain = [(await post(app, "completions", body)).json["usage"] for _ in range(2)]
        scored = (await post(app, "completions", body | {"prompt_logprobs": 2})).json
    assert plain[1]["prompt_tokens_details"]["cached_tokens"] > 100
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert most == 7
    rows = logits(prompt).log_softmax(-1)
    found = scored["choices"][0]["prompt_logprobs"]
    assert len(found) == 200
    for place in range(1, 200):
        assert found[place][str(prompt[place])]["logprob"] == pytest.approx(
            float(rows[place - 1, prompt[place]]), abs=1e-4
        )


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_prompt_logprobs_have_real_ranks(tiny: Path, logits: Logits, path: str) -> None:
    """The rank of a prompt's token is its place among all tokens, however far down."""
    async with serving(tiny) as (app, _):
        chat = path.startswith("chat")
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Tell me."}
        answer = await post(app, path, body | {"prompt_logprobs": 2, "max_tokens": 1, "return_token_ids": True})
    choice = answer.json["choices"][0]
    found = answer.json["prompt_logprobs"] if chat else choice["prompt_logprobs"]
    prompt = answer.json["prompt_token_ids"] if chat else choice["prompt_token_ids"]
    rows = logits(prompt)
    ranks = []
    for place in range(1, len(prompt)):
        row, own = rows[place - 1], found[place][str(prompt[place])]
        assert own["rank"] == int((row > row[prompt[place]]).sum()) + 1
        assert {one["rank"] for one in found[place].values()} == {1, 2, own["rank"]}
        ranks.append(own["rank"])
    assert max(ranks) > 20
