"""The sampling defaults of a model's makers: for what a request leaves open, and never stronger than it."""

from typing import Any

import pytest

from tests.api.conftest import CREATED, NAMES
from tests.api.fakes import FakeServer, FakeTemplate, post
from toka.api.app import App, create_app
from toka.config import Config
from toka.request import Sampling
from toka.text.tokenizer import Tokenizer

MAKERS = Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
NEUTRAL: dict[str, float] = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
BOTH: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi"},
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture
def app(server: FakeServer, template: FakeTemplate, tokenizer: Tokenizer) -> App:
    """Of a model whose makers have an opinion."""
    return create_app(Config(), server, tokenizer, template, NAMES, CREATED, MAKERS)


@pytest.mark.parametrize("path", list(BOTH))
async def test_b87_what_is_absent_or_null_is_as_the_makers_have_it(app: App, server: FakeServer, path: str) -> None:
    """Spelling the defaults out changes nothing."""
    spelled = {name: getattr(MAKERS, name) for name in NEUTRAL}
    for fields in ({}, dict.fromkeys(NEUTRAL), spelled):
        assert (await post(app, path, BOTH[path] | fields)).status == 200
    assert [request.sampling for request in server.requests] == [MAKERS] * 3


@pytest.mark.parametrize("path", list(BOTH))
@pytest.mark.parametrize("name", list(NEUTRAL))
async def test_b87_what_the_request_says_wins(app: App, server: FakeServer, path: str, name: str) -> None:
    """Also a value that asks for nothing; the other fields keep their defaults."""
    assert (await post(app, path, BOTH[path] | {name: NEUTRAL[name]})).status == 200
    [request] = server.requests
    for field in NEUTRAL:
        assert getattr(request.sampling, field) == (NEUTRAL[name] if field == name else getattr(MAKERS, field))


@pytest.mark.parametrize("path", list(BOTH))
async def test_b87_greedy_is_greedy(app: App, server: FakeServer, path: str) -> None:
    """A temperature of 0 is not taken for an absent one."""
    assert (await post(app, path, BOTH[path] | {"temperature": 0})).status == 200
    assert server.requests[0].sampling.temperature == 0
