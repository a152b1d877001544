"""One question on either endpoint, streamed or whole, and what came of it in one form."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.api.fakes import post
from toka.api.app import App

WAYS = [(path, stream) for path in ("completions", "chat/completions") for stream in (False, True)]
WAYS_IDS = ["text", "text stream", "chat", "chat stream"]
QUESTION = "Tell me."


@dataclass
class Seen:
    """One choice, whose chunks are joined."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    logprobs: Any = None
    """In the endpoint's shape, or arrays by name if they were packed."""
    finish: str = ""
    stop: Any = None
    usage: dict[str, Any] = field(default_factory=dict)
    chunks: list[Any] = field(default_factory=list)
    """The choice in each chunk of a stream."""


async def ask(app: App, path: str, stream: bool, *, choice: int = 0, top: int | None = None, **fields: Any) -> Seen:
    """Ask with token ids; `top` most probable tokens beside each."""
    chat = path.startswith("chat")
    body: dict[str, Any] = {"return_token_ids": True, "stream": stream}
    body |= {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": QUESTION}
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await post(app, path, body | fields)
    assert answer.status == 200, answer.content
    seen = Seen()
    events = answer.events if stream else [answer.json]
    for event in events:
        seen.usage = event.get("usage") or seen.usage
        seen.prompt = event.get("prompt_token_ids", seen.prompt)
        for one in event["choices"]:
            if one["index"] == choice:
                _add(seen, one)
    return seen


def _add(seen: Seen, one: Any) -> None:
    seen.chunks.append(one)
    seen.text += one["text"] if "text" in one else (one.get("delta") or one.get("message") or {}).get("content", "")
    seen.ids += one.get("token_ids", [])
    seen.prompt = one.get("prompt_token_ids", seen.prompt)
    seen.finish = one["finish_reason"] or seen.finish
    seen.stop = one.get("stop_reason") if one.get("stop_reason") is not None else seen.stop
    if one.get("logprobs"):
        new = {name: arrayed(value) for name, value in one["logprobs"].items() if value is not None}
        old = seen.logprobs
        seen.logprobs = new if old is None else {name: _joined(old[name], new[name]) for name in new}


def _joined(one: Any, other: Any) -> Any:
    return np.concatenate([one, other]) if isinstance(one, np.ndarray) else one + other


def arrayed(value: Any) -> Any:
    """An array where JSON has one in base64."""
    if not isinstance(value, dict) or "dtype" not in value:
        return value
    import base64

    data = base64.b64decode(value["data"], validate=True)
    return np.frombuffer(data, np.dtype(value["dtype"]).newbyteorder("<")).reshape(value["shape"])


def scored(seen: Seen) -> list[tuple[float, list[float]]]:
    """Of each token its log-probability, and those of the most probable ones, from either shape."""
    if "content" in seen.logprobs:
        return [(one["logprob"], [top["logprob"] for top in one["top_logprobs"]]) for one in seen.logprobs["content"]]
    own, tops = seen.logprobs["token_logprobs"], seen.logprobs["top_logprobs"]
    return [(one, list(top.values())) for one, top in zip(own, tops, strict=True)]
