"""What a load generator asks, and how: the server, the fields of each request, and the clients that send them."""

import contextlib
import json
import os
import shlex
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from bench.clients import Clients, count
from bench.limits import many_files
from bench.messages import Ask, Setup
from bench.server import Server
from toka.errors import ConfigError, StartError
from toka.model import ModelFolder

if TYPE_CHECKING:
    from bench.dataset import Request

PATHS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
USUAL_VOCABULARY = 120_000
"""Ids lie below it where nobody says how many there are."""
Count = Annotated[int, Meta(ge=1)]
Heat = Annotated[float, Meta(ge=0)]


class Target(Struct, frozen=True, kw_only=True):
    """A server, and what every request to it says."""

    backend: Annotated[
        Literal["openai", "openai-chat", "vllm"],
        Meta(description="which endpoint: openai and vllm are /v1/completions, openai-chat needs texts (custom)"),
    ] = "openai"
    base_url: Annotated[str | None, Meta(description="such as http://HOST:PORT; default: host and port")] = None
    host: Annotated[str, Meta(description="of the server")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535, description="of the server")] = 10210
    endpoint: Annotated[str | None, Meta(description="path; default: the backend's")] = None
    serve: Annotated[
        str | None,
        Meta(description="start a toka with these options for the run, such as 'model=DIR load_format=dummy'"),
    ] = None
    header: Annotated[str, Meta(description="further headers: NAME=VALUE …; OPENAI_API_KEY makes authorization")] = ""
    insecure: Annotated[bool, Meta(description="take any TLS certificate")] = False
    model: Annotated[str | None, Meta(description="its name in the API; default: the server's first")] = None
    vocab_size: Annotated[
        Annotated[int, Meta(ge=8)] | None,
        Meta(description="prompts have ids below it; default: the model's, else 120,000; 120,000 at most"),
    ] = None
    num_clients: Annotated[
        Count | None, Meta(description="client processes; default: by the streams and the cores")
    ] = None
    num_warmups: Annotated[int, Meta(ge=0, description="requests before those that count")] = 0
    ready_check_timeout_sec: Annotated[
        float, Meta(ge=0, description="seconds to wait for the server; 0: it must be there")
    ] = 0.0
    disable_tqdm: Annotated[bool, Meta(description="no progress bar; there is none without a terminal either")] = False
    request_id_prefix: Annotated[str | None, Meta(description="send X-Request-Id: this and the number")] = None
    extra_body: Annotated[str, Meta(description="further fields of each request, a JSON object")] = "{}"
    n: Annotated[Count | None, Meta(description="choices of each request; default: 1, or 64 of monkeys")] = None
    ignore_eos: Annotated[bool, Meta(description="every answer has exactly the tokens that were asked for")] = False
    temperature: Annotated[Heat | None, Meta(description="default: the server's")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="default: the server's")] = None
    top_k: Annotated[Annotated[int, Meta(ge=-1)] | None, Meta(description="default: the server's")] = None
    min_p: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="default: the server's")] = None
    frequency_penalty: Annotated[float | None, Meta(description="default: the server's")] = None
    presence_penalty: Annotated[float | None, Meta(description="default: the server's")] = None
    repetition_penalty: Annotated[float | None, Meta(description="default: the server's")] = None
    logprobs: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="log-probabilities of so many tokens")] = (
        None
    )


SENT = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs"),
)
"""Options that go into a request as they are, if they are given."""


class Reached(NamedTuple):
    """A server that answers."""

    url: str
    model: str
    vocab_size: int
    version: str | None
    """As /version says it."""


@contextmanager
def reached(target: Target) -> Iterator[Reached]:
    """The server that the options name, or one that is started and ends with the block.

    Raises ConfigError, StartError, or ServerEnded if the server that was started ends before it is ready.
    """
    many_files()
    if target.serve is None:
        yield _look(target, target.base_url or f"http://{target.host}:{target.port}")
        return
    if target.base_url is not None:
        raise ConfigError(f"serve={target.serve} and base_url={target.base_url}: either start a server or name one")
    with Server(*shlex.split(target.serve)) as server:
        yield _look(target, server.url)


def _look(target: Target, url: str) -> Reached:
    url = url.rstrip("/").removesuffix("/v1")
    deadline = time.monotonic() + target.ready_check_timeout_sec
    while True:
        try:
            cards = _get(target, f"{url}/v1/models")["data"]
            break
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() >= deadline:
                raise StartError(f"{url} does not answer as an OpenAI server does: {error}") from None
            time.sleep(0.2)
    about: dict[str, Any] = {}
    for path in ("/version", "/server_info"):  # not every server has them
        with contextlib.suppress(OSError, ValueError):
            about |= _get(target, url + path)
    card = next((one for one in cards if target.model in (None, one["id"])), None)
    if card is None:
        raise ConfigError(f"model={target.model}: {url} serves {', '.join(one['id'] for one in cards) or 'nothing'}")
    config = about.get("config")
    folders = [target.model, card.get("root"), config.get("model") if isinstance(config, dict) else None]
    said = about.get("vocab_size")  # a toka says it
    known = target.vocab_size or (said if isinstance(said, int) else None) or _vocab_size(folders)
    return Reached(url, card["id"], known, about.get("version"))


def _vocab_size(folders: Sequence[object]) -> int:
    """Of the first that is a model's folder on this machine."""
    for folder in folders:
        if isinstance(folder, str) and (Path(folder) / "config.json").is_file():
            with contextlib.suppress(StartError):
                return ModelFolder.load(Path(folder)).vocab_size
    return USUAL_VOCABULARY


def _get(target: Target, url: str) -> dict[str, Any]:
    """A JSON object. Raises OSError or ValueError."""
    context = ssl._create_unverified_context() if target.insecure and url.startswith("https:") else None
    request = urllib.request.Request(url, headers=headers(target))
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    if not isinstance(found, dict):
        raise ValueError(f"{url} answers with no object")
    return found


def headers(target: Target) -> dict[str, str]:
    """Those that the options and the environment ask for. Raises ConfigError."""
    found = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        found["authorization"] = f"Bearer {key}"
    for pair in shlex.split(target.header):
        name, equals, value = pair.partition("=")
        if not equals or not name or any(character in pair for character in "\r\n"):
            raise ConfigError(f"header={pair}: write NAME=VALUE")
        found[name.lower()] = value
    return found


def asks(
    target: Target, server: Reached, requests: "Sequence[Request]", *, stream: bool, times: Sequence[float] = ()
) -> list[Ask]:
    """The requests as they are sent, each at its time. Raises ConfigError for fields that cannot be."""
    try:
        extra = msgspec.json.decode(target.extra_body, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"extra_body={target.extra_body}: not a JSON object: {error}") from None
    fields: dict[str, object] = {"model": server.model}
    fields |= {name: value for name in SENT if (value := getattr(target, name)) is not None}
    if target.ignore_eos:
        fields["ignore_eos"] = True
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    chat = target.backend == "openai-chat"
    if chat and target.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": target.logprobs}
    made = []
    for index, one in enumerate(requests):
        body = fields | {"max_tokens": one.output_len}
        if one.n != 1:
            body["n"] = one.n
        if not chat:
            body["prompt"] = one.prompt
        elif isinstance(one.prompt, str):
            body["messages"] = [{"role": "user", "content": one.prompt}]
        else:
            raise ConfigError("backend=openai-chat: chat takes texts, not token ids: take dataset_name=custom")
        prefix = target.request_id_prefix
        made.append(
            Ask(
                index=index,
                at=times[index] if times else 0.0,
                body=msgspec.json.encode(body | extra),
                id="" if prefix is None else f"{prefix}{index}",
                n=one.n,
            )
        )
    return made


def clients(
    target: Target, server: Reached, streams: int, *, stream: bool, text: bool = False, ahead: bool = True
) -> Clients:
    """Client processes for at most so many requests at a time; `ahead`: their connections are opened before."""
    parts = urlsplit(server.url)
    tls = parts.scheme == "https"
    many = min(target.num_clients or count(streams, stream), max(streams, 1))
    setup = Setup(
        host=parts.hostname or target.host,
        port=parts.port or (443 if tls else 80),
        tls=tls,
        insecure=target.insecure,
        path=parts.path + (target.endpoint or PATHS[target.backend]),
        headers=headers(target),
        stream=stream,
        text=text,
        connections=-(-streams // many) if ahead else 0,
    )
    return Clients(setup, many)


def warmups(target: Target, requests: "Sequence[Request]") -> "list[Request]":
    """Requests like the first, with its ids turned round, so that no prompt finds what they leave in a cache."""
    first = requests[0]
    prompt = first.prompt[::-1] if isinstance(first.prompt, list) else first.prompt
    return [first._replace(prompt=prompt)] * target.num_warmups
